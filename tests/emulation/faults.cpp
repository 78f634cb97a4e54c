// Kernels with one fault each, to see that the emulator finds it: argument 0 is a right kernel,
// which ends with status 0.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"
// clang-format on

namespace {

__global__ void kernel(int fault, const float* x, float* out) {
  using namespace convnormpool;
  __shared__ __align__(16) float staged[64];
  const int lane = int(threadIdx.x);
  switch (fault) {
    case 1:  // no barrier between warps
      staged[lane] = x[lane];
      __syncwarp();
      break;
    case 2:  // a copy that nobody waits for
      cp_async<4>(staged + lane, x + lane);
      __syncthreads();
      break;
    case 3:  // lanes that name each other differently
      __syncwarp(lane < 40 ? ~0u : ~1u);
      break;
    case 4:  // a lane of the mask has left
      if (lane == 5) return;
      staged[lane] = float(__shfl_xor_sync(~0u, lane, 1));
      break;
    case 5:  // past the end of global memory
      staged[lane] = x[lane + 1];
      __syncthreads();
      break;
    case 6:
      cp_async<8>(staged + lane, x + lane);
      break;
    case 7:  // half of those that a barrier waits for
      if (lane < 32) barrier_sync(1, 64);
      break;
    case 8:  // a sum beyond int
      staged[lane] = float(lane + INT_MAX);
      break;
    default:
      staged[lane] = x[lane];
      __syncthreads();
  }
  out[lane] = staged[63 - lane];
}

}  // namespace

int main(int, char** arguments) {
  std::vector<float> x(64, 1.0f), out(64);
  emulate(dim3(1), dim3(64), 0, kernel, atoi(arguments[1]), x.data(), out.data());
  for (const float v : out) {
    if (!(v == 1.0f)) return 1;
  }
  return 0;
}
