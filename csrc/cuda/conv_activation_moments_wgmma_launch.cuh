// The launch of the Hopper window kernel for one kind of operand. Each kind has a file of its own,
// so that they compile side by side, and only where the build is for 9.0a: setup.py then defines
// CONVNORMPOOL_SM_90A for all files.
#pragma once

#include <cuda.h>

#include <cstring>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/conv_activation_moments_plan.h"
#include "cuda/conv_activation_moments_wgmma.cuh"

namespace convnormpool {

// Everything that crosses to a launch.
struct WgmmaLaunch {
  Problem problem;
  const void* x;
  const void* w;
  const void* bias;  // or null
  float2* partials;
  float* mean;
  float* m2;
  int64_t activation;
  int32_t sm_count;
  cudaStream_t stream;
};

constexpr size_t kWgmmaMostSharedBytes = 227 * 1024;

// What was fastest (benchmarks/NOTES.md) of what ptxas compiles with few spills. 16-bit operands
// leave registers for a fourth warpgroup, general activations take what it or, beside the scales
// of a split 4x4x4 filter, the third one would have.
constexpr int wgmma_warpgroups(WgmmaOperand operand, int extent, bool hardswish) {
  const bool split = operand == WgmmaOperand::kSplit;
  if (hardswish) return split || operand == WgmmaOperand::kTf32 ? 3 : 4;
  return split && extent == 4 ? 2 : 3;
}
constexpr WgmmaOverlap wgmma_overlap(WgmmaOperand operand) {
  const bool half = operand == WgmmaOperand::kFloat16 || operand == WgmmaOperand::kBFloat16;
  return half ? WgmmaOverlap::kFree : WgmmaOverlap::kOrdered;
}
template <WgmmaOperand kOperand, int C, int kExtent, class Act>
using WgmmaChoice =
    WgmmaConfig<kOperand, C, kExtent, kExtent, kExtent, wgmma_overlap(kOperand),
                wgmma_warpgroups(kOperand, kExtent, std::is_same_v<Act, HardswishFn>), 4>;

// cuTensorMapEncodeTiled by way of the runtime, as libcuda is not linked.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    STD_TORCH_CHECK(
        error == cudaSuccess && result == cudaDriverEntryPointSuccess && found != nullptr,
        "the CUDA driver has no cuTensorMapEncodeTiled; install one of CUDA 12 or later");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encoder;
}

// The map of x (N, C, D, H, W) for the boxes of quads or of rests; empty where there are none.
template <class Config>
TensorMap wgmma_tensor_map(const WgmmaParams& p, bool rest) {
  TensorMap map{};
  if ((rest ? p.rest : p.quads) == 0) return map;
  uint32_t box[5], steps[5] = {1, 1, 1, 1, 1};
  wgmma_box<Config>(p, rest, box);
  const cuuint64_t extents[5] = {cuuint64_t(p.W), cuuint64_t(p.H), cuuint64_t(p.D), Config::kC,
                                 cuuint64_t(p.N)};
  cuuint64_t strides[4], bytes = Config::kElementBytes;
  for (int i = 0; i < 4; ++i) strides[i] = bytes *= extents[i];
  const CUtensorMapDataType type = Config::kFloat ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : Config::kOperand == WgmmaOperand::kFloat16
                                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap encoded;
  const CUresult result =
      tensor_map_encoder()(&encoded, type, 5, const_cast<void*>(p.x), extents, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled takes no tensor of shape (", p.N,
                  ", ", Config::kC, ", ", p.D, ", ", p.H, ", ", p.W, "): error ", int(result));
  static_assert(sizeof(map) == sizeof(encoded) && alignof(TensorMap) >= alignof(CUtensorMap));
  memcpy(&map, &encoded, sizeof(map));
  return map;
}

template <class Config, class Act>
void launch_wgmma_kernel(const WgmmaLaunch& launch, const Act& activation) {
  // A rest of one row of four samples has the largest stage.
  constexpr size_t kStageBytes = (4 * Config::kR * Config::kC * Config::kPitch + 127) / 128 * 128;
  constexpr size_t kSharedBytes =
      Config::kStageOffset + Config::kWarpgroups * Config::kStages * kStageBytes;
  static_assert(kSharedBytes <= kWgmmaMostSharedBytes, "no problem may need more");
  const auto kernel = conv_activation_moments_wgmma<Config, Act>;
  // The same for all launches: they may come from several threads.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kSharedBytes));
  STD_TORCH_CHECK(error == cudaSuccess, "conv_activation_moments_wgmma needs ", kSharedBytes,
                  " bytes of shared memory: ", cudaGetErrorString(error));

  WgmmaParams p = wgmma_params<Config>(launch.problem);
  p.x = launch.x, p.w = launch.w, p.b = launch.bias, p.partials = launch.partials;
  const int blocks = std::min(p.items, launch.sm_count), tiles = (p.K + 15) / 16;
  wgmma_deal(p, blocks);
  kernel<<<dim3(unsigned(blocks), unsigned(tiles)), Config::kThreads, wgmma_shared_bytes<Config>(p),
           launch.stream>>>(p, wgmma_tensor_map<Config>(p, false),
                            wgmma_tensor_map<Config>(p, true), activation);
  check_launch("conv_activation_moments_wgmma", {p.N, Config::kC, p.D, p.H, p.W, p.K});
  constexpr int kWarps = kWgmmaMergeThreads / 32;
  launch_dependent(wgmma_merge, linear_grid((int64_t{p.N} * tiles + kWarps - 1) / kWarps),
                   kWgmmaMergeThreads, launch.stream, p, launch.mean, launch.m2);
  check_launch("wgmma_merge", {p.N, p.K});
}

template <WgmmaOperand kOperand>
void launch_wgmma(const WgmmaLaunch& launch) {
  dispatch_activation(launch.activation, [&](const auto& fn) {
    using Act = std::decay_t<decltype(fn)>;
    if (has_filter(launch.problem, 4, 3)) {
      return launch_wgmma_kernel<WgmmaChoice<kOperand, 3, 4, Act>>(launch, fn);
    }
    if (has_filter(launch.problem, 3, 1)) {
      return launch_wgmma_kernel<WgmmaChoice<kOperand, 1, 3, Act>>(launch, fn);
    }
    if (has_filter(launch.problem, 3, 3)) {
      return launch_wgmma_kernel<WgmmaChoice<kOperand, 3, 3, Act>>(launch, fn);
    }
    STD_TORCH_CHECK(false, "no wgmma kernel takes this problem");
  });
}

extern template void launch_wgmma<WgmmaOperand::kTf32>(const WgmmaLaunch&);
extern template void launch_wgmma<WgmmaOperand::kSplit>(const WgmmaLaunch&);
extern template void launch_wgmma<WgmmaOperand::kFloat16>(const WgmmaLaunch&);
extern template void launch_wgmma<WgmmaOperand::kBFloat16>(const WgmmaLaunch&);

}  // namespace convnormpool
