// Standalone check and timing of the fused backward (no torch):
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I csrc -I tests/emulation gpu_bench.cu -o gpu_bench
//   ./gpu_bench check | time | all   [tf32|f16|bf16|split]
// check: every kind on small shapes against float64, poisoned outputs, guard zones, determinism.
// time: the reference workload, L2 flushed before each launch; a line for each configuration.
#include "cuda/conv_activation_moments_backward_window.cuh"
#include "backward_check.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

using namespace convnormpool;
using check::Shape;
using convnormpool::Activation;

#define CK(call)                                                                          \
  do {                                                                                    \
    const cudaError_t e_ = (call);                                                        \
    if (e_ != cudaSuccess) {                                                              \
      printf("CUDA error %s at %s:%d\n", cudaGetErrorString(e_), __FILE__, __LINE__);     \
      exit(2);                                                                            \
    }                                                                                     \
  } while (0)

int failures = 0;
int sm_count = 0;

// Device memory with guard zones; contents poisoned with 0xFF.
struct Buffer {
  static constexpr size_t kGuard = 1 << 16;
  unsigned char* base = nullptr;
  size_t bytes = 0;
  explicit Buffer(size_t n = 0) : bytes(n) {
    CK(cudaMalloc(&base, n + 2 * kGuard));
    CK(cudaMemset(base, 0xA5, n + 2 * kGuard));
    poison();
  }
  template <class T>
  explicit Buffer(const std::vector<T>& v) : Buffer(v.size() * sizeof(T)) {
    if (!v.empty()) CK(cudaMemcpy(data<T>(), v.data(), bytes, cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(base); }
  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(base + kGuard);
  }
  void poison() { CK(cudaMemset(base + kGuard, 0xFF, bytes)); }
  template <class T>
  std::vector<T> read() const {
    std::vector<T> v(bytes / sizeof(T));
    CK(cudaMemcpy(v.data(), base + kGuard, bytes, cudaMemcpyDeviceToHost));
    return v;
  }
  void check_guards(const char* what) const {
    std::vector<unsigned char> g(2 * kGuard);
    CK(cudaMemcpy(g.data(), base, kGuard, cudaMemcpyDeviceToHost));
    CK(cudaMemcpy(g.data() + kGuard, base + kGuard + bytes, kGuard, cudaMemcpyDeviceToHost));
    for (const unsigned char c : g) {
      if (c != 0xA5) {
        printf("FAIL guard zone of %s was written\n", what);
        ++failures;
        return;
      }
    }
  }
};

template <class Config>
struct Launcher {
  BackwardParameters p{};
  int tiles, blocks, shared;
  typename Config::ActivationType activation{};

  Launcher(const Shape& s, int slab_planes, int want_blocks, Activation kind) {
    const auto n = [](int64_t v) { return int32_t(v); };
    p.N = n(s.N);
    p.geometry = backward_geometry(n(s.D), n(s.H), n(s.W), n(s.K), Config::T, Config::R, Config::S,
                                   n(s.pad_d), n(s.pad_h), n(s.pad_w), slab_planes,
                                   Config::kRowWarps, Config::kInputGradient);
    tiles = int(s.K + 15) / 16;
    shared = Config::shared_bytes(p.geometry.slab_planes);
    if constexpr (std::is_same_v<typename Config::ActivationType, ActivationFn>) {
      activation.kind = kind;
    }
    CK(cudaFuncSetAttribute(backward_window_kernel<Config>,
                            cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    int resident = 0;
    CK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, backward_window_kernel<Config>,
                                                     Config::kThreads, shared));
    const int room = std::max(1, resident * sm_count / (Config::kInputGradient ? 1 : tiles));
    blocks = int(std::min<int64_t>(want_blocks > 0 ? want_blocks : room,
                                   s.N * backward_pieces(p.geometry)));
  }
  size_t filter_floats() const {
    return size_t(tiles) * blocks * Config::kFilterWarps * 16 * Config::kTaps;
  }
  size_t bias_floats() const { return size_t(tiles) * blocks * Config::kRowWarps * 16; }
  void run() {
    if constexpr (Config::kInputGradient) {
      for (int tile = 0; tile < tiles; ++tile) {
        p.first_tile = tile, p.add_to_sum = tile > 0, p.write_dx = tile + 1 == tiles;
        backward_window_kernel<Config><<<dim3(blocks), Config::kThreads, shared>>>(p, activation);
      }
    } else {
      backward_window_kernel<Config>
          <<<dim3(blocks, tiles), Config::kThreads, shared>>>(p, activation);
    }
    CK(cudaGetLastError());
  }
  template <class Element>
  void sum(Element* dw, Element* db) {
    if constexpr (Config::kFilterGradient) {
      const dim3 threads(kBackwardSumElements, kBackwardSumSlices);
      const int K = p.geometry.K;
      sum_backward_kernel<Element><<<(K * Config::kTaps + 31) / 32, threads>>>(
          p.filter_partial, blocks * Config::kFilterWarps, K, Config::kTaps, dw);
      sum_backward_kernel<Element><<<(K + 31) / 32, threads>>>(p.bias_partial,
                                                              blocks * Config::kRowWarps, K, 1, db);
      CK(cudaGetLastError());
    }
  }
};

template <WindowOperand O>
const char* kind_name() {
  return O == WindowOperand::kTf32     ? "tf32 "
         : O == WindowOperand::kSplit  ? "split"
         : O == WindowOperand::kFloat16 ? "f16  "
                                        : "bf16 ";
}

// Quiet comparison: the largest error in units of what is allowed, and the norm's.
template <class Element>
void report(const std::string& name, const std::vector<Element>& got,
            const std::vector<double>& expected, const std::vector<double>& square,
            const std::vector<double>& slack, double operand_unit, double store_unit, bool half) {
  double worst = 0, error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = std::fabs(double(float(got[i])) - expected[i]);
    const double allowed = 4 * operand_unit * std::sqrt(square[i]) + slack[i] +
                           store_unit * std::fabs(expected[i]) + (half ? 0x1p-24 : 1e-44);
    const double ratio = difference / allowed;
    worst = std::isfinite(ratio) ? std::max(worst, ratio) : INFINITY;
    error += difference * difference, norm += expected[i] * expected[i];
  }
  const bool good = worst <= 1;
  failures += !good;
  printf("%s %-46s %8.3f allowed  rel %.2g\n", good ? "ok  " : "FAIL", name.c_str(), worst,
         std::sqrt(error / norm));
}

template <class Config, class C>
typename C::Gradients run_once(const Shape& s, const typename C::Data& d, int slab_planes,
                               int blocks, Activation kind) {
  using Element = typename C::Element;
  Launcher<Config> l(s, slab_planes, blocks, kind);
  Buffer x(d.x), w(d.w), bias(d.bias), mean(d.mean), gm(d.grad_mean), g2(d.grad_m2);
  Buffer filter(l.filter_floats() * 4), fb(l.bias_floats() * 4), sum(d.x.size() * 4);
  Buffer dx(d.x.size() * sizeof(Element)), dw(d.w.size() * sizeof(Element)),
      db(size_t(s.K) * sizeof(Element));
  l.p.x = x.data(), l.p.w = w.data(), l.p.bias = d.bias.empty() ? nullptr : bias.data();
  l.p.mean = mean.data<float>(), l.p.grad_mean = gm.data<float>(), l.p.grad_m2 = g2.data<float>();
  l.p.dx = dx.data(), l.p.dx_sum = sum.data<float>();
  l.p.filter_partial = filter.data<float>(), l.p.bias_partial = fb.data<float>();
  l.run();
  l.sum(dw.data<Element>(), db.data<Element>());
  CK(cudaDeviceSynchronize());
  dx.check_guards("dx"), dw.check_guards("dw"), db.check_guards("db"), sum.check_guards("sum");
  filter.check_guards("filter partial"), fb.check_guards("bias partial");
  typename C::Gradients g;
  if (Config::kInputGradient) g.dx = dx.template read<Element>();
  if (Config::kFilterGradient) g.dw = dw.template read<Element>(), g.db = db.template read<Element>();
  return g;
}

template <class A>
bool same(const std::vector<A>& a, const std::vector<A>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), sizeof(A) * a.size()) == 0;
}

template <int T, int R, int S, int C_, bool General, WindowOperand O, class Fn = HardswishFn>
void check_shape(Shape s, std::mt19937_64& random, const char* note, int slab = 1 << 20,
                 Activation kind = Activation::kHardswish) {
  using C = check::Backward<O>;
  constexpr int kF = O == WindowOperand::kSplit ? 4 : 2, kB = O == WindowOperand::kSplit ? 1 : 2;
  s.C = C_, s.T = T, s.R = R, s.S = S;
  const auto d = C::make_data(s, random, kind, O == WindowOperand::kFloat16 ? 1.0 : 1e-7);
  const auto e = C::reference(s, d, kind);
  char text[160];
  snprintf(text, sizeof text, "%s %dx%dx%d C%d D%d H%d W%d K%d p%d,%d,%d %s", kind_name<O>(), T, R, S,
           C_, int(s.D), int(s.H), int(s.W), int(s.K), int(s.pad_d), int(s.pad_h), int(s.pad_w),
           note);
  const std::string name = text;
  const bool half = O == WindowOperand::kFloat16;
  const auto compare = [&](const char* what, const auto& got, const auto& want, const auto& square,
                           const auto& slack) {
    report(name + what, got, want, square, slack, C::kOperandUnit, C::kStoreUnit, half);
  };
  using W = BackwardConfig<T, R, S, C_, O, Fn, General, false, true, 4, kF, kB>;
  using X = BackwardConfig<T, R, S, C_, O, Fn, General, true, false, 4, 0, 2>;
  using B = BackwardConfig<T, R, S, C_, O, Fn, General, true, true, 4, kF, 1>;
  const auto f = run_once<W, C>(s, d, slab, 3, kind);
  compare(" dw", f.dw, e.dw, e.dw_square, e.dw_slack);
  compare(" db", f.db, e.db, e.db_square, e.db_slack);
  const auto again = run_once<W, C>(s, d, slab, 3, kind);
  const auto x = run_once<X, C>(s, d, slab, 2, kind);
  compare(" dx", x.dx, e.dx, e.dx_square, e.dx_slack);
  const auto x2 = run_once<X, C>(s, d, slab, 5, kind);
  bool equal = same(f.dw, again.dw) && same(f.db, again.db) && same(x.dx, x2.dx);
  if (s.K <= 16) {
    const auto b = run_once<B, C>(s, d, slab, 2, kind);
    compare(" dw (both)", b.dw, e.dw, e.dw_square, e.dw_slack);
    equal = equal && same(b.dx, x.dx);
  }
  if (!equal) printf("FAIL %s: bits differ between launches\n", text), ++failures;
}

template <WindowOperand O>
void check_kind() {
  std::mt19937_64 random(20240611);
  check_shape<4, 4, 4, 3, false, O>({7, 0, 16, 32, 32, 16, 0, 0, 0}, random, "ref");
  check_shape<4, 4, 4, 3, false, O>({3, 0, 6, 7, 29, 24, 0, 0, 0, 1, 1, 1}, random, "simple");
  check_shape<4, 4, 4, 3, true, O>({2, 0, 9, 5, 33, 7, 0, 0, 0, 3, 3, 3}, random, "slabs", 5);
  check_shape<4, 4, 4, 3, true, O>({2, 0, 5, 4, 64, 16, 0, 0, 0, 1, 0, 2}, random, "");
  check_shape<3, 3, 3, 3, true, O>({3, 0, 8, 12, 31, 40, 0, 0, 0, 1, 1, 1}, random, "");
  check_shape<3, 3, 3, 1, true, O>({3, 0, 2, 3, 5, 16, 0, 0, 0, 2, 2, 2}, random, "");
  check_shape<3, 3, 3, 3, true, O, ActivationFn>({2, 0, 5, 6, 20, 16, 0, 0, 0, 1, 1, 1}, random,
                                                 "gelu", 1 << 20, Activation::kGelu);
}

// ---- timing

struct Workload {
  Shape s{1024, 3, 16, 32, 32, 16, 4, 4, 4};
};

__global__ void fill_kernel(uint32_t* p, size_t words, uint32_t seed, int mode, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words;
       i += size_t(gridDim.x) * blockDim.x) {
    uint32_t h = uint32_t(i) * 2654435761u + seed;
    h ^= h >> 16, h *= 0x85EBCA6Bu, h ^= h >> 13, h *= 0xC2B2AE35u, h ^= h >> 16;
    uint32_t g = h * 747796405u + 2891336453u;
    g ^= g >> 15;
    const float u = (float(h >> 8) - 8388608.0f) / 8388608.0f * scale * 1.7f;
    const float v = (float(g >> 8) - 8388608.0f) / 8388608.0f * scale * 1.7f;
    if (mode == 0) {
      p[i] = __float_as_uint(u);
    } else if (mode == 1) {
      const __half2 two = __floats2half2_rn(u, v);
      memcpy(&p[i], &two, 4);
    } else {
      const __nv_bfloat162 two = __floats2bfloat162_rn(u, v);
      memcpy(&p[i], &two, 4);
    }
  }
}

struct Random : Buffer {
  Random(size_t elements, int mode, float scale, uint32_t seed)
      : Buffer((elements * (mode == 0 ? 4 : 2) + 3) / 4 * 4) {
    fill_kernel<<<1024, 256>>>(data<uint32_t>(), bytes / 4, seed, mode, scale);
    CK(cudaDeviceSynchronize());
  }
};

float median(std::vector<float> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

template <class F>
float time_ms(Buffer& flush, const F& f, int repeats = 15) {
  cudaEvent_t a, b;
  CK(cudaEventCreate(&a));
  CK(cudaEventCreate(&b));
  std::vector<float> times;
  for (int i = 0; i < repeats + 3; ++i) {
    CK(cudaMemsetAsync(flush.data(), i, flush.bytes));
    CK(cudaEventRecord(a));
    f();
    CK(cudaEventRecord(b));
    CK(cudaEventSynchronize(b));
    float ms = 0;
    CK(cudaEventElapsedTime(&ms, a, b));
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(a), cudaEventDestroy(b);
  return median(times);
}

template <WindowOperand O, bool General, bool DX, bool DW, int Rows, int Filters, int Blocks>
void time_config(const Workload& work, const Random& x, const Random& w, const Random& bias,
                 const Random& mean, const Random& gm, const Random& g2, Buffer& flush,
                 const char* note) {
  using Config = BackwardConfig<4, 4, 4, 3, O, HardswishFn, General, DX, DW, Rows, Filters, Blocks>;
  using Element = typename check::Backward<O>::Element;
  const Shape& s = work.s;
  cudaFuncAttributes attributes;
  CK(cudaFuncGetAttributes(&attributes, backward_window_kernel<Config>));
  Launcher<Config> l(s, 32, 0, Activation::kHardswish);
  const size_t inputs = size_t(s.N * s.C * s.D * s.H * s.W);
  Buffer dx(DX ? inputs * sizeof(Element) : 4), dw(16 * 192 * sizeof(Element)),
      db(16 * sizeof(Element)), filter(l.filter_floats() * 4 + 4), fb(l.bias_floats() * 4 + 4);
  l.p.x = x.data(), l.p.w = w.data(), l.p.bias = bias.data();
  l.p.mean = mean.data<float>(), l.p.grad_mean = gm.data<float>(), l.p.grad_m2 = g2.data<float>();
  l.p.dx = dx.data();
  l.p.filter_partial = filter.data<float>(), l.p.bias_partial = fb.data<float>();
  const float main_ms = time_ms(flush, [&] { l.run(); });
  const float all_ms = time_ms(flush, [&] {
    l.run();
    l.sum(dw.data<Element>(), db.data<Element>());
  });
  // Live MMAs: 13 planes of 29 rows; 48 again, 48 filter gradient, 64 input gradient.
  const double mmas = double(s.N) * 29 * 13 * (48 + (DW ? 48 : 0) + (DX ? 64 : 0)) *
                      (O == WindowOperand::kSplit ? 3 : 1);
  const double clocks = main_ms * 1e-3 * 1.71e9 * sm_count * 4 / mmas;
  int resident = 0;
  CK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, backward_window_kernel<Config>,
                                                   Config::kThreads, l.shared));
  printf("%s %-5s rows %d filters %d blocks/SM %d(%d) regs %3d local %3zu smem %6d | kernel %.3f ms "
         "with sums %.3f | %.1f clocks per MMA and sub-core (wall 6.15: %2.0f %%) %s\n",
         kind_name<O>(), DX && DW ? "dx+dw" : DX ? "dx" : "dw", Rows, Filters, resident, Blocks,
         attributes.numRegs, attributes.localSizeBytes, l.shared, main_ms, all_ms, clocks,
         615.0 / clocks, note);
  fflush(stdout);
}

template <WindowOperand O>
void time_kind() {
  const Workload work;
  const Shape& s = work.s;
  const int mode = O == WindowOperand::kFloat16 ? 1 : O == WindowOperand::kBFloat16 ? 2 : 0;
  Random x(size_t(s.N * s.C * s.D * s.H * s.W), mode, 1.0f, 1), w(16 * 192, mode, 0.072f, 2),
      bias(16, mode, 0.1f, 3), mean(size_t(s.N) * 16, 0, 0.3f, 4),
      gm(size_t(s.N) * 16, 0, 1e-3f, 5), g2(size_t(s.N) * 16, 0, 1e-7f, 6);
  Buffer flush(size_t(256) << 20);
#define TIME(General, DX, DW, Rows, Filters, Blocks) \
  time_config<O, General, DX, DW, Rows, Filters, Blocks>(work, x, w, bias, mean, gm, g2, flush, \
                                                         General ? "general" : "")
  if constexpr (O == WindowOperand::kSplit) {
    TIME(false, false, true, 4, 4, 1);
    TIME(false, false, true, 4, 2, 1);
    TIME(false, true, false, 4, 0, 2);
    TIME(false, true, false, 8, 0, 1);
    TIME(false, true, true, 4, 4, 1);
    TIME(false, true, true, 5, 3, 1);
    TIME(true, true, true, 4, 4, 1);
  } else {
    TIME(false, false, true, 4, 2, 2);
    TIME(false, false, true, 2, 1, 4);
    TIME(false, false, true, 4, 4, 1);
    TIME(false, false, true, 8, 4, 1);
    TIME(false, true, false, 4, 0, 2);
    TIME(false, true, false, 4, 0, 3);
    TIME(false, true, false, 8, 0, 1);
    TIME(false, true, true, 4, 2, 2);
    TIME(false, true, true, 8, 4, 1);
    TIME(false, true, true, 6, 2, 1);
    TIME(false, true, true, 4, 2, 1);
    TIME(true, true, true, 4, 2, 1);
  }
#undef TIME
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all", kind = argc > 2 ? argv[2] : "";
  int device = 0;
  CK(cudaGetDevice(&device));
  cudaDeviceProp prop;
  CK(cudaGetDeviceProperties(&prop, device));
  sm_count = prop.multiProcessorCount;
  printf("%s, %d SMs, %zu bytes of shared memory a block\n", prop.name, sm_count,
         prop.sharedMemPerBlockOptin);
  const auto wants = [&](const char* k) { return kind.empty() || kind == k; };
  if (what != "time") {
    if (wants("tf32")) check_kind<WindowOperand::kTf32>();
    if (wants("f16")) check_kind<WindowOperand::kFloat16>();
    if (wants("bf16")) check_kind<WindowOperand::kBFloat16>();
    if (wants("split")) check_kind<WindowOperand::kSplit>();
    printf("%d failures\n", failures);
  }
  if (what != "check") {
    if (wants("tf32")) time_kind<WindowOperand::kTf32>();
    if (wants("f16")) time_kind<WindowOperand::kFloat16>();
    if (wants("bf16")) time_kind<WindowOperand::kBFloat16>();
    if (wants("split")) time_kind<WindowOperand::kSplit>();
  }
  return failures != 0;
}
