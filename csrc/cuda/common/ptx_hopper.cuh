// One thin function per PTX instruction of Hopper (sm_90a) that CUDA C++ does not offer.
//
// The guard is a macro for the same reason as in ptx.cuh; the emulated twins are in
// tests/emulation/ptx_hopper.cuh. Bodies that need sm_90a are empty for other architectures, so
// that a file with Hopper kernels compiles for every architecture of the build.
#ifndef CONVNORMPOOL_PTX_HOPPER_CUH
#define CONVNORMPOOL_PTX_HOPPER_CUH

#include "ptx.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CONVNORMPOOL_HOPPER 1
#else
#define CONVNORMPOOL_HOPPER 0
#endif

namespace convnormpool {

// The operand types of wgmma that are used here; sums are float32.
enum class WgmmaType { kF16, kBf16 };

// A tensor map as cuTensorMapEncodeTiled writes it, without the driver's header.
struct alignas(128) TensorMap {
  unsigned char bytes[128];
};

// Loads from and stores to a 32-bit shared address, in order with the barriers around them.
__device__ __forceinline__ void load_shared(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ void load_shared(float (&r)[4], uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const float (&r)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(r[0]), "f"(r[1]),
               "f"(r[2]), "f"(r[3])
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const float (&r)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(r[0]), "f"(r[1]) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

// Stores 16 or 8 bytes, aligned, to global memory with one instruction: of an assignment the
// compiler sometimes makes a store of each word.
__device__ __forceinline__ void store_global(float* to, const float (&r)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(r[0]), "f"(r[1]),
               "f"(r[2]), "f"(r[3])
               : "memory");
}
__device__ __forceinline__ void store_global(uint16_t* to, uint32_t low, uint32_t high) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
}

// d[0 .. 3] = four floats of shared memory, without new registers: see set_accumulator.
__device__ __forceinline__ void load_accumulators(float* d, uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(address)
               : "memory");
}

// Stores four 8 × 8 matrices of 16-bit elements: lane 8i + j gives the address of row j of matrix i
// (16 bytes, aligned); register i of a lane holds elements 2k and 2k + 1 of row g of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4]) {
#if CONVNORMPOOL_HOPPER
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
#endif
}

// The same with each matrix transposed: register i holds rows 2k and 2k + 1 of column g.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&r)[4]) {
#if CONVNORMPOOL_HOPPER
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
#endif
}

// The same for one matrix, whose rows lanes 0 .. 7 give.
__device__ __forceinline__ void stmatrix_x1_trans(uint32_t row_address, uint32_t r) {
#if CONVNORMPOOL_HOPPER
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row_address),
               "r"(r)
               : "memory");
#endif
}

// sum += v and square += v * v where 0 <= column < columns: as predicated instructions, where the
// compiler would branch around them and could no longer mix them with others.
__device__ __forceinline__ void add_moments_if(float (&sum)[4], float (&square)[4],
                                               const float (&v)[4], int column, int columns) {
  asm("{\n"
      ".reg .pred valid;\n"
      "setp.lt.u32 valid, %12, %13;\n"
      "@valid add.f32 %0, %0, %8;\n"
      "@valid add.f32 %1, %1, %9;\n"
      "@valid add.f32 %2, %2, %10;\n"
      "@valid add.f32 %3, %3, %11;\n"
      "@valid fma.rn.f32 %4, %8, %8, %4;\n"
      "@valid fma.rn.f32 %5, %9, %9, %5;\n"
      "@valid fma.rn.f32 %6, %10, %10, %6;\n"
      "@valid fma.rn.f32 %7, %11, %11, %7;\n"
      "}\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(square[0]), "+f"(square[1]),
        "+f"(square[2]), "+f"(square[3])
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(column), "r"(columns));
}

// sum += v where inside is not 0, likewise.
__device__ __forceinline__ void add_if(float (&sum)[4], const float* v, uint32_t inside) {
  asm("{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %8, 0;\n"
      "@valid add.f32 %0, %0, %4;\n"
      "@valid add.f32 %1, %1, %5;\n"
      "@valid add.f32 %2, %2, %6;\n"
      "@valid add.f32 %3, %3, %7;\n"
      "}\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(inside));
}

// d[i] = s[i] * edge where |y[i]| >= limit or inside is 0: as predicated instructions.
__device__ __forceinline__ void multiply_beyond(float (&d)[4], const float (&y)[4], float limit,
                                                const float (&s)[4], float edge, uint32_t inside) {
  asm("{\n"
      ".reg .pred outside, beyond;\n"
      ".reg .f32 size;\n"
      "setp.eq.u32 outside, %14, 0;\n"
      "abs.f32 size, %4;\n"
      "setp.ge.or.f32 beyond, size, %13, outside;\n"
      "@beyond mul.f32 %0, %8, %12;\n"
      "abs.f32 size, %5;\n"
      "setp.ge.or.f32 beyond, size, %13, outside;\n"
      "@beyond mul.f32 %1, %9, %12;\n"
      "abs.f32 size, %6;\n"
      "setp.ge.or.f32 beyond, size, %13, outside;\n"
      "@beyond mul.f32 %2, %10, %12;\n"
      "abs.f32 size, %7;\n"
      "setp.ge.or.f32 beyond, size, %13, outside;\n"
      "@beyond mul.f32 %3, %11, %12;\n"
      "}\n"
      : "+&f"(d[0]), "+&f"(d[1]), "+&f"(d[2]), "+&f"(d[3])
      : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(s[0]), "f"(s[1]), "f"(s[2]), "f"(s[3]),
        "f"(edge), "f"(limit), "r"(inside));
}

// d[i] += y[i] * factor where |y[i]| < limit, likewise.
__device__ __forceinline__ void add_within(float (&d)[4], const float (&y)[4], float factor,
                                           float limit) {
  asm("{\n"
      ".reg .pred within;\n"
      ".reg .f32 size;\n"
      "abs.f32 size, %4;\n"
      "setp.lt.f32 within, size, %9;\n"
      "@within fma.rn.f32 %0, %4, %8, %0;\n"
      "abs.f32 size, %5;\n"
      "setp.lt.f32 within, size, %9;\n"
      "@within fma.rn.f32 %1, %5, %8, %1;\n"
      "abs.f32 size, %6;\n"
      "setp.lt.f32 within, size, %9;\n"
      "@within fma.rn.f32 %2, %6, %8, %2;\n"
      "abs.f32 size, %7;\n"
      "setp.lt.f32 within, size, %9;\n"
      "@within fma.rn.f32 %3, %7, %8, %3;\n"
      "}\n"
      : "+&f"(d[0]), "+&f"(d[1]), "+&f"(d[2]), "+&f"(d[3])
      : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(factor), "f"(limit));
}

// ---- wgmma

// x once more, where zero is 0 and the compiler does not know it. Where a value stands in two
// operands of wgmmas, or twice in one, ptxas would copy the whole operand before each use.
__device__ __forceinline__ uint32_t distinct_copy(uint32_t x, uint32_t zero) {
  uint32_t copy;
  asm volatile("or.b32 %0, %1, %2;" : "=r"(copy) : "r"(x), "r"(zero));
  return copy;
}

// A B operand of wgmma in shared memory, K-major and not swizzled: core matrices of 8 columns × 16
// bytes (a column after the other), one after the other along the columns, depth_bytes from one to
// the next along the depth. This is the low word of the descriptor; the high one is always the
// same. Adding bytes / 16 moves the operand.
__device__ __forceinline__ uint32_t wgmma_operand(uint32_t address, uint32_t depth_bytes) {
  return (address & 0x3FFFFu) >> 4 | depth_bytes >> 4 << 16;
}

// The whole descriptor, for wgmmas that use few of them: with the high word from memory they stay
// in uniform registers, where a constant is written anew for each wgmma.
static __constant__ uint32_t wgmma_operand_high = 8;

__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t operand) {
  return uint64_t(wgmma_operand_high) << 32 | operand;
}

// Before the first wgmma, and whenever other instructions wrote the registers it uses.
__device__ __forceinline__ void wgmma_fence() {
#if CONVNORMPOOL_HOPPER
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if CONVNORMPOOL_HOPPER
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most Pending groups are unfinished.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
#if CONVNORMPOOL_HOPPER
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}

// Keeps the compiler from moving uses of accumulators across this point.
template <int Count>
__device__ __forceinline__ void pin_accumulators(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Makes fragments real registers before this point: a wgmma may not read what is computed between
// its fence and itself, and the compiler would move the computation there.
template <int Count>
__device__ __forceinline__ void pin_fragments(uint32_t (&a)[Count][4]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
  }
}

// d = value without a new register: an ordinary assignment makes ptxas copy all accumulators.
__device__ __forceinline__ void set_accumulator(float& d, float value) {
  asm volatile("mov.b32 %0, %1;" : "+f"(d) : "f"(value));
}

// d *= factor, likewise.
__device__ __forceinline__ void scale_accumulator(float& d, float factor) {
  asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(d) : "f"(factor));
}

#define CONVNORMPOOL_D8(mode, i)                                                              \
  mode(d[i]), mode(d[i + 1]), mode(d[i + 2]), mode(d[i + 3]), mode(d[i + 4]), mode(d[i + 5]), \
      mode(d[i + 6]), mode(d[i + 7])
#define CONVNORMPOOL_WGMMA(shape, types, scale_d, registers, a_operands, descriptor, b, ...)       \
  asm volatile("{\n.reg .b64 descriptor;\nmov.b64 descriptor, " descriptor                         \
               ";\n"                                                                               \
               "wgmma.mma_async.sync.aligned." shape ".f32." types " {" registers "}, " a_operands \
               ", descriptor, " scale_d ", 1, 1, 0;\n}\n"                                          \
               : __VA_ARGS__                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), b)
#define CONVNORMPOOL_WGMMA_TYPES(n, scale_d, registers, a_operands, descriptor, b, ...)            \
  if constexpr (Type == WgmmaType::kF16) {                                                         \
    CONVNORMPOOL_WGMMA("m64n" n "k16", "f16.f16", scale_d, registers, a_operands, descriptor, b,   \
                       __VA_ARGS__);                                                               \
  } else {                                                                                         \
    CONVNORMPOOL_WGMMA("m64n" n "k16", "bf16.bf16", scale_d, registers, a_operands, descriptor, b, \
                       __VA_ARGS__);                                                               \
  }
#define CONVNORMPOOL_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CONVNORMPOOL_R16 CONVNORMPOOL_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CONVNORMPOOL_R24 CONVNORMPOOL_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CONVNORMPOOL_R32 CONVNORMPOOL_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
// begin and end: what stands around the operand b, whose constraint is `b`, in its descriptor.
#define CONVNORMPOOL_WGMMA_WIDTHS(mode, scale_d, begin, end, b)                       \
  if constexpr (N == 16) {                                                            \
    CONVNORMPOOL_WGMMA_TYPES("16", scale_d, CONVNORMPOOL_R8, "{%8, %9, %10, %11}",    \
                             begin "%12" end, b, CONVNORMPOOL_D8(mode, 0));           \
  } else if constexpr (N == 32) {                                                     \
    CONVNORMPOOL_WGMMA_TYPES("32", scale_d, CONVNORMPOOL_R16, "{%16, %17, %18, %19}", \
                             begin "%20" end, b, CONVNORMPOOL_D8(mode, 0),            \
                             CONVNORMPOOL_D8(mode, 8));                               \
  } else if constexpr (N == 48) {                                                     \
    CONVNORMPOOL_WGMMA_TYPES("48", scale_d, CONVNORMPOOL_R24, "{%24, %25, %26, %27}", \
                             begin "%28" end, b, CONVNORMPOOL_D8(mode, 0),            \
                             CONVNORMPOOL_D8(mode, 8), CONVNORMPOOL_D8(mode, 16));    \
  } else {                                                                            \
    CONVNORMPOOL_WGMMA_TYPES("64", scale_d, CONVNORMPOOL_R32, "{%32, %33, %34, %35}", \
                             begin "%36" end, b, CONVNORMPOOL_D8(mode, 0),            \
                             CONVNORMPOOL_D8(mode, 8), CONVNORMPOOL_D8(mode, 16),     \
                             CONVNORMPOOL_D8(mode, 24));                              \
  }

// d += a · B, asynchronously, by four warps: a 64 × 16 in registers, B 16 × N a wgmma_operand, d 64
// × N. Warp q of the warpgroup owns rows 16 q .. 16 q + 15; within them a is a fragment of
// mma_m16n8k16_f16, and d[4 j .. 4 j + 3] is its fragment c for columns 8 j .. 8 j + 7. Without
// Accumulate d = a · B.
template <WgmmaType Type, int N, bool Accumulate = true>
__device__ __forceinline__ void wgmma(float* d, const uint32_t (&a)[4], uint32_t b) {
  static_assert(N == 16 || N == 32 || N == 48 || N == 64, "the widths that are used");
#if CONVNORMPOOL_HOPPER
  if constexpr (Accumulate) {
    CONVNORMPOOL_WGMMA_WIDTHS("+f", "1", "{", ", 8}", "r"(b));
  } else {
    CONVNORMPOOL_WGMMA_WIDTHS("=f", "0", "{", ", 8}", "r"(b));
  }
#endif
}

// The same, accumulating, with B a whole descriptor.
template <WgmmaType Type, int N>
__device__ __forceinline__ void wgmma(float* d, const uint32_t (&a)[4], uint64_t b) {
  static_assert(N == 16 || N == 32 || N == 48 || N == 64, "the widths that are used");
#if CONVNORMPOOL_HOPPER
  CONVNORMPOOL_WGMMA_WIDTHS("+f", "1", "", "", "l"(b));
#endif
}

#define CONVNORMPOOL_WGMMA_SHARED(shape, types, scale_d, registers, a_operand, b_operand, b_high, \
                                  ...)                                                            \
  asm volatile("{\n.reg .b64 a_descriptor, b_descriptor;\nmov.b64 a_descriptor, {" a_operand      \
               ", 8};\nmov.b64 b_descriptor, {" b_operand ", " b_high                             \
               "};\nwgmma.mma_async.sync.aligned." shape ".f32." types " {" registers             \
               "}, a_descriptor, b_descriptor, " scale_d ", 1, 1, 1, 0;\n}\n"                     \
               : __VA_ARGS__                                                                      \
               : "r"(a), "r"(b), "n"(kColumnBytes / 16))
#define CONVNORMPOOL_WGMMA_SHARED_TYPES(n, scale_d, registers, a_operand, b_operand, b_high, ...)  \
  if constexpr (Type == WgmmaType::kF16) {                                                         \
    CONVNORMPOOL_WGMMA_SHARED("m64n" n "k16", "f16.f16", scale_d, registers, a_operand, b_operand, \
                              b_high, __VA_ARGS__);                                                \
  } else {                                                                                         \
    CONVNORMPOOL_WGMMA_SHARED("m64n" n "k16", "bf16.bf16", scale_d, registers, a_operand,          \
                              b_operand, b_high, __VA_ARGS__);                                     \
  }
#define CONVNORMPOOL_WGMMA_SHARED_WIDTHS(mode, scale_d)                                    \
  if constexpr (N == 16) {                                                                 \
    CONVNORMPOOL_WGMMA_SHARED_TYPES("16", scale_d, CONVNORMPOOL_R8, "%8", "%9", "%10",     \
                                    CONVNORMPOOL_D8(mode, 0));                             \
  } else if constexpr (N == 32) {                                                          \
    CONVNORMPOOL_WGMMA_SHARED_TYPES("32", scale_d, CONVNORMPOOL_R16, "%16", "%17", "%18",  \
                                    CONVNORMPOOL_D8(mode, 0), CONVNORMPOOL_D8(mode, 8));   \
  } else if constexpr (N == 48) {                                                          \
    CONVNORMPOOL_WGMMA_SHARED_TYPES("48", scale_d, CONVNORMPOOL_R24, "%24", "%25", "%26",  \
                                    CONVNORMPOOL_D8(mode, 0), CONVNORMPOOL_D8(mode, 8),    \
                                    CONVNORMPOOL_D8(mode, 16));                            \
  } else {                                                                                 \
    CONVNORMPOOL_WGMMA_SHARED_TYPES("64", scale_d, CONVNORMPOOL_R32, "%32", "%33", "%34",  \
                                    CONVNORMPOOL_D8(mode, 0), CONVNORMPOOL_D8(mode, 8),    \
                                    CONVNORMPOOL_D8(mode, 16), CONVNORMPOOL_D8(mode, 24)); \
  }

// The same with a in shared memory: a wgmma_operand whose rows are neighbours. Its core matrices
// are 8 depths of 16 bytes, one after the other along the rows. B's are kColumnBytes apart along
// its columns, and may overlap.
template <WgmmaType Type, int N, int kColumnBytes, bool Accumulate = true>
__device__ __forceinline__ void wgmma_shared(float* d, uint32_t a, uint32_t b) {
  static_assert(N == 16 || N == 32 || N == 48 || N == 64, "the widths that are used");
#if CONVNORMPOOL_HOPPER
  if constexpr (Accumulate) {
    CONVNORMPOOL_WGMMA_SHARED_WIDTHS("+f", "1");
  } else {
    CONVNORMPOOL_WGMMA_SHARED_WIDTHS("=f", "0");
  }
#endif
}

#undef CONVNORMPOOL_WGMMA_SHARED_WIDTHS
#undef CONVNORMPOOL_WGMMA_SHARED_TYPES
#undef CONVNORMPOOL_WGMMA_SHARED
#undef CONVNORMPOOL_WGMMA_WIDTHS
#undef CONVNORMPOOL_R32
#undef CONVNORMPOOL_R24
#undef CONVNORMPOOL_R16
#undef CONVNORMPOOL_R8
#undef CONVNORMPOOL_WGMMA_TYPES
#undef CONVNORMPOOL_WGMMA
#undef CONVNORMPOOL_D8

// ---- barriers in shared memory and the tensor copies that complete on them

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers and ordinary writes to shared memory visible to copies and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
#if CONVNORMPOOL_HOPPER
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// One arrival, and `bytes` more to come before the barrier's phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
#if CONVNORMPOOL_HOPPER
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// One arrival.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
#if CONVNORMPOOL_HOPPER
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Waits for the end of the phase of this parity (the first has parity 0).
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if CONVNORMPOOL_HOPPER
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Copies the map's box whose first element has these coordinates (fastest axis first) to shared
// memory; what lies outside the tensor becomes zero. Destination aligned to 128 bytes. c0 must be a
// multiple of 16 bytes: the copy engine stops with an illegal instruction where it is not.
__device__ __forceinline__ void tensor_copy(uint32_t destination, const TensorMap* map,
                                            uint32_t barrier, int c0, int c1, int c2, int c3,
                                            int c4) {
#if CONVNORMPOOL_HOPPER
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
#endif
}

}  // namespace convnormpool

#endif  // CONVNORMPOOL_PTX_HOPPER_CUH
