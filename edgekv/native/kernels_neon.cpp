// The kernels for 64-bit ARM with the dot-product extension (ARMv8.2: Cortex-A55 and A75 on, Jetson Orin, Apple M1).
//
// sdot multiplies signed bytes, four at a time. A query and a weight are two signed digits each, 256 high + low.
#include "kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#include <math.h>
#include <string.h>

namespace edgekv {
namespace {

struct simd {
  static constexpr const char* kName = "neon-dotprod";
  static constexpr int kWidth = 4;
  using F = float32x4_t;
  static F load(const float* x) { return vld1q_f32(x); }
  static void store(float* x, F y) { vst1q_f32(x, y); }
  static F widen(const float* x) { return load(x); }
  // Numbers of E4M3, times 2^-8: shifted, their bits are those of float16.
  static F widen(const E4m3* x) {
    uint32_t four;
    memcpy(&four, x, sizeof four);
    const int16x4_t words = vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))));
    const uint16x4_t bits = vand_u16(vreinterpret_u16_s16(vshl_n_s16(words, 7)), vdup_n_u16(0xBF80));
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
  }
  static F set(float x) { return vdupq_n_f32(x); }
  static F add(F x, F y) { return vaddq_f32(x, y); }
  static F sub(F x, F y) { return vsubq_f32(x, y); }
  static F mul(F x, F y) { return vmulq_f32(x, y); }
  static F div(F x, F y) { return vdivq_f32(x, y); }
  static F fma(F x, F y, F z) { return vfmaq_f32(z, x, y); }
  static F max(F x, F y) { return vmaxq_f32(x, y); }
  static float largest(F x) { return vmaxvq_f32(x); }
  static float total(F x) { return vaddvq_f32(x); }

  static F exp2(F x) {
    const uint32x4_t inside = vcgtq_f32(x, set(-100.0f));
    x = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), inside));
    const F n = vrndnq_f32(x), f = sub(x, n);
    F y = fma(set(1.5403530e-4f), f, set(1.3333558e-3f));
    y = fma(y, f, set(9.6181291e-3f));
    y = fma(y, f, set(5.5504109e-2f));
    y = fma(y, f, set(2.4022651e-1f));
    y = fma(y, f, set(6.9314718e-1f));
    y = fma(y, f, set(1.0f));
    const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    y = mul(y, vreinterpretq_f32_s32(exponent));
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(y), inside));
  }

  static constexpr float kQueryLimit = 32639.0f;  // 127 * 256 + 127
  static constexpr float kWeightLimit = 32639.0f;
  static F scaled_exp2(F x) { return mul(exp2(x), set(kWeightLimit)); }
  static constexpr int kTileSlots = kMaxTileSlots;
  static constexpr int kInt8ScoreRows = 3;
  static constexpr int kInt8WeighRows = 3;

  // High digits of all channels, then low digits.
  static int32_t encode_query(const float* q, float inverse, bool usable, int dim, uint8_t* out) {
    for (int d = 0; d < dim; d++) {
      const int32_t code = usable ? static_cast<int32_t>(nearbyintf(q[d] * inverse)) : 0;
      const int32_t high = (code + 128) >> 8;
      out[d] = static_cast<uint8_t>(high);
      out[dim + d] = static_cast<uint8_t>(code - 256 * high);
    }
    return 0;
  }

  // Four bytes in every 32 bits.
  static int8x16_t four(const uint8_t* x) {
    int32_t word;
    memcpy(&word, x, sizeof word);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
  }

  // Sixteen codes of 4 bits, the lower or upper ones of so many bytes, each sixteen times.
  static int8x16_t sixteen(const Nibbles* x, bool lower) {
    const int8x16_t both = vld1q_s8(reinterpret_cast<const int8_t*>(x));
    return lower ? vshlq_n_s8(both, 4) : vandq_s8(both, vdupq_n_s8(static_cast<int8_t>(0xF0)));
  }

  // Four channels of the four slots at x; of Nibbles the i-th four of sixteen, and the middles of their cells.
  static int8x16_t four_slots(const int8_t* x, int) { return vld1q_s8(x); }
  static int8x16_t four_slots(const Nibbles* x, int i) {
    return vorrq_s8(sixteen(x + i % 2 * 64, i < 2), vdupq_n_s8(8));
  }

  // `Code` is int8_t, or Nibbles for two codes.
  template <int R, class Code>
  EDGEKV_APART static void score_rows(const uint8_t* queries, const Code* keys, const float* factors, int dim,
                                      float* out, int stride) {
    constexpr int kFours = fours_of(static_cast<const Code*>(nullptr));
    int32x4_t high[R][4], low[R][4];
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      EDGEKV_UNROLL
      for (int i = 0; i < 4; i++) high[r][i] = low[r][i] = vdupq_n_s32(0);
    }
    for (int d = 0; d < dim; d += 4 * kFours) {
      EDGEKV_UNROLL
      for (int f = 0; f < kFours; f++) {
        int8x16_t k[4];
        EDGEKV_UNROLL
        for (int i = 0; i < 4; i++) k[i] = four_slots(keys + codes_in(keys, d * kBlock) + 16 * i, f);
        EDGEKV_UNROLL
        for (int r = 0; r < R; r++) {
          const uint8_t* q = queries + 2 * int64_t{r} * dim + d + 4 * f;
          const int8x16_t first = four(q), second = four(q + dim);
          EDGEKV_UNROLL
          for (int i = 0; i < 4; i++) {
            high[r][i] = vdotq_s32(high[r][i], k[i], first);
            low[r][i] = vdotq_s32(low[r][i], k[i], second);
          }
        }
      }
    }
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      EDGEKV_UNROLL
      for (int i = 0; i < 4; i++) {
        const int32x4_t sum = vaddq_s32(vshlq_n_s32(high[r][i], 8), low[r][i]);
        store(out + int64_t{r} * stride + 4 * i, mul(vcvtq_f32_s32(sum), load(factors + 4 * i)));
      }
    }
  }

  template <class Code>
  static void score(int rows, const uint8_t* queries, const int32_t*, const Code* keys, const float* factors, int dim,
                    float* out, int stride) {
    switch (rows) {
      case 3: return score_rows<3>(queries, keys, factors, dim, out, stride);
      case 2: return score_rows<2>(queries, keys, factors, dim, out, stride);
      default: return score_rows<1>(queries, keys, factors, dim, out, stride);
    }
  }

  // High digits of all the tile's slots, then low digits.
  static void encode_weights(F weight, uint8_t* weights, int stride, int i) {
    const int32x4_t codes = vcvtnq_s32_f32(weight);
    const int32x4_t high = vshrq_n_s32(vaddq_s32(codes, vdupq_n_s32(128)), 8);
    const int32x4_t low = vsubq_s32(codes, vshlq_n_s32(high, 8));
    const int32x2_t digits = vreinterpret_s32_s8(vmovn_s16(vcombine_s16(vmovn_s32(high), vmovn_s32(low))));
    const int32_t words[2] = {vget_lane_s32(digits, 0), vget_lane_s32(digits, 1)};
    memcpy(weights + i, &words[0], sizeof words[0]);
    memcpy(weights + stride + i, &words[1], sizeof words[1]);
  }

  // Four slots of four channels out of the sixteen at x, the i-th four.
  static int8x16_t four_channels(const int8_t* x, int i) { return vld1q_s8(x + 16 * i); }
  static int8x16_t four_channels(const Nibbles* x, int i) { return sixteen(x + i % 2 * 16, i < 2); }

  template <int R, class Code>
  EDGEKV_APART static void weigh_rows(const uint8_t* weights, int stride, const Code* values, int low, int high,
                                      int dim, float* out, const float* alpha, const float* beta) {
    const int64_t row = codes_in(values, dim);
    for (int column = 0; column < dim; column += 16) {
      int32x4_t coarse[R][4], fine[R][4];
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) {
        EDGEKV_UNROLL
        for (int i = 0; i < 4; i++) coarse[r][i] = fine[r][i] = vdupq_n_s32(0);
      }
      for (int s = low / 4 * 4; s < high; s += 4) {
        int8x16_t v[4];
        EDGEKV_UNROLL
        for (int i = 0; i < 4; i++) v[i] = four_channels(values + s * row + codes_in(values, 4 * column), i);
        EDGEKV_UNROLL
        for (int r = 0; r < R; r++) {
          const uint8_t* w = weights + 2 * int64_t{r} * stride + s;
          const int8x16_t first = four(w), second = four(w + stride);
          EDGEKV_UNROLL
          for (int i = 0; i < 4; i++) {
            coarse[r][i] = vdotq_s32(coarse[r][i], v[i], first);
            fine[r][i] = vdotq_s32(fine[r][i], v[i], second);
          }
        }
      }
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) {
        float* o = out + int64_t{r} * dim + column;
        EDGEKV_UNROLL
        for (int i = 0; i < 4; i++) {
          const F sum = fma(vcvtq_f32_s32(coarse[r][i]), set(256.0f), vcvtq_f32_s32(fine[r][i]));
          store(o + 4 * i, fma(load(o + 4 * i), set(alpha[r]), mul(sum, set(beta[r]))));
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

}  // namespace
}  // namespace edgekv

#define EDGEKV_KERNELS neon_kernels
#include "kernels.inl"

#else
namespace edgekv {
const Kernels* neon_kernels(CacheType) { return nullptr; }
}  // namespace edgekv
#endif
