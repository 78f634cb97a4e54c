// Test and timing of the Hopper window kernel, one variant a program (-DONLY=n, see the end).
// Build: build.sh. Run: ./gb N [all|fast|profile]: odd sizes and the reference workload, the latter only, or one launch.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/conv_activation_moments_wgmma.cuh"

using namespace convnormpool;

#define CHECK(call)                                                                        \
  do {                                                                                     \
    cudaError_t e_ = (call);                                                               \
    if (e_ != cudaSuccess) {                                                               \
      printf("CUDA error %s at line %d: %s\n", cudaGetErrorName(e_), __LINE__, #call);     \
      fflush(stdout);                                                                      \
      exit(2);                                                                             \
    }                                                                                      \
  } while (0)

struct Shape {
  int N, C, D, H, W, K, T, R, S, pd, ph, pw;
  int Z() const { return D + 2 * pd - T + 1; }
  int P() const { return H + 2 * ph - R + 1; }
  int Q() const { return W + 2 * pw - S + 1; }
};

using Encode = decltype(&cuTensorMapEncodeTiled);
static Encode encode() {
  static Encode f = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult r;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &r));
    if (p == nullptr || r != cudaDriverEntryPointSuccess) { printf("no cuTensorMapEncodeTiled\n"); exit(2); }
    return reinterpret_cast<Encode>(p);
  }();
  return f;
}

template <class Config>
TensorMap tensor_map(const Shape& s, const WgmmaParams& p, bool rest) {
  TensorMap out{};
  if (rest ? p.rest == 0 : p.quads == 0) return out;
  uint32_t box[5], one[5] = {1, 1, 1, 1, 1};
  wgmma_box<Config>(p, rest, box);
  const cuuint64_t dims[5] = {(cuuint64_t)s.W, (cuuint64_t)s.H, (cuuint64_t)s.D, (cuuint64_t)s.C, (cuuint64_t)s.N};
  cuuint64_t strides[4], bytes = Config::kElementBytes;
  for (int i = 0; i < 4; ++i) strides[i] = bytes *= dims[i];
  const CUtensorMapDataType type = Config::kFloat ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : Config::kOperand == WgmmaOperand::kFloat16
                                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  CUresult r = encode()(&map, type, 5, const_cast<void*>(p.x), dims, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) { printf("cuTensorMapEncodeTiled: %d\n", int(r)); exit(2); }
  static_assert(sizeof(map) == sizeof(out));
  memcpy(&out, &map, sizeof(out));
  return out;
}

// GroupNorm and pooling, four groups, gamma 1, beta 0: stands for the package's epilogue op.
__global__ void group_norm_pool_bench(const float* mean, const float* m2, float* out, int N, int K, double count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= N * K) return;
  const int J = K % 4 == 0 ? K / 4 : K, first = i / J * J;
  double mu = 0, var = 0;
  for (int j = 0; j < J; ++j) mu += mean[first + j];
  mu /= J;
  for (int j = 0; j < J; ++j) {
    const double d = mean[first + j] - mu;
    var += m2[first + j] + count * d * d;
  }
  out[i] = float((mean[i] - mu) / sqrt(var / (count * J) + 1e-5));
}

__global__ void fill_bytes(uint4* p, size_t n, uint32_t v) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) p[i] = make_uint4(v, v, v, v);
}

template <class E> E to_element(float v);
template <> float to_element<float>(float v) { return v; }
template <> __half to_element<__half>(float v) { return __float2half_rn(v); }
template <> __nv_bfloat16 to_element<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

static double hardswish(double y) { return y * std::min(6.0, std::max(0.0, y + 3)) / 6; }

struct Reference { std::vector<double> mean, m2, out; };

template <class E>
void reference_sample(const Shape& s, const E* x, const std::vector<E>& w, const std::vector<E>& b, Reference& r) {
  const size_t count = size_t(s.Z()) * s.P() * s.Q();
  r.mean.assign(s.K, 0), r.m2.assign(s.K, 0), r.out.assign(s.K, 0);
  std::vector<std::thread> pool;
  for (int part = 0; part < 8; ++part) pool.emplace_back([&, part] {
    std::vector<double> h(count);
    for (int k = part; k < s.K; k += 8) {
      size_t at = 0;
      double total = 0;
      for (int z = 0; z < s.Z(); ++z) for (int p = 0; p < s.P(); ++p) for (int q = 0; q < s.Q(); ++q) {
        double y = b.empty() ? 0.0 : double(float(b[k]));
        for (int c = 0; c < s.C; ++c) for (int t = 0; t < s.T; ++t) for (int i = 0; i < s.R; ++i) for (int j = 0; j < s.S; ++j) {
          const int d = z + t - s.pd, e = p + i - s.ph, f = q + j - s.pw;
          if (d < 0 || d >= s.D || e < 0 || e >= s.H || f < 0 || f >= s.W) continue;
          y += double(float(x[((size_t(c) * s.D + d) * s.H + e) * s.W + f])) * double(float(w[(((size_t(k) * s.C + c) * s.T + t) * s.R + i) * s.S + j]));
        }
        total += h[at++] = hardswish(y);
      }
      r.mean[k] = total / count;
      for (double v : h) r.m2[k] += (v - r.mean[k]) * (v - r.mean[k]);
    }
  });
  for (auto& t : pool) t.join();
  const int J = s.K % 4 == 0 ? s.K / 4 : s.K;
  for (int k = 0; k < s.K; ++k) {
    double mu = 0, var = 0;
    const int first = k / J * J;
    for (int j = 0; j < J; ++j) mu += r.mean[first + j];
    mu /= J;
    for (int j = 0; j < J; ++j) var += r.m2[first + j] + count * (r.mean[first + j] - mu) * (r.mean[first + j] - mu);
    r.out[k] = (r.mean[k] - mu) / sqrt(var / (count * J) + 1e-5);
  }
}

struct Errors { double mean = 0, m2 = 0, out = 0; bool nan = false; };

struct Device {
  void* p = nullptr;
  explicit Device(size_t bytes) { CHECK(cudaMalloc(&p, std::max<size_t>(bytes, 256))); }
  ~Device() { cudaFree(p); }
  Device(const Device&) = delete;
};

static Device* flush_buffer = nullptr;
static int sm_count = 0;
static bool profile = false;

// A launch that may begin while the one before it ends.
template <class... P, class... A>
void launch_dependent(void (*kernel)(P...), unsigned blocks, unsigned threads, cudaStream_t stream, A... a) {
  cudaLaunchConfig_t c{};
  c.gridDim = blocks, c.blockDim = threads, c.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  c.attrs = &attribute, c.numAttrs = 1;
  const cudaError_t e = cudaLaunchKernelEx(&c, kernel, P(a)...);
  if (e != cudaSuccess) printf("dependent launch: %s\n", cudaGetErrorName(e));
}

template <class Config, class E>
struct Run {
  Shape s;
  std::vector<E> x, w, b;
  WgmmaParams p;
  size_t tiles, x_elements;
  Device dx, dw, db, partials, mean, m2, out;
  TensorMap quad, rest;
  size_t shared;
  cudaFuncAttributes attributes;
  static constexpr auto kernel = conv_activation_moments_wgmma<Config, HardswishFn>;

  static std::vector<E> random(size_t n, unsigned seed, float scale, size_t period) {
    std::vector<E> v(n);
    std::mt19937 g(seed);
    std::normal_distribution<float> d(0, scale);
    for (size_t i = 0; i < std::min(n, period); ++i) v[i] = to_element<E>(d(g));
    for (size_t i = period; i < n; ++i) v[i] = v[(i * 2654435761u) % period];
    return v;
  }

  Run(const Shape& shape, float bias)
      : s(shape), x(random(size_t(s.N) * s.C * s.D * s.H * s.W, 1, 1.5f, 1 << 21)),
        w(random(size_t(s.K) * s.C * s.T * s.R * s.S, 2, 1.f / sqrtf(float(s.C * s.T * s.R * s.S)), 1 << 30)),
        b(random(s.K, 3, 1.f, 1 << 30)), p(make()), tiles((s.K + 15) / 16), x_elements(x.size()),
        dx(x.size() * sizeof(E)), dw(w.size() * sizeof(E)), db(b.size() * sizeof(E)),
        partials(size_t(s.N) * wgmma_pieces(p) * s.K * 8),
        mean(size_t(s.N) * s.K * 4), m2(size_t(s.N) * s.K * 4), out(size_t(s.N) * s.K * 4) {
    for (auto& v : b) v = to_element<E>(float(v) + bias);
    CHECK(cudaMemcpy(dx.p, x.data(), x.size() * sizeof(E), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dw.p, w.data(), w.size() * sizeof(E), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db.p, b.data(), b.size() * sizeof(E), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(partials.p, 0xFF, size_t(s.N) * wgmma_pieces(p) * s.K * 8));
    CHECK(cudaMemset(out.p, 0xFF, size_t(s.N) * s.K * 4));
    p.x = dx.p, p.w = dw.p, p.b = db.p;
    p.partials = static_cast<float2*>(partials.p);
    wgmma_deal(p, blocks());
    quad = tensor_map<Config>(s, p, false), rest = tensor_map<Config>(s, p, true);
    shared = wgmma_shared_bytes<Config>(p);
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    CHECK(cudaFuncGetAttributes(&attributes, kernel));
  }

  WgmmaParams make() const {
    return wgmma_params<Config>(Problem{s.N, s.C, s.D, s.H, s.W, s.K, s.T, s.R, s.S, {1, 1, 1}, {s.pd, s.ph, s.pw}, {1, 1, 1}, 1,
                                        DType::kFloat32, Precision::kTf32});
  }

  int blocks() const { return std::min(p.items, sm_count); }
  void main_kernel(cudaStream_t stream) {
    kernel<<<dim3(unsigned(blocks()), unsigned(tiles)), Config::kThreads, shared, stream>>>(p, quad, rest, HardswishFn{});
  }
  void merge(cudaStream_t stream) {
    launch_dependent(wgmma_merge, unsigned((size_t(s.N) * tiles + 3) / 4), kWgmmaMergeThreads, stream, p, static_cast<float*>(mean.p),
                     static_cast<float*>(m2.p));
  }
  void after(cudaStream_t stream) {
    group_norm_pool_bench<<<(s.N * s.K + 127) / 128, 128, 0, stream>>>(static_cast<float*>(mean.p), static_cast<float*>(m2.p), static_cast<float*>(out.p), s.N, s.K, double(s.Z()) * s.P() * s.Q());
  }
  void forward(cudaStream_t stream) { main_kernel(stream), merge(stream), after(stream); }

  Errors check() {
    CHECK(cudaMemset(mean.p, 0xFF, size_t(s.N) * s.K * 4));
    CHECK(cudaMemset(m2.p, 0xFF, size_t(s.N) * s.K * 4));
    forward(0);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    std::vector<float> got_mean(size_t(s.N) * s.K), got_m2(got_mean.size()), got_out(got_mean.size());
    CHECK(cudaMemcpy(got_mean.data(), mean.p, got_mean.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got_m2.data(), m2.p, got_m2.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got_out.data(), out.p, got_out.size() * 4, cudaMemcpyDeviceToHost));
    Errors e;
    for (size_t i = 0; i < got_mean.size(); ++i) e.nan = e.nan || !std::isfinite(got_mean[i]) || !std::isfinite(got_m2[i]);
    double top[3] = {}, bottom[3] = {};
    std::vector<int> samples = {0, s.N - 1, s.N / 2, s.N / 3};
    std::sort(samples.begin(), samples.end());
    samples.erase(std::unique(samples.begin(), samples.end()), samples.end());
    for (int n : samples) {
      Reference r;
      reference_sample(s, &x[size_t(n) * s.C * s.D * s.H * s.W], w, b, r);
      for (int k = 0; k < s.K; ++k) {
        const size_t i = size_t(n) * s.K + k;
        const double d[3] = {got_mean[i] - r.mean[k], got_m2[i] - r.m2[k], got_out[i] - r.out[k]}, v[3] = {r.mean[k], r.m2[k], r.out[k]};
        for (int j = 0; j < 3; ++j) top[j] += d[j] * d[j], bottom[j] += v[j] * v[j];
      }
    }
    e.mean = sqrt(top[0] / bottom[0]), e.m2 = sqrt(top[1] / bottom[1]), e.out = sqrt(top[2] / bottom[2]);
    return e;
  }

  // Of the whole forward as a graph's launch, in ms, caches warm.
  double graph_time() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 10; ++i) forward(stream);
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess || cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) {
      printf("no graph: %s\n", cudaGetErrorName(cudaGetLastError()));
      return -1;
    }
    cudaEvent_t t0, t1;
    CHECK(cudaEventCreate(&t0)); CHECK(cudaEventCreate(&t1));
    std::vector<float> ms;
    for (int i = 0; i < 11; ++i) {
      CHECK(cudaEventRecord(t0, stream));
      CHECK(cudaGraphLaunch(exec, stream));
      CHECK(cudaEventRecord(t1, stream));
      CHECK(cudaEventSynchronize(t1));
      float v;
      CHECK(cudaEventElapsedTime(&v, t0, t1));
      ms.push_back(v / 10);
    }
    std::sort(ms.begin(), ms.end());
    return ms[5];
  }

  template <class F> double time(F f) {
    cudaEvent_t t0, t1;
    CHECK(cudaEventCreate(&t0)); CHECK(cudaEventCreate(&t1));
    std::vector<float> ms;
    for (int i = 0; i < 23; ++i) {
      fill_bytes<<<1024, 256>>>(static_cast<uint4*>(flush_buffer->p), (size_t(256) << 20) / 16, 0x3f000000u + unsigned(i));
      CHECK(cudaEventRecord(t0));
      f();
      CHECK(cudaEventRecord(t1));
      CHECK(cudaEventSynchronize(t1));
      float v;
      CHECK(cudaEventElapsedTime(&v, t0, t1));
      if (i >= 3) ms.push_back(v);
    }
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
  }
};

// Relative error of the output that is accepted.
template <class Config> double limit() {
  return Config::kTf32 ? 6e-4 : Config::kSplit ? 1e-6 : Config::kOperand == WgmmaOperand::kFloat16 ? 1e-5 : 1e-5;
}

static int failures = 0;

template <class Config, class E>
void odd(const char* name, std::vector<Shape> shapes) {
  for (const Shape& s : shapes) {
    if (s.C != Config::kC || s.T != Config::kT || s.R != Config::kR || s.S != Config::kS) continue;
    if (s.W * int(sizeof(E)) % 16 != 0) continue;
    Run<Config, E> run(s, 0.f);
    const Errors e = run.check();
    const double bound = Config::kTf32 ? 2e-3 : Config::kSplit ? 1e-5 : 2e-5;
    const bool bad = e.nan || !(e.mean < bound) || !(e.m2 < bound);
    failures += bad;
    printf("%s %-26s x(%d,%d,%d,%d,%d) K %d pad %d,%d,%d: mean %.1e m2 %.1e out %.1e%s\n", bad ? "FAIL" : "ok  ", name, s.N, s.C, s.D, s.H, s.W, s.K,
           s.pd, s.ph, s.pw, e.mean, e.m2, e.out, e.nan ? " NaN!" : "");
    fflush(stdout);
  }
}

struct Row { std::string text; };
static std::vector<Row> rows;

template <class Config, class E>
void reference(const char* name) {
  Run<Config, E> run(Shape{1024, 3, 16, 32, 32, 16, 4, 4, 4, 0, 0, 0}, 0.f);
  if (profile) {
    run.forward(0);
    CHECK(cudaDeviceSynchronize());
    return;
  }
  const Errors e = run.check();
  const bool bad = e.nan || !(e.out < limit<Config>());
  failures += bad;
  const double all = run.time([&] { run.forward(0); }), kernel = run.time([&] { run.main_kernel(0); });
  printf("%s: forward %.4f ms, kernel %.4f ms\n", name, all, kernel);
  fflush(stdout);
  run.forward(0);
  // A sample has the same bits in a small batch.
  std::vector<float> big(7 * 16), small(7 * 16);
  CHECK(cudaMemcpy(big.data(), run.m2.p, big.size() * 4, cudaMemcpyDeviceToHost));
  {
    Run<Config, E> few(Shape{7, 3, 16, 32, 32, 16, 4, 4, 4, 0, 0, 0}, 0.f);
    CHECK(cudaMemcpy(few.dx.p, run.x.data(), few.x.size() * sizeof(E), cudaMemcpyHostToDevice));
    few.forward(0);
    CHECK(cudaMemcpy(small.data(), few.m2.p, small.size() * 4, cudaMemcpyDeviceToHost));
  }
  const bool invariant = memcmp(big.data(), small.data(), big.size() * 4) == 0;
  failures += !invariant;
  double n1, n32;
  {
    Run<Config, E> one_sample(Shape{1, 3, 16, 32, 32, 16, 4, 4, 4, 0, 0, 0}, 0.f), some(Shape{32, 3, 16, 32, 32, 16, 4, 4, 4, 0, 0, 0}, 0.f);
    n1 = one_sample.graph_time(), n32 = some.graph_time();
  }
  // The bits of two runs.
  std::vector<float> one(1024 * 16), two(1024 * 16);
  run.forward(0);
  CHECK(cudaMemcpy(one.data(), run.out.p, one.size() * 4, cudaMemcpyDeviceToHost));
  run.forward(0);
  CHECK(cudaMemcpy(two.data(), run.out.p, two.size() * 4, cudaMemcpyDeviceToHost));
  const bool same = memcmp(one.data(), two.data(), one.size() * 4) == 0;
  failures += !same;
  char line[256];
  snprintf(line, sizeof(line), "%-22s %8.4f %8.4f %7.1f %7.1f %9.1e %9.1e %9.1e %5d %6zu %5zu %s%s%s", name, all, kernel, n1 * 1e3, n32 * 1e3, e.mean, e.m2, e.out,
           run.attributes.numRegs, run.attributes.localSizeBytes, run.shared / 1024, bad ? "FAIL " : "", same ? "" : "NOT DETERMINISTIC ", invariant ? "" : "NOT BATCH-INVARIANT");
  rows.push_back({line});
  printf("%s\n", line);
  fflush(stdout);
}

template <class Config, class E>
void variant(int index, const char* name, bool fast, std::vector<Shape> shapes) {
  (void)index;
  if (!fast && !profile) odd<Config, E>(name, shapes);
  if (Config::kC == 3 && Config::kT == 4) reference<Config, E>(name);
}

#if defined(ONLY)
#define VARIANT(n, name, E, ...) if constexpr (ONLY == n) variant<WgmmaConfig<__VA_ARGS__>, E>(n, name, fast, shapes)
#else
#define VARIANT(n, name, E, ...) variant<WgmmaConfig<__VA_ARGS__>, E>(n, name, fast, shapes)
#endif

int main(int argc, char** argv) {
  const bool fast = argc > 1 && !strcmp(argv[1], "fast");
  profile = argc > 1 && !strcmp(argv[1], "profile");
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  sm_count = prop.multiProcessorCount;
  printf("%s, %d SMs\n", prop.name, sm_count);
  Device flush(size_t(256) << 20);
  flush_buffer = &flush;
  const std::vector<Shape> shapes = {
      {7, 3, 16, 32, 32, 16, 4, 4, 4, 0, 0, 0}, {5, 3, 4, 33, 40, 7, 4, 4, 4, 1, 2, 3}, {3, 3, 6, 9, 64, 24, 4, 4, 4, 0, 1, 1},
      {2, 3, 5, 4, 16, 16, 4, 4, 4, 0, 0, 0},   {1, 3, 19, 6, 96, 16, 4, 4, 4, 3, 0, 0}, {3, 3, 8, 10, 31, 16, 4, 4, 4, 2, 1, 0},
      {4, 3, 7, 7, 24, 1, 4, 4, 4, 0, 0, 1},    {9, 3, 9, 11, 16, 17, 3, 3, 3, 1, 1, 1}, {2, 3, 20, 40, 72, 16, 4, 4, 4, 0, 0, 2}, {3, 1, 12, 20, 48, 32, 3, 3, 3, 1, 1, 1}, {257, 1, 6, 11, 24, 16, 3, 3, 3, 1, 1, 1}};
  constexpr auto kTf32 = WgmmaOperand::kTf32, kFloat16 = WgmmaOperand::kFloat16, kBFloat16 = WgmmaOperand::kBFloat16, kSplit = WgmmaOperand::kSplit;
  constexpr auto kOrdered = WgmmaOverlap::kOrdered, kFree = WgmmaOverlap::kFree;
  (void)kTf32, (void)kFloat16, (void)kBFloat16, (void)kSplit, (void)kOrdered, (void)kFree;
  VARIANT(0, "tf32 ordered 3wg 4st", float, kTf32, 3, 4, 4, 4, kOrdered, 3, 4);
  VARIANT(1, "tf32 free 3wg 4st", float, kTf32, 3, 4, 4, 4, kFree, 3, 4);
  VARIANT(2, "tf32 ordered 3wg 6st", float, kTf32, 3, 4, 4, 4, kOrdered, 3, 6);
  VARIANT(3, "tf32 ordered 2wg 4st", float, kTf32, 3, 4, 4, 4, kOrdered, 2, 4);
  VARIANT(4, "fp16 ordered 3wg 4st", __half, kFloat16, 3, 4, 4, 4, kOrdered, 3, 4);
  VARIANT(5, "fp16 free 3wg 4st", __half, kFloat16, 3, 4, 4, 4, kFree, 3, 4);
  VARIANT(6, "fp16 free 4wg 4st", __half, kFloat16, 3, 4, 4, 4, kFree, 4, 4);
  VARIANT(7, "fp16 ordered 4wg 4st", __half, kFloat16, 3, 4, 4, 4, kOrdered, 4, 4);
  VARIANT(8, "bf16 free 4wg 6st", __nv_bfloat16, kBFloat16, 3, 4, 4, 4, kFree, 4, 6);
  VARIANT(9, "ieee ordered 3wg 4st", float, kSplit, 3, 4, 4, 4, kOrdered, 3, 4);
  VARIANT(10, "ieee free 3wg 4st", float, kSplit, 3, 4, 4, 4, kFree, 3, 4);
  VARIANT(11, "tf32 k3 C1", float, kTf32, 1, 3, 3, 3, kOrdered, 3, 4);
  VARIANT(12, "ieee k3 C1", float, kSplit, 1, 3, 3, 3, kFree, 3, 4);
  VARIANT(13, "fp16 k3 C3", __half, kFloat16, 3, 3, 3, 3, kFree, 4, 4);
  
  printf("%-22s %8s %8s %7s %7s %9s %9s %9s %5s %6s %5s\n", "variant", "fwd ms", "kernel", "N=1 us", "N=32 us", "err mean", "err m2", "err out", "regs", "local", "smemK");
  for (const Row& r : rows) printf("%s\n", r.text.c_str());
  printf("%s: %d failures\n", failures ? "FAILED" : "all correct", failures);
  return failures != 0;
}
// Columns: `fwd` is kernel + merge + GroupNorm epilogue, L2 flushed, median of 20; `kernel` the convolution kernel alone; N=1, N=32: a
// whole forward of that batch under a CUDA graph, caches warm. Errors relative, 4 samples against float64; err out is of the layer's
// output (4 groups). regs, local (bytes of local memory), smemK: KiB of shared memory a block. ordered/free: warpgroups issue in turn
// or as they come; wg: warpgroups a block (one block an SM); st: stages of the ring.
