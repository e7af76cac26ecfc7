// Products of bytes that are added in 32 bits, four at a time, and of 16-bit integers, two at a time, in vectors of 256
// bits: what AVX-VNNI has. AVX-512 has them in another encoding, with which they can be tested where AVX-VNNI is not.
#pragma once

#include <immintrin.h>

namespace edgekv {

#if defined(EDGEKV_EVEX)
inline __m256i add_dots_of_four(__m256i sum, __m256i x, __m256i y) { return _mm256_dpbusd_epi32(sum, x, y); }
inline __m256i add_dots_of_two(__m256i sum, __m256i x, __m256i y) { return _mm256_dpwssd_epi32(sum, x, y); }
#else
inline __m256i add_dots_of_four(__m256i sum, __m256i x, __m256i y) { return _mm256_dpbusd_avx_epi32(sum, x, y); }
inline __m256i add_dots_of_two(__m256i sum, __m256i x, __m256i y) { return _mm256_dpwssd_avx_epi32(sum, x, y); }
#endif

}  // namespace edgekv
