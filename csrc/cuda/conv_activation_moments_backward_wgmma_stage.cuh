// Operands of the Hopper backward kernels: 16 bits, and the weights of the outputs in shared
// memory. See conv_activation_moments_backward_wgmma_filter_outputs.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "cuda/conv_activation_moments_backward_wgmma_config.cuh"
#include "cuda/conv_activation_moments_wgmma_stage.cuh"

namespace convnormpool {

// Two values of an operand, the first in the low half: rounded, and in kSplit what that leaves. The
// second one is 0 if it is not `given`.
template <class Config>
__device__ __forceinline__ void wgmma_operands(float x0, float x1, uint32_t& high, uint32_t& low,
                                               bool given = true) {
  if constexpr (Config::kBFloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x0, x1);
    memcpy(&high, &pair, 4);
  } else {
    const __half2 pair = __floats2half2_rn(x0, x1);
    memcpy(&high, &pair, 4);
    if constexpr (Config::kSplit) {
      const float2 back = __half22float2(pair);
      const __half2 rest = __floats2half2_rn(x0 - back.x, given ? x1 - back.y : 0.f);
      memcpy(&low, &rest, 4);
    }
  }
}

// Writes the B operand of channels first .. first + 15, all high halves before all low ones, in
// wgmma_stage_operands' layout; zeros where there is no tap or channel. The float32 kinds' channels
// are scaled to [2^14, 2^15). Each weight is read where it is needed: with wgmma_stage_weights,
// which takes less time, ptxas spills more in the loops.
template <class Config>
__device__ void wgmma_backward_stage_weights(const WgmmaParams& p, int first,
                                             unsigned char* shared) {
  constexpr int kT = Config::kT, kTaps = Config::kC * kT * Config::kR * Config::kS;
  int* exponents = reinterpret_cast<int*>(shared + Config::kExponentOffset);
  if constexpr (Config::kFloat) {
    constexpr int kLanes = 16;  // of a channel
    for (int k = int(threadIdx.x) / kLanes; k < 16; k += Config::kThreads / kLanes) {
      uint32_t largest = 0;
      for (int i = int(threadIdx.x) % kLanes; i < kTaps; i += kLanes) {
        const bool exists = first + k < p.K;
        const float w = exists ? wgmma_weight<Config>(p.w, size_t(first + k) * kTaps + i) : 0.f;
        largest = max(largest, __float_as_uint(fabsf(w)));
      }
      largest = lanes_max(largest, kLanes);
      if (threadIdx.x % kLanes == 0) exponents[k] = min(141 - wgmma_exponent_field(largest), 126);
    }
    __syncthreads();
  }
  constexpr int kWeights = Config::kC * 16 * kT * 16;
  for (int i = int(threadIdx.x); i < kWeights; i += Config::kThreads) {
    const int k = i % 16, slot = i / 16 % 16, kd = i / 256 % kT, ci = i / (256 * kT);
    const int kh = slot % 8 / 2, kw = slot / 8 * 2 + slot % 2;
    float value = 0.f;
    if (kh < Config::kR && kw < Config::kS && first + k < p.K) {
      const int tap = ((ci * kT + kd) * Config::kR + kh) * Config::kS + kw;
      value = wgmma_weight<Config>(p.w, size_t(first + k) * kTaps + tap);
    }
    if constexpr (Config::kFloat) value *= wgmma_power_of_two(exponents[k]);
    uint32_t part[2];
    wgmma_operands<Config>(value, 0.f, part[0], part[1]);
    unsigned char* to = shared + Config::kWeightOffset + ci * Config::kStepBytes +
                        slot / 8 * Config::kDepthBytes + k / 8 * 128 + k % 8 * 16 + slot % 8 * 2;
    // Each kd has a second block kT on, but for the one that stands last.
    for (int block = (kT - kd) % kT; block < Config::kBlocks; block += kT) {
#pragma unroll
      for (int i_part = 0; i_part < Config::kParts; ++i_part) {
        *reinterpret_cast<uint16_t*>(to + block * 256 + i_part * Config::kC * Config::kStepBytes) =
            uint16_t(part[i_part]);
      }
    }
  }
}

// Writes the biases of channels first .. first + 15 and what undoes the weights' scales to every
// warpgroup's terms, and the row of zeros. After wgmma_backward_stage_weights.
template <class Config>
__device__ void wgmma_backward_stage_terms(const WgmmaParams& p, int first, unsigned char* shared) {
  for (int i = int(threadIdx.x); i < 16 * Config::kWarpgroups; i += Config::kThreads) {
    const int k = first + i % 16;
    const bool given = p.b != nullptr && k < p.K;
    const float bias = given ? wgmma_weight<Config>(p.b, size_t(k)) : 0.f;
    float* const to = reinterpret_cast<float*>(shared + Config::kTermOffset) + i / 16 * 64;
    const int* exponents = reinterpret_cast<const int*>(shared + Config::kExponentOffset);
    to[i % 16 / 2 * 4 + i % 2] = bias;
    to[i % 16 / 2 * 4 + i % 2 + 2] = Config::kFloat ? wgmma_power_of_two(-exponents[i % 16]) : bias;
    to[32 + i % 16 * 2] = to[33 + i % 16 * 2] = 0.f;
  }
  for (int i = int(threadIdx.x); i < 64; i += Config::kThreads) {
    reinterpret_cast<uint32_t*>(shared + Config::kZeroOffset)[i] = 0u;
  }
}

}  // namespace convnormpool
