// Small probes of the Hopper instructions that the wgmma kernel uses, through the same wrappers.
//   ./probe safe      all that should pass, one after the other (stops at the first sticky error)
//   ./probe N         one of them, in its own process; 20 to 23 are expected to fault
// Build: nvcc -O2 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I csrc -o probe probe.cu
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/common/ptx_hopper.cuh"

using namespace convnormpool;

struct alignas(64) Map64 { unsigned char bytes[128]; };  // as the first version passed it

static const char* run_error() {
  cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) e = cudaDeviceSynchronize();
  return e == cudaSuccess ? nullptr : cudaGetErrorName(e);
}

// ---- tensor copies
struct Box { int w, h, d, c, n; };

// kSelect: the map is chosen at run time between two parameters, as in the kernel.
template <class Map, bool kSelect>
__global__ void copy_kernel(const __grid_constant__ Map first,
                            const __grid_constant__ Map second, int which, Box at, int bytes, int offset,
                            unsigned char* out, int lane) {
  unsigned char* shared = dynamic_shared_memory();
  const uint32_t base = shared_address(shared);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) shared[offset + i] = 0xEE;
  if (threadIdx.x == 0) mbarrier_init(base, 1);
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == lane) {
    mbarrier_arrive_expect(base, uint32_t(bytes));
    const Map* map = kSelect && which ? &second : &first;
    tensor_copy(base + uint32_t(offset), reinterpret_cast<const TensorMap*>(map), base, at.w, at.h, at.d, at.c, at.n);
  }
  __syncwarp();
  mbarrier_wait(base, 0);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = shared[offset + i];
}

__global__ void bulk_kernel(const unsigned char* in, unsigned char* out, int bytes) {
  unsigned char* shared = dynamic_shared_memory();
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) mbarrier_init(base, 1);
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(base, uint32_t(bytes));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(base + 128),
                 "l"(in), "r"(bytes), "r"(base) : "memory");
  }
  __syncwarp();
  mbarrier_wait(base, 0);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = shared[128 + i];
}

static CUresult encode(CUtensorMap* map, CUtensorMapDataType type, void* x, const uint64_t (&dims)[5], int element, const uint32_t (&box)[5]) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult r;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &r) != cudaSuccess || !f) return CUDA_ERROR_NOT_FOUND;
  cuuint64_t d[5], strides[4], bytes = element;
  for (int i = 0; i < 5; ++i) d[i] = dims[i];
  for (int i = 0; i < 4; ++i) strides[i] = bytes *= dims[i];
  const cuuint32_t one[5] = {1, 1, 1, 1, 1};
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f)(map, type, 5, x, d, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <class Map, bool kSelect, class E>
static const char* copy_test(Box at, int rows, int samples, int columns, int offset = 22528, int which = 0, int lane = 0, int N = 7, int W = 32) {
  static char message[200];
  const int C = 3, D = 16, H = 32;
  std::vector<E> x(size_t(N) * C * D * H * W);
  for (size_t i = 0; i < x.size(); ++i) x[i] = E(i % 65521 + 1);
  E* dx;
  unsigned char* out;
  const int bytes = columns * rows * C * samples * int(sizeof(E));
  cudaMalloc(&dx, x.size() * sizeof(E)), cudaMalloc(&out, bytes);
  cudaMemcpy(dx, x.data(), x.size() * sizeof(E), cudaMemcpyHostToDevice);
  CUtensorMap map;
  const CUresult r = encode(&map, sizeof(E) == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, dx,
                            {uint64_t(W), H, D, C, uint64_t(N)}, sizeof(E), {uint32_t(columns), uint32_t(rows), 1, C, uint32_t(samples)});
  if (r != CUDA_SUCCESS) { snprintf(message, sizeof(message), "cuTensorMapEncodeTiled %d", int(r)); return message; }
  Map m, none;
  memcpy(&m, &map, 128), memset(&none, 0, sizeof(none));
  const auto kernel = copy_kernel<Map, kSelect>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024);
  kernel<<<1, 128, 100 * 1024>>>(which ? none : m, which ? m : none, which, at, bytes, offset, out, lane);
  if (const char* e = run_error()) return e;
  std::vector<E> got(bytes / sizeof(E));
  cudaMemcpy(got.data(), out, bytes, cudaMemcpyDeviceToHost);
  size_t i = 0;
  for (int s = 0; s < samples; ++s) for (int c = 0; c < C; ++c) for (int h = 0; h < rows; ++h) for (int w = 0; w < columns; ++w, ++i) {
    const int n = at.n + s, y = at.h + h, z = at.d, q = at.w + w;
    const bool in = n >= 0 && n < N && y >= 0 && y < H && z >= 0 && z < D && q >= 0 && q < W;
    const E want = in ? x[(((size_t(n) * C + c) * D + z) * H + y) * W + q] : E(0);
    if (memcmp(&want, &got[i], sizeof(E)) != 0) {
      snprintf(message, sizeof(message), "WRONG VALUE at s %d c %d row %d column %d (%s the tensor)", s, c, h, w, in ? "inside" : "outside");
      return message;
    }
  }
  return nullptr;
}
using Half = uint16_t;

// ---- wgmma with the kernel's descriptors: B of 7 blocks of 16 columns, from block `start` on
template <WgmmaType kType, int N>
__global__ void wgmma_kernel(const uint32_t* a, const unsigned char* b, int start, float* d) {
  unsigned char* shared = dynamic_shared_memory() + 1024;
  for (int i = threadIdx.x; i < 3584; i += blockDim.x) shared[i] = b[i];
  fence_proxy_async();
  __syncthreads();
  float acc[32];
  uint32_t f[1][4];
  for (int i = 0; i < 32; ++i) acc[i] = 1.f;
  for (int i = 0; i < 4; ++i) f[0][i] = a[threadIdx.x * 4 + i];
  pin_fragments(f);
  wgmma_fence();
  wgmma<kType, N>(acc, f[0], wgmma_operand(shared_address(shared), 1792) + uint32_t(start) * 16);
  wgmma_commit();
  wgmma_wait<0>();
  pin_accumulators(acc);
  for (int i = 0; i < 32; ++i) d[threadIdx.x * 32 + i] = acc[i];
}

template <WgmmaType kType, int N>
static const char* wgmma_test(int start) {
  static char message[200];
  constexpr bool kTf32 = kType == WgmmaType::kTf32;
  constexpr int K = kTf32 ? 8 : 16, kBytes = kTf32 ? 4 : 2;
  std::vector<float> A(64 * K), B(K * 112);
  srand(1);
  for (float& v : A) v = float(rand() % 64 - 32) / 16;
  for (float& v : B) v = float(rand() % 64 - 32) / 16;
  const auto bits = [](float v) -> uint32_t {
    uint32_t u;
    if (kTf32) { memcpy(&u, &v, 4); return u; }
    if (kType == WgmmaType::kBf16) { memcpy(&u, &v, 4); return u >> 16; }
    __half h = __float2half(v); uint16_t s; memcpy(&s, &h, 2); return s;
  };
  std::vector<uint32_t> fa(128 * 4);
  for (int t = 0; t < 128; ++t) for (int i = 0; i < 4; ++i) {
    const int row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8;
    if (kTf32) fa[t * 4 + i] = bits(A[row * K + t % 4 + i / 2 * 4]);
    else fa[t * 4 + i] = bits(A[row * K + t % 4 * 2 + i / 2 * 8]) | bits(A[row * K + t % 4 * 2 + 1 + i / 2 * 8]) << 16;
  }
  std::vector<unsigned char> fb(3584);
  for (int k = 0; k < K; ++k) for (int c = 0; c < 112; ++c) {
    const uint32_t u = bits(B[k * 112 + c]);
    memcpy(&fb[k * kBytes / 16 * 1792 + c / 8 * 128 + c % 8 * 16 + k * kBytes % 16], &u, kBytes);
  }
  uint32_t* da; unsigned char* db; float* dd;
  cudaMalloc(&da, 2048), cudaMalloc(&db, 3584), cudaMalloc(&dd, 128 * 32 * 4);
  cudaMemcpy(da, fa.data(), 2048, cudaMemcpyHostToDevice), cudaMemcpy(db, fb.data(), 3584, cudaMemcpyHostToDevice);
  wgmma_kernel<kType, N><<<1, 128, 8192>>>(da, db, start, dd);
  if (const char* e = run_error()) return e;
  std::vector<float> got(128 * 32);
  cudaMemcpy(got.data(), dd, got.size() * 4, cudaMemcpyDeviceToHost);
  for (int t = 0; t < 128; ++t) for (int i = 0; i < 32; ++i) {
    const int row = t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
    double want = 1;
    if (i < N / 2) for (int k = 0; k < K; ++k) want += double(A[row * K + k]) * double(B[k * 112 + start * 16 + column]);
    if (std::fabs(got[t * 32 + i] - want) > 1e-4) {
      snprintf(message, sizeof(message), "WRONG VALUE row %d column %d: %g, not %g", row, column, got[t * 32 + i], want);
      return message;
    }
  }
  return nullptr;
}

__global__ void __launch_bounds__(256, 1) setmaxnreg_kernel(int* out) {
#if CONVNORMPOOL_HOPPER
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    out[threadIdx.x] = 1;
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    out[threadIdx.x] = 2;
  }
#endif
}

__global__ void primary_kernel(int* out) { grid_dependency_launch(); out[0] = 41; }
__global__ void dependent_kernel(int* out) { grid_dependency_wait(); out[1] = out[0] + 1; }

static const char* dependent_test() {
  int* out;
  cudaMalloc(&out, 8);
  primary_kernel<<<1, 1>>>(out);
  cudaLaunchConfig_t c{};
  c.gridDim = 1, c.blockDim = 1;
  cudaLaunchAttribute a{};
  a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a.val.programmaticStreamSerializationAllowed = 1;
  c.attrs = &a, c.numAttrs = 1;
  cudaLaunchKernelEx(&c, dependent_kernel, out);
  if (const char* e = run_error()) return e;
  int got[2];
  cudaMemcpy(got, out, 8, cudaMemcpyDeviceToHost);
  return got[1] == 42 ? nullptr : "WRONG VALUE";
}

static const char* bulk_test() {
  std::vector<unsigned char> x(4096), y(4096);
  for (int i = 0; i < 4096; ++i) x[i] = (unsigned char)(i * 7);
  unsigned char *in, *out;
  cudaMalloc(&in, 4096), cudaMalloc(&out, 4096);
  cudaMemcpy(in, x.data(), 4096, cudaMemcpyHostToDevice);
  bulk_kernel<<<1, 128, 8192>>>(in, out, 4096);
  if (const char* e = run_error()) return e;
  cudaMemcpy(y.data(), out, 4096, cudaMemcpyDeviceToHost);
  return x == y ? nullptr : "WRONG VALUE";
}

static const char* setmaxnreg_test() {
  int* out;
  cudaMalloc(&out, 1024);
  setmaxnreg_kernel<<<1, 256>>>(out);
  return run_error();
}

static const char* test(int i, const char** name) {
#define CASE(n, text, call) case n: *name = text; return call
  switch (i) {
    CASE(1, "1-D cp.async.bulk", bulk_test());
    CASE(2, "5-D copy, quad box 36x7x1x3x1 f32 at 0", (copy_test<TensorMap, false, float>({0, 0, 0, 0, 0}, 7, 1, 36)));
    CASE(3, "  map of 64-byte alignment, chosen at run time", (copy_test<Map64, true, float>({0, 4, 3, 0, 2}, 7, 1, 36, 22528, 1)));
    CASE(4, "  map of 128-byte alignment, chosen, by lane 64", (copy_test<TensorMap, true, float>({0, 4, 3, 0, 2}, 7, 1, 36, 22528, 1, 64)));
    CASE(5, "  rows begin at -3", (copy_test<TensorMap, false, float>({0, -3, 5, 0, 1}, 7, 1, 36)));
    CASE(6, "  rows end past H", (copy_test<TensorMap, false, float>({0, 28, 5, 0, 1}, 7, 1, 36)));
    CASE(7, "  all outside: plane -1", (copy_test<TensorMap, false, float>({0, 0, -1, 0, 1}, 7, 1, 36)));
    CASE(8, "  all outside: plane D", (copy_test<TensorMap, false, float>({0, 0, 16, 0, 1}, 7, 1, 36)));
    CASE(9, "  all outside: column 32 = W", (copy_test<TensorMap, false, float>({32, 0, 2, 0, 1}, 7, 1, 36)));
    CASE(10, "  column -4", (copy_test<TensorMap, false, float>({-4, 0, 2, 0, 1}, 7, 1, 36)));
    CASE(11, "rest box 36x4x1x3x4, samples 4..7 of 7", (copy_test<TensorMap, false, float>({0, 28, 2, 0, 4}, 4, 4, 36)));
    CASE(12, "f16 box 48x7x1x3x1 at column 0", (copy_test<TensorMap, false, Half>({0, 4, 2, 0, 1}, 7, 1, 48)));
    CASE(13, "  column -8", (copy_test<TensorMap, false, Half>({-8, 4, 2, 0, 1}, 7, 1, 48)));
    CASE(14, "wgmma tf32 n64 from block 0, 3; n48; n32; n16",
         (wgmma_test<WgmmaType::kTf32, 64>(0) ? wgmma_test<WgmmaType::kTf32, 64>(0) : wgmma_test<WgmmaType::kTf32, 64>(3) ? wgmma_test<WgmmaType::kTf32, 64>(3)
          : wgmma_test<WgmmaType::kTf32, 48>(2) ? wgmma_test<WgmmaType::kTf32, 48>(2) : wgmma_test<WgmmaType::kTf32, 32>(1) ? wgmma_test<WgmmaType::kTf32, 32>(1)
          : wgmma_test<WgmmaType::kTf32, 16>(1)));
    CASE(15, "wgmma f16 n64 from block 3, bf16 n64 from block 1",
         (wgmma_test<WgmmaType::kF16, 64>(3) ? wgmma_test<WgmmaType::kF16, 64>(3) : wgmma_test<WgmmaType::kBf16, 64>(1)));
    CASE(16, "setmaxnreg", setmaxnreg_test());
    CASE(17, "programmatic dependent launch", dependent_test());
    CASE(18, "f32, W = 40, column 32", (copy_test<TensorMap, false, float>({32, 0, 2, 0, 1}, 7, 1, 36, 22528, 0, 0, 7, 40)));
    CASE(20, "EXPECTED TO FAULT: f32 column -3 (not 16 bytes)", (copy_test<TensorMap, false, float>({-3, 0, 2, 0, 1}, 7, 1, 36)));
    CASE(21, "EXPECTED TO FAULT: f32 column 2", (copy_test<TensorMap, false, float>({2, 0, 2, 0, 1}, 7, 1, 36)));
    CASE(22, "EXPECTED TO FAULT: f16 column -4", (copy_test<TensorMap, false, Half>({-4, 4, 2, 0, 1}, 7, 1, 48)));
    CASE(23, "EXPECTED TO FAULT: destination 64 mod 128", (copy_test<TensorMap, false, float>({0, 0, 2, 0, 1}, 7, 1, 36, 22528 + 64)));
  }
  return "no such probe";
}

int main(int argc, char** argv) {
  const bool safe = argc < 2 || !strcmp(argv[1], "safe");
  const int first = safe ? 1 : atoi(argv[1]), last = safe ? 18 : first;
  int bad = 0;
  for (int i = first; i <= last; ++i) {
    const char* name = "";
    const char* error = test(i, &name);
    printf("%2d %-52s %s%s%s\n", i, name, error ? "FAIL" : "PASS", error ? " " : "", error ? error : "");
    fflush(stdout);
    bad += error != nullptr;
    if (error && strncmp(error, "WRONG", 5) != 0) break;
  }
  return bad != 0;
}
