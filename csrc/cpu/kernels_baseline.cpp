// kernels_inner.h for the target that the whole build is for, and the choice between the targets.
#include "kernels.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3,no-trapping-math,no-math-errno")
#endif
#define CONVNORMPOOL_ISA baseline
#if defined(__AVX512F__)
#define CONVNORMPOOL_VECTOR_BYTES 64
#elif defined(__AVX__)
#define CONVNORMPOOL_VECTOR_BYTES 32
#else
#define CONVNORMPOOL_VECTOR_BYTES 16
#endif
#include "kernels_inner.h"

namespace convnormpool {
namespace cpu {

#if CONVNORMPOOL_X86_TARGETS
namespace avx2 {
Kernels<float> float_kernels();
Kernels<double> double_kernels();
}  // namespace avx2
namespace avx512 {
Kernels<float> float_kernels();
Kernels<double> double_kernels();
}  // namespace avx512
#endif

namespace {

enum class Target { kBaseline, kAvx2, kAvx512 };

Target best_target() {
#if CONVNORMPOOL_X86_TARGETS
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) return Target::kAvx512;
  if (avx2) return Target::kAvx2;
#endif
  return Target::kBaseline;
}

}  // namespace

template <>
const Kernels<float>& kernels<float>() {
  static const Kernels<float> table = [] {
#if CONVNORMPOOL_X86_TARGETS
    const Target target = best_target();
    if (target == Target::kAvx512) return avx512::float_kernels();
    if (target == Target::kAvx2) return avx2::float_kernels();
#endif
    return baseline::float_kernels();
  }();
  return table;
}

template <>
const Kernels<double>& kernels<double>() {
  static const Kernels<double> table = [] {
#if CONVNORMPOOL_X86_TARGETS
    const Target target = best_target();
    if (target == Target::kAvx512) return avx512::double_kernels();
    if (target == Target::kAvx2) return avx2::double_kernels();
#endif
    return baseline::double_kernels();
  }();
  return table;
}

}  // namespace cpu
}  // namespace convnormpool
