// The kernels in plain C++: the reference for the others, and the path for processors without one.
//
// This file is also the list of what a `simd` struct has to provide.
#include "kernels.h"

#include <math.h>
#include <string.h>

namespace edgekv {
namespace {

struct simd {
  static constexpr const char* kName = "plain";

  // Vectors of float32.
  static constexpr int kWidth = 8;
  struct F {
    float v[kWidth];
  };
  static F load(const float* x) {
    F y;
    memcpy(y.v, x, sizeof y.v);
    return y;
  }
  static void store(float* x, F y) { memcpy(x, y.v, sizeof y.v); }
  static F widen(const float* x) { return load(x); }
  // Numbers of E4M3, times 2^-8. Their bits are those of floats of 2^-120 times their size.
  static F widen(const E4m3* x) {
    F y;
    for (int i = 0; i < kWidth; i++) {
      const uint32_t bits = (x[i].bits & 0x80u) << 24 | (x[i].bits & 0x7Fu) << 20;
      memcpy(y.v + i, &bits, sizeof bits);
    }
    return mul(y, set(0x1p112f));
  }
  static F set(float x) {
    F y;
    for (float& lane : y.v) lane = x;
    return y;
  }
  static F add(F x, F y) {
    for (int i = 0; i < kWidth; i++) x.v[i] += y.v[i];
    return x;
  }
  static F sub(F x, F y) {
    for (int i = 0; i < kWidth; i++) x.v[i] -= y.v[i];
    return x;
  }
  static F mul(F x, F y) {
    for (int i = 0; i < kWidth; i++) x.v[i] *= y.v[i];
    return x;
  }
  static F div(F x, F y) {
    for (int i = 0; i < kWidth; i++) x.v[i] /= y.v[i];
    return x;
  }
  static F fma(F x, F y, F z) {
    for (int i = 0; i < kWidth; i++) x.v[i] = x.v[i] * y.v[i] + z.v[i];
    return x;
  }
  static F max(F x, F y) {
    for (int i = 0; i < kWidth; i++) x.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i];
    return x;
  }
  static float largest(F x) {
    for (float lane : x.v) x.v[0] = lane > x.v[0] ? lane : x.v[0];
    return x.v[0];
  }
  static float total(F x) {
    float sum = 0;
    for (float lane : x.v) sum += lane;
    return sum;
  }
  // 2^x for x <= 0; exactly 0 from -100 down, and for NaN.
  static F exp2(F x) {
    for (float& lane : x.v) lane = lane > -100.0f ? exp2f(lane) : 0.0f;
    return x;
  }

  // Codes. Queries and weights are int16 here; other sets may hold them as two digits of 8 bits.
  static constexpr float kQueryLimit = 32639.0f;   // the largest integer a query may hold
  static constexpr float kWeightLimit = 32767.0f;  // and a weight
  // kWeightLimit 2^x for x <= 0, as exactly as a weight's integer is.
  static F scaled_exp2(F x) { return mul(exp2(x), set(kWeightLimit)); }
  static constexpr int kTileSlots = 512;           // so many products of a weight with -128 fit 32 bits
  static constexpr int kInt8ScoreRows = 4;
  static constexpr int kInt8WeighRows = 3;

  // q * inverse as integers, at most kQueryLimit; the result is what `score` wants as `sums`.
  static int32_t encode_query(const float* q, float inverse, bool usable, int dim, uint8_t* out) {
    for (int d = 0; d < dim; d++) {
      const int16_t code = usable ? static_cast<int16_t>(nearbyintf(q[d] * inverse)) : int16_t{0};
      memcpy(out + 2 * d, &code, 2);
    }
    return 0;
  }

  // A slot's key in a block, its d-th number; of Nibbles the middle of its cell.
  static int32_t number(const int8_t* keys, int slot, int d) { return keys[(d / 4 * kBlock + slot) * 4 + d % 4]; }
  static int32_t number(const Nibbles* keys, int slot, int d) {
    const Nibbles both = keys[((d / 16 * 2 + d % 8 / 4) * kBlock + slot) * 4 + d % 4];
    return (d % 16 < 8 ? both.low() : both.high()) | 8;
  }

  // Raw scores of `rows` queries (at most kInt8ScoreRows) against one block of keys, times the keys' factors.
  template <class Code>
  static void score(int rows, const uint8_t* queries, const int32_t*, const Code* keys, const float* factors, int dim,
                    float* out, int stride) {
    for (int r = 0; r < rows; r++) {
      int32_t sums[kBlock] = {};
      for (int d = 0; d < dim; d += 4) {
        int16_t q[4];
        memcpy(q, queries + 2 * (int64_t{r} * dim + d), sizeof q);
        for (int s = 0; s < kBlock; s++) {
          for (int i = 0; i < 4; i++) sums[s] += q[i] * number(keys, s, d + i);
        }
      }
      for (int s = 0; s < kBlock; s++) out[int64_t{r} * stride + s] = static_cast<float>(sums[s]) * factors[s];
    }
  }

  // Weights 0 .. kWeightLimit of slots i .. i + kWidth - 1 as integers. `weights` is the row's memory, of 2 * stride
  // bytes.
  static void encode_weights(F weight, uint8_t* weights, int, int i) {
    int16_t codes[kWidth];
    for (int j = 0; j < kWidth; j++) codes[j] = static_cast<int16_t>(weight.v[j] + 0.5f);
    memcpy(weights + 2 * i, codes, sizeof codes);
  }

  // Four slots of values, times their weights.
  static void add_four(const int16_t* w, const int8_t* v, int dim, int32_t* sums) {
    for (int d = 0; d < dim; d++) {
      sums[d] += w[0] * v[4 * d] + w[1] * v[4 * d + 1] + w[2] * v[4 * d + 2] + w[3] * v[4 * d + 3];
    }
  }

  static void add_four(const int16_t* w, const Nibbles* v, int dim, int32_t* sums) {
    for (int column = 0; column < dim; column += 16) {
      for (int i = 0; i < 8; i++, v += 4) {
        for (int j = 0; j < 4; j++) {
          sums[column + i] += w[j] * v[j].low();
          sums[column + 8 + i] += w[j] * v[j].high();
        }
      }
    }
  }

  // o = o alpha + beta sum p v for `rows` rows (at most kInt8WeighRows), over the groups of 4 slots that hold slots
  // low .. high - 1. Weights outside of these are 0.
  template <class Code>
  static void weigh(int rows, const uint8_t* weights, int stride, const Code* values, int low, int high, int dim,
                    float* out, const float* alpha, const float* beta) {
    for (int r = 0; r < rows; r++) {
      int32_t sums[kMaxDim] = {};
      for (int s = low / 4 * 4; s < high; s += 4) {
        int16_t w[4];
        memcpy(w, weights + 2 * (int64_t{r} * stride + s), sizeof w);
        add_four(w, values + s * codes_in(values, dim), dim, sums);
      }
      float* o = out + int64_t{r} * dim;
      for (int d = 0; d < dim; d++) o[d] = o[d] * alpha[r] + beta[r] * static_cast<float>(sums[d]);
    }
  }

  // The same over a cache of floats.
#include "float_kernels.inl"
};

}  // namespace
}  // namespace edgekv

#define EDGEKV_KERNELS plain_kernels
#include "kernels.inl"
