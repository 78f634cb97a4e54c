// An activation applied to values in registers.
#pragma once

#include <cuda_runtime.h>

#include "activation.h"

namespace convnormpool {

// Values that the general activations take per turn of a loop that is not unrolled.
constexpr int kActivationChunk = 4;

// x[j] = f(a, x[j], j % kActivationChunk) for each j, where a has the activation's value() and
// derivative(). kCount is a multiple of kActivationChunk.
template <int kCount, typename S, typename F>
__device__ __forceinline__ void transform(const HardswishFn& a, S (&x)[kCount], const F& f) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = f(a, x[j], j % kActivationChunk);
}

// Unrolled, every activation's code would stand there once for each value. Here the values pass the
// front of the array in turn, which costs moves between registers but no memory.
template <int kCount, typename S, typename F>
__device__ __forceinline__ void transform(const ActivationFn& fn, S (&x)[kCount], const F& f) {
  static_assert(kCount % kActivationChunk == 0, "a turn takes whole chunks");
#pragma unroll 1
  for (int turn = 0; turn < kCount / kActivationChunk; ++turn) {
    S front[kActivationChunk];
    activations::visit(fn.kind, [&](auto a) {
#pragma unroll
      for (int j = 0; j < kActivationChunk; ++j) front[j] = f(a, x[j], j);
    });
#pragma unroll
    for (int j = 0; j < kCount - kActivationChunk; ++j) x[j] = x[j + kActivationChunk];
#pragma unroll
    for (int j = 0; j < kActivationChunk; ++j) x[kCount - kActivationChunk + j] = front[j];
  }
}

}  // namespace convnormpool
