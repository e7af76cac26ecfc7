// The product's kernels for AVX2. Compiled with these flags and called only after cpu.cpp has found them.
//
// vpmaddubsw multiplies unsigned by signed bytes and adds pairs to 16 bits. With codes of 4 bits the sums of 8 steps, a
// whole block of 32 inputs, fit: 8 x 2 x 15 x 127 = 30480; with 5 bits those of 4 steps (31496), with 6 bits those of 2
// (32004). Codes of 8 bits are two digits of 4.
#include "matmul.h"
#include "unroll.h"

#if defined(__AVX2__) && (defined(__FMA__) || defined(_MSC_VER))
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include <initializer_list>

namespace edgekv {
namespace {

constexpr int kLanes = 8;  // outputs in a vector, half a panel
// As in matmul_avx512.cpp.
constexpr int kFar = 4096, kNear = 256, kFewRows = 2;

template <class T>
T word(const void* x) {
  T value;
  memcpy(&value, x, sizeof value);
  return value;
}

__m256i load(const uint8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }

// Scales or minima.
__m256 floats_of(const uint8_t* floats, int64_t place, bool half) {
  if (!half) return _mm256_loadu_ps(reinterpret_cast<const float*>(floats) + place);
  // A float16's exponent and fraction, moved to a float32's and put right by a product; subnormal numbers come out too.
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(floats + 2 * place));
  const __m256i wide = _mm256_cvtepu16_epi32(bits);
  const __m256i size = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x7fff)), 13);
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x8000)), 16);
  const __m256 number = _mm256_mul_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(5.192296858534828e33f));  // 2^112
  return _mm256_or_ps(number, _mm256_castsi256_ps(sign));
}

// Sums in the 16 bits that vpmaddubsw gives.
template <int R>
struct Sums {
  __m256i of[R];
};

template <int R>
void add_step(Sums<R>& sums, __m256i codes, const int8_t* x) {
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) {
    const __m256i inputs = _mm256_set1_epi32(word<int32_t>(x + 4 * r));
    sums.of[r] = _mm256_add_epi16(sums.of[r], _mm256_maddubs_epi16(codes, inputs));
  }
}

// dots += factor * sums
template <int R>
void widen(__m256i* dots, const Sums<R>& sums, int16_t factor) {
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) {
    dots[r] = _mm256_add_epi32(dots[r], _mm256_madd_epi16(sums.of[r], _mm256_set1_epi16(factor)));
  }
}

template <int R>
void prefetch(const uint8_t* line) {
  if (R > kFewRows) return;
  _mm_prefetch(reinterpret_cast<const char*>(line + kFar), _MM_HINT_T1);
  _mm_prefetch(reinterpret_cast<const char*>(line + kNear), _MM_HINT_T0);
}

// Loops over steps stay loops: unrolled, GCC sums them in a tree over the stack.
#if defined(__GNUC__) && !defined(__clang__)
#define EDGEKV_ROLLED _Pragma("GCC unroll 1")
#else
#define EDGEKV_ROLLED
#endif

// Codes of 8 bits of one block for half a panel.
template <int R>
void dot_bytes(__m256i* dots, const uint8_t* codes, const int8_t* x, int steps) {
  const __m256i nibble = _mm256_set1_epi8(0xF);
  Sums<R> low{}, high{};
  EDGEKV_ROLLED
  for (int step = 0; step < steps; step++, codes += 4 * kPanel, x += 4 * R) {
    const __m256i both = load(codes);
    prefetch<R>(codes);
    add_step(low, _mm256_and_si256(both, nibble), x);
    add_step(high, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble), x);
  }
  widen(dots, low, 1);
  widen(dots, high, 16);
}

// As many steps of 4 to 6 bits as 16 bits can sum, two at a time. `high` holds the bits above the first step's nibbles
// in their place, and those of each next step kHigh further up.
template <int R, int Bits>
void dot_run(__m256i* dots, const uint8_t* codes, __m256i high, const int8_t* x, int steps) {
  constexpr int kHigh = Bits - 4;
  const __m256i nibble = _mm256_set1_epi8(0xF), above = _mm256_set1_epi8(((1 << kHigh) - 1) << 4);
  Sums<R> sums{};
  EDGEKV_ROLLED
  for (int step = 0; step < steps; step += 2, codes += 4 * kPanel, x += 8 * R) {
    const __m256i both = load(codes);
    prefetch<R>(codes);
    __m256i first = _mm256_and_si256(both, nibble), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    if (kHigh) {
      first = _mm256_or_si256(first, _mm256_and_si256(high, above));
      high = _mm256_srli_epi16(high, kHigh);
      second = _mm256_or_si256(second, _mm256_and_si256(high, above));
      high = _mm256_srli_epi16(high, kHigh);
    }
    add_step(sums, first, x);
    add_step(sums, second, x + 4 * R);
  }
  widen(dots, sums, 1);
}

// Codes of 4 to 6 bits of one block for half a panel.
template <int R, int Bits>
void dot_nibbles(__m256i* dots, const uint8_t* codes, const int8_t* x, int steps) {
  if (Bits == 4) return dot_run<R, Bits>(dots, codes, _mm256_setzero_si256(), x, steps);
  constexpr int kHigh = Bits > 4 ? Bits - 4 : 1, kRun = 4 / kHigh;  // a line has the bits of two runs
  const uint8_t* line = codes + steps * 2 * kPanel;
  EDGEKV_ROLLED
  for (int step = 0; step < steps; step += 2 * kRun, line += 4 * kPanel) {
    const __m256i high = load(line);
    prefetch<R>(line);
    dot_run<R, Bits>(dots, codes + step * 2 * kPanel, _mm256_slli_epi16(high, 4), x + step * 4 * R, kRun);
    dot_run<R, Bits>(dots, codes + (step + kRun) * 2 * kPanel, high, x + (step + kRun) * 4 * R, kRun);
  }
}

template <int R, int Bits>
void dot_block(__m256i* dots, const uint8_t* codes, const int8_t* x, int steps) {
  if constexpr (Bits == 8) {
    dot_bytes<R>(dots, codes, x, steps);
  } else {
    dot_nibbles<R, Bits>(dots, codes, x, steps);
  }
}

// Half a panel.
template <int R, int Bits>
void multiply_half(const Packing& packing, const uint8_t* panel, int half, const InputTile& tile, const Addends& added,
                    float* out, int64_t stride) {
  const uint8_t* zeros = panel + packing.scale_bytes();
  const uint8_t* minima = panel + packing.minima_place();
  const uint8_t* codes = panel + packing.codes_place() + half * 4 * kLanes;
  const int block = packing.block();
  const int64_t blocks = packing.blocks(), group_blocks = packing.group / block;
  for (const uint8_t* line = panel; R <= kFewRows && half == 0 && line < codes; line += kLine) prefetch<R>(line);
  const __m256 bias = added.bias ? _mm256_loadu_ps(added.bias + half * kLanes) : _mm256_setzero_ps();
  __m256 sums[R];
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) sums[r] = bias;
  __m256 scale = _mm256_setzero_ps();
  __m256i zero = _mm256_set1_epi32(1);
  int64_t left = 0, place = half * kLanes;
  for (int64_t i = 0; i < blocks; i++) {
    if (left == 0) {
      left = group_blocks;
      scale = floats_of(panel, place, packing.half);
      if (packing.zeros) {
        zero = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros + place)));
      }
      place += kPanel;
    }
    left--;
    __m256i dots[R];
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      const __m256i offset = _mm256_set1_epi32(tile.offsets[i * R + r]);
      dots[r] = packing.zeros ? _mm256_madd_epi16(zero, offset) : offset;
    }
    dot_block<R, Bits>(dots, codes + i * block * kPanel * Bits / 8, tile.codes + i * block * R, block / 4);
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(tile.scales[i * R + r]));
      sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), both, sums[r]);
    }
    if (packing.minima) {
      const __m256 minimum = floats_of(minima, place - kPanel, packing.half);
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) sums[r] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(tile.totals[i * R + r]), sums[r]);
    }
  }
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) {
    if (R > 1 && r >= tile.used) break;
    const int64_t at = r * stride + half * kLanes;
    if (added.residual) sums[r] = _mm256_add_ps(sums[r], _mm256_loadu_ps(added.residual + at));
    _mm256_storeu_ps(out + at, sums[r]);
  }
}

template <int R>
void multiply_rows(const Packing& packing, const uint8_t* panel, const InputTile& tile, const Addends& added,
                    float* out, int64_t stride) {
  const auto multiply_one = packing.bits == 4   ? multiply_half<R, 4>
                            : packing.bits == 5 ? multiply_half<R, 5>
                            : packing.bits == 6 ? multiply_half<R, 6>
                                                : multiply_half<R, 8>;
  for (int half = 0; half < kPanel / kLanes; half++) multiply_one(packing, panel, half, tile, added, out, stride);
}

void multiply_panel(const Packing& packing, const uint8_t* panel, const InputTile& tile, const Addends& added,
                    float* out, int64_t stride) {
  switch (tile.rows) {
    case 4: return multiply_rows<4>(packing, panel, tile, added, out, stride);
    case 2: return multiply_rows<2>(packing, panel, tile, added, out, stride);
    default: return multiply_rows<1>(packing, panel, tile, added, out, stride);
  }
}

int32_t largest(__m256i x) {
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1));
  return _mm_cvtsi128_si32(y);
}

int32_t total(__m256i x) {
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1));
  return _mm_cvtsi128_si32(y);
}

// Eight numbers from -128 to 127 as bytes.
void store_bytes(__m256i x, int8_t* out) {
  const __m256i words = _mm256_packs_epi32(x, x), bytes = _mm256_packs_epi16(words, words);
  const int32_t halves[2] = {_mm256_cvtsi256_si32(bytes), _mm_cvtsi128_si32(_mm256_extracti128_si256(bytes, 1))};
  memcpy(out, halves, sizeof halves);
}

void encode_block(const float* x, int count, int factor, int row, int rows, int8_t* codes, float* scale,
                  int32_t* offset) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i limits = _mm256_setzero_si256(), sum = _mm256_setzero_si256();
  for (int i = 0; i < count; i += kLanes) {  // as integers, so that what is not a number is larger than any
    limits = _mm256_max_epi32(limits, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
  }
  const int32_t bits = largest(limits);
  const float limit = word<float>(&bits);
  const __m256 inverse = _mm256_set1_ps(limit != 0 ? 127.0f / limit : 0.0f);
  for (int i = 0; i < count; i += kLanes) {
    const __m256i any = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
    const __m256i rounded = _mm256_max_epi32(any, _mm256_set1_epi32(-128));  // INT32_MIN where there is no number
    int8_t bytes[kLanes];
    store_bytes(rounded, bytes);
    sum = _mm256_add_epi32(sum, rounded);
    for (int step = 0; step < 2; step++) memcpy(codes + ((i / 4 + step) * rows + row) * 4, bytes + 4 * step, 4);
  }
  scale[row] = limit / 127.0f;
  offset[row] = -factor * total(sum);
}

__m256 exp2(__m256 x) {
  const __m256 bounded = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-126.0f)), _mm256_set1_ps(126.0f));
  const __m256 n = _mm256_round_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 f = _mm256_sub_ps(bounded, n);
  __m256 y = _mm256_set1_ps(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(c));
  }
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

// As in matmul_avx512.cpp.
__m256 activate(Gate gate, __m256 x) {
  __m256 t = x;
  if (gate == Gate::kGelu) {
    const __m256 cube = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(0.044715f), x), _mm256_mul_ps(x, x), x);
    t = _mm256_mul_ps(_mm256_set1_ps(1.5957691f), cube);
  }
  const __m256 power = exp2(_mm256_mul_ps(t, _mm256_set1_ps(-1.4426950f)));
  return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), power));
}

void combine(Gate gate, const float* x, const float* up, float* out) {
  for (int i = 0; i < kPanel; i += kLanes) {
    const __m256 gated = activate(gate, _mm256_loadu_ps(x + i));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(gated, _mm256_loadu_ps(up + i)));
  }
}

#include "encode.inl"

constexpr MatMulKernels kKernels{"avx2", {4, 2, 1}, encode, multiply_panel, combine};

}  // namespace

const MatMulKernels* avx2_matmul() { return &kKernels; }

}  // namespace edgekv

#else
namespace edgekv {
const MatMulKernels* avx2_matmul() { return nullptr; }
}  // namespace edgekv
#endif
