// One thin function per PTX instruction that CUDA C++ does not offer; compute capability 8.0 on.
//
// The guard is a macro, not a pragma: the host emulation of the kernels defines it and the same
// functions first (tests/emulation/ptx.cuh).
#ifndef CONVNORMPOOL_PTX_CUH
#define CONVNORMPOOL_PTX_CUH

#include <cuda_runtime.h>

#include <cstdint>

namespace convnormpool {

// The block's dynamic shared memory, aligned to 1024 bytes where no static shared memory precedes.
__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(1024) unsigned char convnormpool_dynamic_shared[];
  return convnormpool_dynamic_shared;
}

// The 32-bit address in shared memory of a generic pointer into it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// d = a · b + c, a 16 × 16 (row), b 16 × 8 (column), c and d 16 × 8. A register of a or b holds two
// neighbours along the depth, the lower index in the low half. With g = lane / 4, k = lane % 4:
//   a[0] = A[g][2k..]      a[1] = A[g + 8][2k..]      a[2] = A[g][2k + 8..]
//   a[3] = A[g + 8][2k + 8..]      b0 = B[2k..][g]      b1 = B[2k + 8..][g]
//   c[0], c[1] = C[g][2k], C[g][2k + 1]      c[2], c[3] = C[g + 8][2k], C[g + 8][2k + 1]      d as
//   c
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// The fragments are those of mma_m16n8k16_f16.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// Four 8 × 8 matrices of 16-bit elements: lane 8i + j gives the address of row j of matrix i (16
// bytes, aligned); register i of a lane receives elements 2k and 2k + 1 of row g of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

// The same with each matrix transposed: register i receives rows 2k and 2k + 1 of column g.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

// Both halves of a times those of b, rounded once.
__device__ __forceinline__ uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Copies Bytes (4, 8 or 16) from global to shared memory asynchronously; of these the first
// source_bytes are read and the others written as zeros. Both addresses aligned to Bytes.
template <int Bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global,
                                         uint32_t source_bytes = Bytes) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "the sizes that cp.async has");
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(Bytes), "r"(source_bytes)
                 : "memory");
  }
}

// Closes the group of copies that this thread has begun since the last call.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most Pending of this thread's groups are unfinished.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// x, which all lanes of the warp hold alike, in a form that the compiler knows to be alike: it may
// then live in a uniform register and decide a branch for the warp.
__device__ __forceinline__ int32_t uniform_value(int32_t x) {
  return static_cast<int32_t>(__reduce_or_sync(0xFFFFFFFFu, static_cast<uint32_t>(x)));
}

// x, as a value of which the compiler knows nothing: what is made from it in a loop is made there,
// where before the loop it would have to be kept in registers.
__device__ __forceinline__ int32_t opaque_value(int32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// threadIdx.x read anew, so that nothing that is made from it is kept in registers for a later use.
__device__ __forceinline__ int32_t thread_index_anew() {
  int32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Asks for the cache line of a global address; never faults.
__device__ __forceinline__ void prefetch_l1(const void* global) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(global));
}
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// `threads` threads (whole warps) of the block meet at barrier `id`; arrive does not wait.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A load that may not be served from this SM's L1: what other blocks wrote before a fence.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}

// Programmatic dependent launch: wait for the grids this one depends on; let the dependents start.
// Before 9.0 grids of a stream never overlap and both are nothing.
__device__ __forceinline__ void grid_dependency_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_dependency_launch() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace convnormpool

#endif  // CONVNORMPOOL_PTX_CUH
