// kernels_inner.h for processors with AVX-512 (F, DQ, BW, VL).
#include "kernels.h"

#if CONVNORMPOOL_X86_TARGETS
#pragma GCC optimize("O3,no-trapping-math,no-math-errno")
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512dq,avx512bw,avx512vl")
#define CONVNORMPOOL_ISA avx512
#define CONVNORMPOOL_VECTOR_BYTES 64
#include "kernels_inner.h"
#endif
