// The kernels for AVX2 with FMA and F16C. Compiled with these flags and called only after cpu.cpp has found them.
#include "kernels.h"

#if defined(__AVX2__) && (defined(__FMA__) && defined(__F16C__) || defined(_MSC_VER))
#include <immintrin.h>
#include <math.h>
#include <string.h>

namespace edgekv {
namespace {

constexpr const char* kInstructionSet = "avx2";

__m256i add_dots_of_two(__m256i sum, __m256i x, __m256i y) { return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y)); }

#include "kernels_256.inl"

}  // namespace
}  // namespace edgekv

#define EDGEKV_KERNELS avx2_kernels
#include "kernels.inl"

#else
namespace edgekv {
const Kernels* avx2_kernels(CacheType) { return nullptr; }
}  // namespace edgekv
#endif
