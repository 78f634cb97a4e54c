// kernels_inner.h for processors with AVX2 and FMA.
#include "kernels.h"

#if CONVNORMPOOL_X86_TARGETS
#pragma GCC optimize("O3,no-trapping-math,no-math-errno")
#pragma GCC target("avx2,fma,f16c,bmi2")
#define CONVNORMPOOL_ISA avx2
#define CONVNORMPOOL_VECTOR_BYTES 32
#include "kernels_inner.h"
#endif
