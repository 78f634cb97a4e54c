// The tensor maps by which Hopper kernels copy boxes of x: host side.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "cuda/common/launch.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "problem.h"

namespace convnormpool {

// What a block of compute capability 9.0 may have.
constexpr size_t kHopperSharedBytes = 227 * 1024;

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

// The map of x (N, C, D, H, W), of a dtype but float64, for boxes of these extents, fastest axis
// first.
inline TensorMap tensor_map(const Problem& problem, const void* x, const uint32_t (&box)[5]) {
  const uint32_t steps[5] = {1, 1, 1, 1, 1};
  const cuuint64_t extents[5] = {cuuint64_t(problem.W), cuuint64_t(problem.H),
                                 cuuint64_t(problem.D), cuuint64_t(problem.C),
                                 cuuint64_t(problem.N)};
  cuuint64_t strides[4], bytes = cuuint64_t(element_size(problem.dtype));
  for (int i = 0; i < 4; ++i) strides[i] = bytes *= extents[i];
  const CUtensorMapDataType type =
      problem.dtype == DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
      : problem.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap encoded;
  const CUresult result =
      tensor_map_encoder()(&encoded, type, 5, const_cast<void*>(x), extents, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled takes no tensor of shape (",
                  problem.N, ", ", problem.C, ", ", problem.D, ", ", problem.H, ", ", problem.W,
                  "): error ", int(result));
  TensorMap map{};
  static_assert(sizeof(map) == sizeof(encoded) && alignof(TensorMap) >= alignof(CUtensorMap));
  memcpy(&map, &encoded, sizeof(map));
  return map;
}

}  // namespace convnormpool
