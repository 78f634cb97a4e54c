// Grids of rows (common/launch.cuh makes them): x is the place within a row, y and z the row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace convnormpool {

__device__ __forceinline__ int64_t grid_row() {
  return static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
}

}  // namespace convnormpool
