// The sweep of the Hopper kernel of the gradients of filter and bias: one thread's part of the
// operands and sums of its warpgroup. See conv_activation_moments_backward_wgmma_filter.cuh.
#pragma once

#include "cuda/conv_activation_moments_backward_wgmma_filter_config.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_filter_outputs.cuh"

namespace convnormpool {

template <class Config, class Act>
struct WgmmaFilter : WgmmaFilterOutputs<Config, Act, WgmmaFilter<Config, Act>> {
  using Outputs = WgmmaFilterOutputs<Config, Act, WgmmaFilter<Config, Act>>;
  using Outputs::Outputs, Outputs::a, Outputs::channel, Outputs::exponent, Outputs::lane,
      Outputs::ring, Outputs::warp;
  static constexpr int kT = Config::kT, kC = Config::kC, kParts = Config::kParts;
  static constexpr int kSlots = Config::kSlots;
  // The exponent of what is all zero, and of sums to which nothing was added.
  static constexpr int kNothing = 1 << 20;

  float sums[8 * kC];
  float total[Config::kSplit ? 8 * kC : 1];
  float bias_sums[4];
  uint32_t dy[kParts][4][4];  // of this warp's depth tap and two rows of two tiles
  uint32_t gradients_from;    // the dy of this warp's depth tap, this lane's part
  uint32_t gradients_to;      // this lane's part of its row in slot 0
  uint32_t inputs_to;         // likewise; see store_inputs
  int slot;                   // of the step in the rings
  int turn;                   // counts steps, mod 2
  int sum_exponent, input_exponent, gradient_exponent;
  int stored_input_exponent;  // of the step's plane: as input_exponent, or nothing
  int excess;                 // of the products' exponent over the sums'
  int calm;                   // steps since an exponent of an operand changed

  // Rows 0 and 3 give their warps more work: in each warpgroup other ones, since warps with the
  // same number modulo 4 share a scheduler.
  __device__ __forceinline__ int row() const { return (warp() + ring.group) % 4; }

  // Words of the warpgroup: each warp's largest magnitude in a plane, of this step and the next;
  // the operands' exponents, by slot.
  __device__ __forceinline__ unsigned char* words() const {
    return dynamic_shared_memory() + Config::kOwnOffset + Config::kUnreadBytes +
           ring.group * Config::kWarpgroupBytes;
  }
  __device__ __forceinline__ uint32_t* largest_of(int step) const {
    return reinterpret_cast<uint32_t*>(words()) + step % 2 * 4;
  }
  __device__ __forceinline__ int* input_exponents() const {
    return reinterpret_cast<int*>(words()) + 8;
  }
  __device__ __forceinline__ int* gradient_exponents() const { return input_exponents() + 8; }
  __device__ __forceinline__ uint32_t inputs_of(int s) const {
    return shared_address(words()) + uint32_t(Config::kWordBytes + s * Config::kInputBytes);
  }
  __device__ __forceinline__ uint32_t gradients_of(int s) const {
    return inputs_of(kSlots) + uint32_t(s * Config::kGradientBytes);
  }
  __device__ __forceinline__ int slot_before(int steps) const {
    return slot < steps ? slot - steps + kSlots : slot - steps;
  }

  // Called by all threads of the warpgroup.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8 * kC; ++i) sums[i] = 0.f;
    if constexpr (Config::kSplit) {
#pragma unroll
      for (int i = 0; i < 8 * kC; ++i) total[i] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) bias_sums[i] = 0.f;
    slot = kSlots - 1;
    gradients_from = gradients_of(0) + uint32_t((slot - 1 - warp()) * Config::kGradientBytes) +
                     uint32_t(lane() % 8 * 16 + lane() / 8 % 2 * 256 + lane() / 16 * 128);
    gradients_to = gradients_of(0) + uint32_t(row() * Config::kGradientRowBytes + lane() * 16);
    inputs_to = first_inputs_to();
    turn = 0;
    sum_exponent = kNothing;
    input_exponent = stored_input_exponent = 0;
    gradient_exponent = 126;
    calm = 0;
    unsigned char* const own = words();
    for (int i = 16 * int(threadIdx.x % 128); i < Config::kWarpgroupBytes; i += 16 * 128) {
      *reinterpret_cast<uint4*>(own + i) = make_uint4(0u, 0u, 0u, 0u);
    }
    ring.meet();
    if (threadIdx.x % 128 < 16) input_exponents()[threadIdx.x % 128] = kNothing;
    fence_proxy_async();
    ring.meet();
  }

  __device__ __forceinline__ void prepare() {
    turn ^= 1;
    if constexpr (Config::kFloat) follow_inputs();
    begin_products();
  }

  // Chooses the exponent of the step's plane.
  __device__ __forceinline__ void follow_inputs() {
    const uint4 of = *reinterpret_cast<const uint4*>(largest_of(turn));
    const uint32_t bits = max(max(of.x, of.y), max(of.z, of.w));
    const int field = wgmma_exponent_field(bits), scaled = field - 127 + input_exponent;
    // Up to 2^15, and down to 2^9 at an item's beginning and 1 later; else to 2^12.
    const int lowest = this->plane == 0 ? 9 : 0;
    if (bits != 0 && (scaled > 14 || scaled < lowest)) {
      input_exponent = min(139 - field, 127);
      calm = 0;
    }
    stored_input_exponent = bits == 0 ? kNothing : input_exponent;
  }

  // The exponents for the products of the step before.
  __device__ __forceinline__ void begin_products() {
    ++slot;
    if (slot == kSlots) slot = 0;
    gradients_from += uint32_t(Config::kGradientBytes);
    if (gradients_from >= gradients_of(kSlots)) {
      gradients_from -= uint32_t(kSlots * Config::kGradientBytes);
    }
    if constexpr (Config::kScaled) {
      excess = 0;
      const bool same = gradient_exponent + input_exponent == sum_exponent;
      if (__builtin_expect(calm < kT || !same, 0)) lower_sums();
      ++calm;
    }
    if constexpr (Config::kSplit) {
#pragma unroll
      for (int i = 0; i < 8 * kC; ++i) set_accumulator(sums[i], 0.f);
    }
    load_gradients(0);
  }

  // dy of rows 2 half and 2 half + 1 of the outputs.
  __device__ __forceinline__ void load_gradients(int half) {
    if (warp() < kT) {
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) {
        const int part = i / 4, row = i / 2 % 2, tile = i % 2;
        ldmatrix_x4_trans(dy[part][2 * row + tile],
                          gradients_from + uint32_t((2 * half + row) * Config::kGradientRowBytes +
                                                    part * 1024 + tile * 512));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 16 * kParts; ++i) dy[i / 16][i / 4 % 4][i % 4] = 0u;
    }
  }

  // Before the products: dy is what the loads brought, or less.
  __device__ __forceinline__ void settle_gradients() {
    if constexpr (Config::kScaled) {
      if (__builtin_expect(excess > 0, 0)) scale_down();
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) pin_fragments(dy[part]);
    wgmma_fence();
  }

  // Lowers the sums' exponent to that of the products to come. This warp's dy is then scaled down
  // by its excess.
  __device__ __forceinline__ void lower_sums() {
    const int input = Config::kFloat ? input_exponents()[slot_before(kT)] : 0;
    int lowest = sum_exponent, own = kNothing;
#pragma unroll
    for (int kd = 0; kd < kT; ++kd) {
      const int product = input + gradient_exponents()[slot_before(1 + kd)];
      lowest = min(lowest, product);
      if (warp() == kd) own = product;
    }
    if (lowest < sum_exponent) {
      const int change = lowest - sum_exponent;
      const float factor = change < -126 ? 0.f : wgmma_power_of_two(change);
#pragma unroll
      for (int i = 0; i < 8 * kC; ++i) {
        if constexpr (Config::kSplit) {
          total[i] *= factor;
        } else {
          scale_accumulator(sums[i], factor);
        }
      }
      sum_exponent = lowest;
    }
    excess = own > kNothing / 2 ? 0 : own - sum_exponent;
  }

  // Half's smallest normal number is 2^-14, which hardly ever does not suffice.
  __device__ __forceinline__ void scale_down() {
    for (int left = min(excess, 14 * 4); left > 0; left -= 14) {
      const uint32_t half = uint32_t(15 - min(left, 14)) << 10;
#pragma unroll
      for (int i = 0; i < 16 * kParts; ++i) {
        uint32_t& pair = dy[i / 16][i / 4 % 4][i % 4];
        pair = multiply_f16x2(pair, half * 0x10001u);
      }
    }
  }

  __device__ __forceinline__ void issue() { multiply(0); }

  // The products of two rows, and the end of a group.
  __device__ __forceinline__ void multiply(int half) {
    settle_gradients();
    const uint32_t inputs = wgmma_operand(inputs_of(slot_before(kT)), Config::kChunkBytes);
    const auto add = [&](int gradient_part, int input_part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * half + i / 2, tile = i % 2;
        const int at = input_part * Config::kInputPartBytes + row * Config::kRowBytes +
                       2 * tile * Config::kChunkBytes;
        wgmma<Config::kType, 16 * kC>(sums, dy[gradient_part][i], inputs + uint32_t(at) / 16);
      }
    };
    if constexpr (Config::kSplit) {
      add(0, 1);
      add(1, 0);
    }
    add(0, 0);
    wgmma_commit();
  }

  __device__ __forceinline__ void overlap() {
    if (inputs_to != 0) {
      store_inputs();
      fence_proxy_async();
    }
    if constexpr (Config::kScaled) {
      int stored = kNothing;
      if (this->counted()) {
        const int fitting = sum_exponent - lowest_input_exponent();
        const int next = max(min(this->sample_exponent(), fitting), -126);
        if (next != gradient_exponent) {
          gradient_exponent = next;
          calm = 0;
        }
        stored = next;
      }
      if (threadIdx.x % 128 == 32) {
        if constexpr (Config::kFloat) input_exponents()[slot] = stored_input_exponent;
        gradient_exponents()[slot] = stored;
      }
      __syncwarp();
    }
  }

  // Of the planes that meet the step's dy, of which the largest decides.
  __device__ __forceinline__ int lowest_input_exponent() const {
    int lowest = input_exponent;
    if (Config::kFloat && calm < kT) {
      lowest = stored_input_exponent;
#pragma unroll
      for (int i = 1; i < kT; ++i) lowest = min(lowest, input_exponents()[slot_before(i)]);
      if (lowest == kNothing) lowest = input_exponent;
    }
    return lowest;
  }

  // Where this lane stores inputs in slot 0: the warp of row 0 the first R input rows, that of row
  // 3 those that follow, others none. Lanes that have nothing to store have the row that nobody
  // reads.
  __device__ __forceinline__ uint32_t first_inputs_to() const {
    const int c = lane() % 8 / 2, input_row = row() + c;
    const bool stored = c < Config::kR && (row() == 0 || input_row >= Config::kR);
    const int kw = ((lane() / 16) ^ (c / 2)) * 2 + lane() % 2;
    if (row() % 3 != 0) return 0;
    return stored ? inputs_of(0) + uint32_t(lane() / 8 % 2 * Config::kChunkBytes +
                                            input_row * Config::kRowBytes + kw * 16)
                  : shared_address(dynamic_shared_memory() + Config::kOwnOffset);
  }

  // Stores the step's fragments as B operands. Lanes with c of 2 and 3 swap the pairs of kw 0, 1
  // and 2, 3, against bank conflicts.
  __device__ __forceinline__ void store_inputs() {
    const bool stored = inputs_to >= inputs_of(0);
    const uint32_t step = stored ? 1u : 0u;
    const uint32_t to = inputs_to + step * uint32_t(slot * Config::kInputBytes);
    const bool swapped = lane() % 4 >= 2;
    uint32_t factor = 0, second = 0;
    if constexpr (Config::kFloat) {
      const int change = input_exponent - exponent, first = min(max(change, -14), 15);
      const int rest = min(max(change - first, -25), 0);
      factor = uint32_t(first + 15) << 10;
      second = rest >= -14 ? uint32_t(rest + 15) << 10 : rest > -25 ? 1u << (rest + 24) : 0u;
      factor *= 0x10001u;
      second *= 0x10001u;
      if (__builtin_expect(__any_sync(~0u, rest < 0) != 0, 0)) {
        store_fragments(to, step, swapped, [&](uint32_t pair) {
          return multiply_f16x2(multiply_f16x2(pair, factor), second);
        });
        return;
      }
    }
    store_fragments(to, step, swapped, [&](uint32_t pair) {
      return Config::kFloat ? multiply_f16x2(pair, factor) : pair;
    });
  }

  // Stores scaled(pair) for each pair of the fragments; step: 1, or 0 where nothing is stored.
  template <class Scaled>
  __device__ __forceinline__ void store_fragments(uint32_t to, uint32_t step, bool swapped,
                                                  const Scaled& scaled) {
#pragma unroll
    for (int i = 0; i < 2 * kParts * kC; ++i) {
      const int tile = i % 2, fragment = i / 2, ci = fragment % kC, part = fragment / kC;
      const uint32_t (&from)[4] = a[tile][fragment];
      uint32_t r[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) r[j] = scaled(swapped ? from[j ^ 2] : from[j]);
      const int at = part * Config::kInputPartBytes + 2 * tile * Config::kChunkBytes + ci * 64;
      stmatrix_x4_trans(to + step * uint32_t(at), r);
    }
  }

  // The second half's products run while gradients are formed: there are not registers for all dy
  // beside the outputs' fragments.
  __device__ __forceinline__ void complete() {
    pin_accumulators(sums);
    load_gradients(1);
    multiply(1);
  }

  __device__ __forceinline__ void end_step() {
    wgmma_wait<0>();
    pin_accumulators(sums);
    if constexpr (Config::kSplit) {
#pragma unroll
      for (int i = 0; i < 8 * kC; ++i) total[i] += sums[i];
    }
  }

  __device__ __forceinline__ float gradient_scale() const {
    return wgmma_power_of_two(gradient_exponent);
  }

  __device__ __forceinline__ void gradients(const uint32_t (&d)[2][kParts][4],
                                            const float (&channel_sums)[4]) {
    const float inverse = Config::kScaled ? wgmma_power_of_two(-gradient_exponent) : 1.f;
    const uint32_t to = gradients_to + uint32_t(slot * Config::kGradientBytes);
#pragma unroll
    for (int i = 0; i < 2 * kParts; ++i) {
      stmatrix_x4(to + uint32_t(i / 2 * 1024 + i % 2 * 512), d[i % 2][i / 2]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) bias_sums[i] = fmaf(channel_sums[i], inverse, bias_sums[i]);
  }

  __device__ __forceinline__ void inputs(float largest) {
    if constexpr (Config::kFloat) {
      const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest));
      if (lane() == 0) largest_of(turn ^ 1)[warp()] = bits;
      __syncwarp();
    }
  }

  // The products of the last planes, whose output planes do not exist.
  __device__ __forceinline__ void drain() {
    const uint32_t none[2][kParts][4] = {};
    const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int i = 0; i < kT; ++i) {
      ring.meet();
      calm = 0;
      begin_products();
      issue();
      if (Config::kScaled && threadIdx.x % 128 == 32) gradient_exponents()[slot] = kNothing;
      __syncwarp();
      gradients(none, zeros);
      wgmma_wait<0>();
      complete();
      end_step();
    }
  }

  // Writes the warpgroup's sums; `at` counts the launch's warpgroups of this channel tile.
  __device__ __forceinline__ void store(const WgmmaFilterParams& params, int64_t at) {
    // Two factors: the products' exponent may pass that of any float.
    const int back = Config::kScaled && sum_exponent != kNothing ? -sum_exponent : 0;
    const int near = min(max(back, -126), 127);
    const float first = wgmma_power_of_two(near);
    const float second = wgmma_power_of_two_or_limit(back - near);
    float* const filter = params.filter_partial + at * 16 * Config::kTaps;
#pragma unroll
    for (int i = 0; i < 8 * kC; ++i) {
      const int n = i / 4 * 8 + lane() % 4 * 2 + i % 2, k = lane() / 4 + i % 4 / 2 * 8;
      const int kh = n / (4 * kC), ci = n / 4 % kC, kw = n % 4;
      if (warp() >= kT || kh >= Config::kR || kw >= Config::kS) continue;
      const int tap = ((ci * kT + warp()) * Config::kR + kh) * Config::kS + kw;
      filter[k * Config::kTaps + tap] =
          (Config::kSplit ? total[i * Config::kSplit] : sums[i]) * first * second;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = bias_sums[i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane() < 4) params.bias_partial[(at * 4 + warp()) * 16 + channel(i)] = sum;
    }
  }
};

}  // namespace convnormpool
