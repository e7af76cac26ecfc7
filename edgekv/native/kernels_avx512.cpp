// The kernels for AVX-512 with VNNI. Compiled with these flags and called only after cpu.cpp has found them.
//
// vpdpbusd multiplies unsigned by signed bytes, four at a time, and adds them to a 32-bit sum. A query is therefore
// two signed digits, q = 256 high + low, against keys made unsigned by adding 128 (sum_d 128 q[d] is taken off again);
// a weight is two unsigned digits against the signed values.
#include "kernels.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

namespace edgekv {
namespace {

struct simd {
  static constexpr const char* kName = "avx512-vnni";
  static constexpr int kWidth = 16;
  using F = __m512;
  static F load(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* x, F y) { _mm512_storeu_ps(x, y); }
  static F widen(const float* x) { return load(x); }
  // Numbers of E4M3, times 2^-8: shifted, their bits are those of float16.
  static F widen(const E4m3* x) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    const __m256i sign_and_rest = _mm256_set1_epi16(static_cast<short>(0xBF80));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), sign_and_rest));
  }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F add(F x, F y) { return _mm512_add_ps(x, y); }
  static F sub(F x, F y) { return _mm512_sub_ps(x, y); }
  static F mul(F x, F y) { return _mm512_mul_ps(x, y); }
  static F div(F x, F y) { return _mm512_div_ps(x, y); }
  static F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
  static F max(F x, F y) { return _mm512_max_ps(x, y); }
  static float largest(F x) { return _mm512_reduce_max_ps(x); }
  static float total(F x) { return _mm512_reduce_add_ps(x); }

  static F exp2(F x) {
    const __mmask16 inside = _mm512_cmp_ps_mask(x, set(-100.0f), _CMP_GT_OQ);
    const F n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = sub(x, n);
    F y = fma(set(1.5403530e-4f), f, set(1.3333558e-3f));
    y = fma(y, f, set(9.6181291e-3f));
    y = fma(y, f, set(5.5504109e-2f));
    y = fma(y, f, set(2.4022651e-1f));
    y = fma(y, f, set(6.9314718e-1f));
    y = fma(y, f, set(1.0f));
    return _mm512_maskz_scalef_ps(inside, y, n);
  }

  static constexpr float kQueryLimit = 32639.0f;  // 127 * 256 + 127
  static constexpr float kWeightLimit = 65535.0f;
  // A polynomial of degree 4, relative error 3e-6: the integers that it becomes are no finer.
  static F scaled_exp2(F x) {
    const __mmask16 inside = _mm512_cmp_ps_mask(x, set(-100.0f), _CMP_GT_OQ);
    const F n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = sub(x, n);
    F y = fma(set(9.582853169e-3f * kWeightLimit), f, set(5.590642504e-2f * kWeightLimit));
    y = fma(y, f, set(2.402409861e-1f * kWeightLimit));
    y = fma(y, f, set(6.931241934e-1f * kWeightLimit));
    y = fma(y, f, set(kWeightLimit));
    return _mm512_maskz_scalef_ps(inside, y, n);
  }

  static constexpr int kTileSlots = kMaxTileSlots;
  static constexpr int kInt8ScoreRows = 8;
  static constexpr int kInt8WeighRows = 3;

  // High digits of all channels, then low digits.
  static int32_t encode_query(const float* q, float inverse, bool usable, int dim, uint8_t* out) {
    int32_t sum = 0;
    for (int d = 0; d < dim; d++) {
      const int32_t code = usable ? static_cast<int32_t>(nearbyintf(q[d] * inverse)) : 0;
      const int32_t high = (code + 128) >> 8;
      out[d] = static_cast<uint8_t>(high);
      out[dim + d] = static_cast<uint8_t>(code - 256 * high);
      sum += code;
    }
    return 128 * sum;
  }

  // Four bytes in every 32 bits.
  static __m512i four(const uint8_t* x) {
    int32_t word;
    memcpy(&word, x, sizeof word);
    return _mm512_set1_epi32(word);
  }

  // sum + x y over groups of four bytes, x unsigned and y signed. GCC 12 copies every accumulator of the intrinsic's
  // form in each iteration, which costs a third of the speed.
  static void dot(__m512i& sum, __m512i x, __m512i y) {
#if defined(__GNUC__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
#else
    sum = _mm512_dpbusd_epi32(sum, x, y);
#endif
  }

  // The same with the four bytes at y for every group.
  static void dot_four(__m512i& sum, __m512i x, const uint8_t* y) {
#if defined(__GNUC__)
    using Word = const uint8_t[4];
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*reinterpret_cast<Word*>(y)));
#else
    sum = _mm512_dpbusd_epi32(sum, x, four(y));
#endif
  }

  // Four channels of sixteen slots, made unsigned by adding 128; of Nibbles the i-th four of sixteen channels, and the
  // middles of their cells.
  static __m512i four_channels(const int8_t* x, int) {
    return _mm512_xor_si512(_mm512_loadu_si512(x), _mm512_set1_epi8(-128));
  }
  static __m512i four_channels(const Nibbles* x, int i) {
    const __m512i both = _mm512_loadu_si512(x + i % 2 * 64), upper = i < 2 ? _mm512_slli_epi16(both, 4) : both;
    constexpr int kAndXor = 0x6A;  // (a & b) ^ c
    return _mm512_ternarylogic_epi32(upper, _mm512_set1_epi8(static_cast<char>(0xF0)),
                                     _mm512_set1_epi8(static_cast<char>(0x88)), kAndXor);
  }

  // `Code` is int8_t, or Nibbles for two codes.
  template <int R, class Code>
  EDGEKV_APART static void score_rows(const uint8_t* queries, const int32_t* query_sums, const Code* keys,
                                      const float* factors, int dim, float* out, int stride) {
    constexpr int kFours = fours_of(static_cast<const Code*>(nullptr));
    __m512i high[R], low[R];
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      high[r] = _mm512_setzero_si512();
      low[r] = _mm512_set1_epi32(-query_sums[r]);
    }
    const F factor = load(factors);
    for (int d = 0; d < dim; d += 4 * kFours) {
      EDGEKV_UNROLL
      for (int i = 0; i < kFours; i++) {
        const __m512i k = four_channels(keys + codes_in(keys, d * kBlock), i);
        EDGEKV_UNROLL
        for (int r = 0; r < R; r++) {
          const uint8_t* q = queries + 2 * int64_t{r} * dim + d + 4 * i;
          dot_four(high[r], k, q);
          dot_four(low[r], k, q + dim);
        }
      }
    }
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
      store(out + int64_t{r} * stride, mul(_mm512_cvtepi32_ps(sum), factor));
    }
  }

  template <class Code>
  static void score(int rows, const uint8_t* queries, const int32_t* sums, const Code* keys, const float* factors,
                    int dim, float* out, int stride) {
    switch (rows) {
      case 8: return score_rows<8>(queries, sums, keys, factors, dim, out, stride);
      case 7: return score_rows<7>(queries, sums, keys, factors, dim, out, stride);
      case 6: return score_rows<6>(queries, sums, keys, factors, dim, out, stride);
      case 5: return score_rows<5>(queries, sums, keys, factors, dim, out, stride);
      case 4: return score_rows<4>(queries, sums, keys, factors, dim, out, stride);
      case 3: return score_rows<3>(queries, sums, keys, factors, dim, out, stride);
      case 2: return score_rows<2>(queries, sums, keys, factors, dim, out, stride);
      default: return score_rows<1>(queries, sums, keys, factors, dim, out, stride);
    }
  }

  // Of every four slots the high digits, then the low ones.
  static void encode_weights(F weight, uint8_t* weights, int, int i) {
    const __m512i digits = _mm512_set_epi32(-1, -1, 0x0C080400, 0x0D090501, -1, -1, 0x0C080400, 0x0D090501, -1, -1,
                                            0x0C080400, 0x0D090501, -1, -1, 0x0C080400, 0x0D090501);
    const __m512i lanes = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    const __m512i parts = _mm512_shuffle_epi8(_mm512_cvtps_epi32(weight), digits);
    const __m512i packed = _mm512_permutexvar_epi64(lanes, parts);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + 2 * i), _mm512_castsi512_si256(packed));
  }

  // Four slots of sixteen channels.
  static __m512i sixteen(const int8_t* x) { return _mm512_loadu_si512(x); }
  static __m512i sixteen(const Nibbles* x) {
    const __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    const __m512i places = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 0);
    return _mm512_and_si512(_mm512_sllv_epi16(both, places), _mm512_set1_epi8(static_cast<char>(0xF0)));
  }

  template <int R, int N, class Code>
  EDGEKV_APART static void weigh_columns(const uint8_t* weights, int stride, const Code* values, int low, int high,
                                         int dim, float* out, const float* alpha, const float* beta) {
    const int64_t row = codes_in(values, dim);
    __m512i coarse[R][N], fine[R][N];
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      EDGEKV_UNROLL
      for (int n = 0; n < N; n++) coarse[r][n] = fine[r][n] = _mm512_setzero_si512();
    }
    for (int s = low / 4 * 4; s < high; s += 4) {
      __m512i v[N];
      EDGEKV_UNROLL
      for (int n = 0; n < N; n++) v[n] = sixteen(values + s * row + codes_in(values, 64) * n);
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) {
        const uint8_t* w = weights + 2 * (int64_t{r} * stride + s);
        const __m512i first = four(w), second = four(w + 4);
        EDGEKV_UNROLL
        for (int n = 0; n < N; n++) {
          dot(coarse[r][n], first, v[n]);
          dot(fine[r][n], second, v[n]);
        }
      }
    }
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      float* o = out + int64_t{r} * dim;
      const F a = set(alpha[r]), b = set(beta[r]), digit = set(256.0f);
      EDGEKV_UNROLL
      for (int n = 0; n < N; n++) {
        const F sum = fma(_mm512_cvtepi32_ps(coarse[r][n]), digit, _mm512_cvtepi32_ps(fine[r][n]));
        store(o + 16 * n, fma(load(o + 16 * n), a, mul(sum, b)));
      }
    }
  }

  template <int R, class Code>
  EDGEKV_APART static void weigh_rows(const uint8_t* weights, int stride, const Code* values, int low, int high,
                                      int dim, float* out, const float* alpha, const float* beta) {
    int d = 0;
    for (; d + 64 <= dim; d += 64) {
      weigh_columns<R, 4>(weights, stride, values + codes_in(values, 4 * d), low, high, dim, out + d, alpha, beta);
    }
    for (; d < dim; d += 16) {
      weigh_columns<R, 1>(weights, stride, values + codes_in(values, 4 * d), low, high, dim, out + d, alpha, beta);
    }
  }

  template <class Code>
  static void weigh(int rows, const uint8_t* weights, int stride, const Code* values, int low, int high, int dim,
                    float* out, const float* alpha, const float* beta) {
    switch (rows) {
      case 3: return weigh_rows<3>(weights, stride, values, low, high, dim, out, alpha, beta);
      case 2: return weigh_rows<2>(weights, stride, values, low, high, dim, out, alpha, beta);
      default: return weigh_rows<1>(weights, stride, values, low, high, dim, out, alpha, beta);
    }
  }

#include "float_kernels.inl"
};

}  // namespace
}  // namespace edgekv

#define EDGEKV_KERNELS avx512_kernels
#include "kernels.inl"

#else
namespace edgekv {
const Kernels* avx512_kernels(CacheType) { return nullptr; }
}  // namespace edgekv
#endif
