// Operands of the Hopper backward kernels: 16 bits, and the weights of the outputs in shared
// memory. See conv_activation_moments_backward_wgmma_outputs.cuh.
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

// Writes the biases of channels first .. first + 15 and what undoes the weights' scales to every
// warpgroup's terms, and the row of zeros. After wgmma_stage_weights.
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
