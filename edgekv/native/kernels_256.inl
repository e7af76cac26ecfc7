// The attention kernels of 256 bits, but for `kInstructionSet` and `add_dots_of_two`: sum + x y over pairs of int16.
// Included by each instruction set within its unnamed namespace, so that each compiles its own.
struct simd {
  static constexpr const char* kName = kInstructionSet;
  static constexpr int kWidth = 8;
  using F = __m256;
  static F load(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* x, F y) { _mm256_storeu_ps(x, y); }
  static F widen(const float* x) { return load(x); }
  // Numbers of E4M3, times 2^-8: shifted, their bits are those of float16.
  static F widen(const E4m3* x) {
    const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
    const __m128i sign_and_rest = _mm_set1_epi16(static_cast<short>(0xBF80));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), sign_and_rest));
  }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F add(F x, F y) { return _mm256_add_ps(x, y); }
  static F sub(F x, F y) { return _mm256_sub_ps(x, y); }
  static F mul(F x, F y) { return _mm256_mul_ps(x, y); }
  static F div(F x, F y) { return _mm256_div_ps(x, y); }
  static F fma(F x, F y, F z) { return _mm256_fmadd_ps(x, y, z); }
  static F max(F x, F y) { return _mm256_max_ps(x, y); }
  static float largest(F x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  static float total(F x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }

  // 2^x = 2^n 2^f with f in -1/2 .. 1/2; the polynomial is the Taylor series, its error 2e-7 at the ends.
  static F exp2(F x) {
    const F inside = _mm256_cmp_ps(x, set(-100.0f), _CMP_GT_OQ);
    x = _mm256_and_ps(x, inside);
    const F n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = sub(x, n);
    F y = fma(set(1.5403530e-4f), f, set(1.3333558e-3f));
    y = fma(y, f, set(9.6181291e-3f));
    y = fma(y, f, set(5.5504109e-2f));
    y = fma(y, f, set(2.4022651e-1f));
    y = fma(y, f, set(6.9314718e-1f));
    y = fma(y, f, set(1.0f));
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(mul(y, _mm256_castsi256_ps(exponent)), inside);
  }

  // Queries and weights are int16: madd multiplies them with codes widened to int16 and adds neighbours.
  static constexpr float kQueryLimit = 32639.0f;
  static constexpr float kWeightLimit = 32767.0f;
  static F scaled_exp2(F x) { return mul(exp2(x), set(kWeightLimit)); }
  static constexpr int kTileSlots = 512;  // so many products of a weight with -128 fit 32 bits
  static constexpr int kInt8ScoreRows = 4;
  static constexpr int kInt8WeighRows = 3;

  static int32_t encode_query(const float* q, float inverse, bool usable, int dim, uint8_t* out) {
    for (int d = 0; d < dim; d++) {
      const int16_t code = usable ? static_cast<int16_t>(nearbyintf(q[d] * inverse)) : int16_t{0};
      memcpy(out + 2 * d, &code, 2);
    }
    return 0;
  }

  // Four int16 in every 64 bits.
  static __m256i four(const uint8_t* x) {
    int64_t word;
    memcpy(&word, x, sizeof word);
    return _mm256_set1_epi64x(word);
  }

  static __m256i widen(const int8_t* x) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }

  // Sixteen codes of 4 bits, the lower or upper ones of so many bytes, each sixteen times.
  static __m128i sixteen(const Nibbles* x, bool lower) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm_and_si128(lower ? _mm_slli_epi16(both, 4) : both, _mm_set1_epi8(static_cast<char>(0xF0)));
  }

  // Four slots of four channels out of the sixteen at x, the i-th four, as int16.
  static __m256i four_channels(const int8_t* x, int i) { return widen(x + 16 * i); }
  static __m256i four_channels(const Nibbles* x, int i) {
    return _mm256_cvtepi8_epi16(sixteen(x + i % 2 * 16, i < 2));
  }

  // Four channels of the four slots at x as int16; of Nibbles the i-th four of sixteen, the middles of their cells.
  static __m256i four_slots(const int8_t* x, int) { return widen(x); }
  static __m256i four_slots(const Nibbles* x, int i) {
    return _mm256_cvtepi8_epi16(_mm_or_si128(sixteen(x + i % 2 * 64, i < 2), _mm_set1_epi8(8)));
  }

  // Two vectors of pairs to be added -> their eight sums in order.
  static F pair_sums(__m256i x, __m256i y) {
    return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(x, y), 0xD8));
  }

  // `Code` is int8_t, or Nibbles for two codes.
  template <int R, class Code>
  static void score_rows(const uint8_t* queries, const Code* keys, const float* factors, int dim, float* out,
                         int stride) {
    constexpr int kFours = fours_of(static_cast<const Code*>(nullptr));
    for (int half = 0; half < kBlock; half += 8) {  // eight slots at a time, so that the sums stay in registers
      __m256i sums[R][2];
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
      for (int d = 0; d < dim; d += 4 * kFours) {
        const Code* k = keys + codes_in(keys, d * kBlock) + half * 4;
        EDGEKV_UNROLL
        for (int i = 0; i < kFours; i++) {
          const __m256i low = four_slots(k, i), high = four_slots(k + 16, i);
          EDGEKV_UNROLL
          for (int r = 0; r < R; r++) {
            const __m256i q = four(queries + 2 * (int64_t{r} * dim + d + 4 * i));
            sums[r][0] = add_dots_of_two(sums[r][0], q, low);
            sums[r][1] = add_dots_of_two(sums[r][1], q, high);
          }
        }
      }
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) {
        store(out + int64_t{r} * stride + half, mul(pair_sums(sums[r][0], sums[r][1]), load(factors + half)));
      }
    }
  }

  template <class Code>
  static void score(int rows, const uint8_t* queries, const int32_t*, const Code* keys, const float* factors, int dim,
                    float* out, int stride) {
    switch (rows) {
      case 4: return score_rows<4>(queries, keys, factors, dim, out, stride);
      case 3: return score_rows<3>(queries, keys, factors, dim, out, stride);
      case 2: return score_rows<2>(queries, keys, factors, dim, out, stride);
      default: return score_rows<1>(queries, keys, factors, dim, out, stride);
    }
  }

  static void encode_weights(F weight, uint8_t* weights, int, int i) {
    const __m256i codes = _mm256_cvtps_epi32(weight);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(codes, codes), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(weights + 2 * i), _mm256_castsi256_si128(packed));
  }

  template <int R, class Code>
  EDGEKV_APART static void weigh_rows(const uint8_t* weights, int stride, const Code* values, int low, int high,
                                      int dim, float* out, const float* alpha, const float* beta) {
    const int64_t row = codes_in(values, dim);
    for (int column = 0; column < dim; column += 16) {  // 16 channels at a time, so that the sums stay in registers
      __m256i sums[R][4];
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) {
        EDGEKV_UNROLL
        for (int i = 0; i < 4; i++) sums[r][i] = _mm256_setzero_si256();
      }
      for (int s = low / 4 * 4; s < high; s += 4) {
        const Code* v = values + s * row + codes_in(values, 4 * column);
        __m256i w[R];
        EDGEKV_UNROLL
        for (int r = 0; r < R; r++) w[r] = four(weights + 2 * (int64_t{r} * stride + s));
        EDGEKV_UNROLL
        for (int i = 0; i < 4; i++) {
          const __m256i codes = four_channels(v, i);
          EDGEKV_UNROLL
          for (int r = 0; r < R; r++) sums[r][i] = add_dots_of_two(sums[r][i], w[r], codes);
        }
      }
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) {
        float* o = out + int64_t{r} * dim + column;
        EDGEKV_UNROLL
        for (int i = 0; i < 4; i += 2) {
          const F sum = mul(pair_sums(sums[r][i], sums[r][i + 1]), set(beta[r]));
          store(o + 4 * i, fma(load(o + 4 * i), set(alpha[r]), sum));
        }
      }
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
