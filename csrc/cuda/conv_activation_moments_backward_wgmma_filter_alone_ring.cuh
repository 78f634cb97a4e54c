// The input planes of the Hopper kernel of the filter's gradient alone, through a ring in shared
// memory. See conv_activation_moments_backward_wgmma_filter_alone.cuh.
#pragma once

#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_filter_alone_config.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_stage.cuh"

namespace convnormpool {

// Quads that follow each other, for all warpgroups the same number but for one. A stage has two
// boxes: where a quad spans two samples, its rows of the second are in the second box.
template <class Config>
struct WgmmaInputRing<Config, false> : WgmmaInputStages<Config> {
  using Stages = WgmmaInputStages<Config>;
  using Stages::p, Stages::place, Stages::turn;

  int index, end;  // that in work, and the first of another warpgroup

  // Called by all threads of the warpgroup.
  __device__ __forceinline__ WgmmaInputRing(const WgmmaInputParams& params, const TensorMap* m,
                                            int g)
      : Stages(params, m, g) {
    const int all = p.segments * p.quads, groups = int(gridDim.x) * Config::kWarpgroups;
    const int share = all / groups, extra = all - share * groups;
    const int own = g * int(gridDim.x) + int(blockIdx.x);
    index = own * share + min(own, extra);
    end = index + share + (own < extra);
    if (threadIdx.x % 128 == 0 && exists()) {
      *place(0) = place_of(index);
      for (int i = 0; i < Config::kStages; ++i) copy(*place(0), i, i);
    }
    __syncwarp();
    Stages::meet();
  }

  __device__ __forceinline__ bool exists() const { return index < end; }
  __device__ __forceinline__ bool last() const { return index + 1 == end; }
  __device__ __forceinline__ void next_quad() {
    ++index;
    turn ^= 1;
  }

  __device__ __forceinline__ WgmmaInputPlace place_of(int i) const {
    const int segment = i / p.quads, row = 4 * (i - segment * p.quads);
    const int n = row / wgmma_sample_rows(p.P);
    return {p.first_column + 32 * segment - p.padding[2],
            row - n * wgmma_sample_rows(p.P) - p.padding[1], -p.padding[0], n};
  }

  // Of a quad: its first output row, in its first sample; whether it begins one, and whether it has
  // rows of a second one.
  __device__ __forceinline__ int first_row(const WgmmaInputPlace& at) const {
    return at.h + p.padding[1];
  }
  __device__ __forceinline__ bool begins(const WgmmaInputPlace& at) const {
    return first_row(at) < 4;
  }
  __device__ __forceinline__ bool spans(const WgmmaInputPlace& at) const {
    return first_row(at) + 4 > wgmma_sample_rows(p.P);
  }

  __device__ __forceinline__ void copy(const WgmmaInputPlace& at, int to, int plane) const {
    const bool both = spans(at);
    mbarrier_arrive_expect(this->full(to), both ? 2 * Config::kCopyBytes : Config::kCopyBytes);
    const uint32_t box = this->stage_address(to);
    tensor_copy(box, this->map, this->full(to), at.w, at.h, at.d + plane, 0, at.n);
    if (both) {
      tensor_copy(box + uint32_t(Config::kBoxBytes), this->map, this->full(to), at.w,
                  at.h - wgmma_sample_rows(p.P), at.d + plane, 0, at.n + 1);
    }
  }

  // Writes down where the quad after this one is: during its first plane, before any refill.
  __device__ __forceinline__ void announce() {
    if (threadIdx.x % 128 == 96) {
      *place(1) = last() ? WgmmaInputPlace{0, 0, 0, -1} : place_of(index + 1);
    }
    __syncwarp();
  }

  template <int kCount>
  __device__ __forceinline__ void refill(int last) {
    Stages::template refill_stages<kCount>(
        last, [&](const WgmmaInputPlace& at, int to, int plane) { copy(at, to, plane); });
  }
};

}  // namespace convnormpool
