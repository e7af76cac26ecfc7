// The product's kernels for AVX-512 with VNNI. Compiled with these flags and called only after cpu.cpp has found them.
#include "matmul.h"
#include "unroll.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <initializer_list>

namespace edgekv {
namespace {

#include "ahead.inl"
#include "norm.inl"

template <class T>
T word(const void* x) {
  T value;
  memcpy(&value, x, sizeof value);
  return value;
}

// sum + w x over groups of four bytes, w unsigned and the four signed bytes at x for every group. GCC 12 copies every
// accumulator of the intrinsic's form in each iteration, which costs a third of the speed.
void dot_four(__m512i& sum, __m512i w, const int8_t* x) {
#if defined(__GNUC__)
  using Word = const int8_t[4];
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<Word*>(x)));
#else
  sum = _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(word<int32_t>(x)));
#endif
}

// Scales or minima of a group.
__m512 floats_of(const uint8_t* floats, int64_t group, bool half) {
  if (!half) return _mm512_loadu_ps(floats + group * 4 * kPanel);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(floats + group * 2 * kPanel)));
}

// Codes of one block: Steps words of four inputs.
template <int R, int Bits, int Steps>
void dot_block(__m512i* dots, const uint8_t* codes, const int8_t* x) {
  constexpr int kHigh = Bits == 8 ? 0 : Bits - 4;
  const __m512i nibble = _mm512_set1_epi8(0xF), above = _mm512_set1_epi8(((1 << kHigh) - 1) << 4);
  __m512i line = _mm512_setzero_si512(), high = line;
  EDGEKV_UNROLL
  for (int step = 0; step < Steps; step += 2) {
    __m512i first, second;
    if (Bits == 8) {
      first = _mm512_loadu_si512(codes + step * 64);
      second = _mm512_loadu_si512(codes + step * 64 + 64);
      prefetch<R>(codes + step * 64 + 64);
    } else {
      const __m512i both = _mm512_loadu_si512(codes + step * 32);
      first = _mm512_and_si512(both, nibble);
      second = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
    prefetch<R>(codes + step * (Bits == 8 ? 64 : 32));
    if (kHigh) {  // moved so that the next step's bits lie above a nibble
      const int place = step * kHigh;
      if (place % 8 == 0) {
        line = _mm512_loadu_si512(codes + Steps * 32 + place * 8);
        prefetch<R>(codes + Steps * 32 + place * 8);
      }
      high = place % 8 == 0 ? _mm512_slli_epi16(line, 4) : place % 8 == 4 ? line : high;
      first = _mm512_ternarylogic_epi32(first, high, above, 0xF8);  // first | (high & above)
      high = _mm512_srli_epi16(high, kHigh);
      second = _mm512_ternarylogic_epi32(second, high, above, 0xF8);
      high = _mm512_srli_epi16(high, kHigh);
    }
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) dot_four(dots[r], first, x + (step * R + r) * 4);
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) dot_four(dots[r], second, x + ((step + 1) * R + r) * 4);
  }
}

template <int R, int Bits, int Block>
void multiply_rows(const Packing& packing, const uint8_t* panel, const InputTile& tile, const Addends& added,
                    float* out, int64_t stride) {
  const uint8_t* zeros = panel + packing.scale_bytes();
  const uint8_t* minima = panel + packing.minima_place();
  const uint8_t* codes = panel + packing.codes_place();
  const int64_t blocks = packing.blocks(), group_blocks = packing.group / Block;
  const bool ahead = R > kFewRows && tile.first;
  for (const uint8_t* line = panel; R <= kFewRows && line < codes; line += kLine) prefetch<R>(line);
  for (const uint8_t* line = panel; ahead && line < codes; line += kLine) prefetch_far<kLine>(line);
  const int8_t* x = tile.codes;
  const __m512 bias = added.bias ? _mm512_loadu_ps(added.bias) : _mm512_setzero_ps();
  __m512 sums[R];
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) sums[r] = bias;
  const float* input_scales = tile.scales;
  const int32_t* offsets = tile.offsets;
  const float* totals = tile.totals;
  __m512 scale = _mm512_setzero_ps();
  __m512i zero = _mm512_setzero_si512();
  int64_t left = 0, group = 0;
  for (int64_t block = 0; block < blocks; block++) {
    if (left == 0) {
      left = group_blocks;
      scale = floats_of(panel, group, packing.half);
      if (packing.zeros) {
        zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + group * kPanel)));
      }
      group++;
    }
    left--;
    __m512i dots[R];
    if (packing.zeros) {
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) dots[r] = _mm512_madd_epi16(zero, _mm512_set1_epi32(offsets[r]));
    } else {
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) dots[r] = _mm512_set1_epi32(offsets[r]);
    }
    if (ahead) prefetch_far<Block * kPanel * Bits / 8>(codes);
    dot_block<R, Bits, Block / 4>(dots, codes, x);
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(input_scales[r]));
      sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), both, sums[r]);
    }
    if (packing.minima) {
      const __m512 minimum = floats_of(minima, group - 1, packing.half);
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(totals[r]), sums[r]);
      totals += R;
    }
    codes += Block * kPanel * Bits / 8;
    x += Block * R;
    input_scales += R;
    offsets += R;
  }
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) {
    if (R > 1 && r >= tile.used) break;
    if (added.residual) sums[r] = _mm512_add_ps(sums[r], _mm512_loadu_ps(added.residual + r * stride));
    _mm512_storeu_ps(out + r * stride, sums[r]);
  }
}

template <int R>
void multiply_tile(const Packing& packing, const uint8_t* panel, const InputTile& tile, const Addends& added,
                    float* out, int64_t stride) {
  const bool small = packing.block() == 16;
  const auto multiply = packing.bits == 4   ? (small ? multiply_rows<R, 4, 16> : multiply_rows<R, 4, 32>)
                        : packing.bits == 5 ? multiply_rows<R, 5, 32>
                        : packing.bits == 6 ? (small ? multiply_rows<R, 6, 16> : multiply_rows<R, 6, 32>)
                                            : (small ? multiply_rows<R, 8, 16> : multiply_rows<R, 8, 32>);
  multiply(packing, panel, tile, added, out, stride);
}

void multiply_panel(const Packing& packing, const uint8_t* panel, const InputTile& tile, const Addends& added,
                    float* out, int64_t stride) {
  switch (tile.rows) {
    case 12: return multiply_tile<12>(packing, panel, tile, added, out, stride);
    case 10: return multiply_tile<10>(packing, panel, tile, added, out, stride);
    case 8: return multiply_tile<8>(packing, panel, tile, added, out, stride);
    case 6: return multiply_tile<6>(packing, panel, tile, added, out, stride);
    case 4: return multiply_tile<4>(packing, panel, tile, added, out, stride);
    case 2: return multiply_tile<2>(packing, panel, tile, added, out, stride);
    default: return multiply_tile<1>(packing, panel, tile, added, out, stride);
  }
}

// The larger of two sets of magnitudes. As integers, so that what is not a number is larger than any.
__m512i larger(__m512i x, __m512 y) {
  return _mm512_max_epi32(x, _mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32(0x7fffffff)));
}

constexpr int kAtOnce = 4;  // blocks that are rounded together, so that one vector has the largest inputs of all

// The four sums, or largest numbers, of the lanes of four vectors each.
template <class Merge>
__m128i across(const __m512i* x, Merge merge) {
  const __m512i a = merge(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
  const __m512i b = merge(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
  __m512i both = merge(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  both = merge(both, _mm512_shuffle_i64x2(both, both, 0x4e));
  return _mm512_castsi512_si128(merge(both, _mm512_shuffle_i64x2(both, both, 0xb1)));
}

// Codes of 16 inputs, four a word.
void store_words(__m128i codes, int64_t word, int row, const InputTile& tile) {
  int32_t words[4];
  memcpy(words, &codes, sizeof words);
  for (int i = 0; i < 4; i++) memcpy(tile.codes + ((word + i) * tile.rows + row) * 4, &words[i], 4);
}

// 16 inputs of a row from a place on; zero beyond K.
__m512 inputs_at(const float* x, int64_t place, int64_t count) {
  if (place + 16 <= count) return _mm512_loadu_ps(x + place);
  const int64_t left = std::max<int64_t>(0, count - place);
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << left) - 1), x + place);
}

// kAtOnce blocks of N vectors each from one on, or as many as there are.
template <int N>
void encode_blocks(const float* x, const Product& product, float norm, int64_t block, int row, const InputTile& tile) {
  const Packing& packing = product.packing;
  const int64_t count = std::min<int64_t>(kAtOnce, packing.blocks() - block);
  __m512 values[kAtOnce * N];
  __m512i largest[kAtOnce], sums[kAtOnce];
  EDGEKV_UNROLL
  for (int i = 0; i < kAtOnce * N; i++) {
    const int64_t place = (block * N + i) * 16;
    values[i] = inputs_at(x, place, packing.inputs);
    if (product.gain) {
      const __m512 gain = inputs_at(product.gain, place, packing.inputs);
      values[i] = _mm512_mul_ps(_mm512_mul_ps(values[i], _mm512_set1_ps(norm)), gain);
    }
    largest[i / N] = larger(i % N ? largest[i / N] : _mm512_setzero_si512(), values[i]);
  }
  const __m128i limit_bits = across(largest, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); });
  const __m128 limits = _mm_castsi128_ps(limit_bits), top = _mm_set1_ps(127.0f);
  const __m128 inverses = _mm_maskz_div_ps(_mm_cmp_ps_mask(limits, _mm_setzero_ps(), _CMP_NEQ_UQ), top, limits);
  EDGEKV_UNROLL
  for (int i = 0; i < kAtOnce * N; i++) {
    const __m512 inverse = _mm512_permutexvar_ps(_mm512_set1_epi32(i / N), _mm512_castps128_ps512(inverses));
    const __m512i any = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], inverse));
    const __m512i rounded = _mm512_max_epi32(any, _mm512_set1_epi32(-128));  // INT32_MIN where there is no number
    sums[i / N] = i % N ? _mm512_add_epi32(sums[i / N], rounded) : rounded;
    if (i / N < count) store_words(_mm512_cvtepi32_epi8(rounded), (block * N + i) * 4, row, tile);
  }
  float scales[kAtOnce];
  int32_t totals[kAtOnce];
  _mm_storeu_ps(scales, _mm_div_ps(limits, top));
  const __m128i total = across(sums, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
  _mm_storeu_si128(reinterpret_cast<__m128i*>(totals), total);
  const int factor = packing.minima ? 0 : packing.zeros ? 1 : 1 << (packing.bits - 1);
  for (int64_t i = 0; i < count; i++) {
    const int64_t place = (block + i) * tile.rows + row;
    tile.scales[place] = scales[i];
    tile.offsets[place] = -factor * totals[i];
    if (packing.minima) tile.totals[place] = static_cast<float>(totals[i]) * scales[i];
  }
}

// One row.
void encode(const float* x, const Product& product, int row, const InputTile& tile) {
  const Packing& packing = product.packing;
  const float norm = product.gain ? norm_factor(x, packing.inputs, product.epsilon) : 1.0f;
  const auto encode_some = packing.block() == 32 ? encode_blocks<2> : encode_blocks<1>;
  for (int64_t block = 0; block < packing.blocks(); block += kAtOnce) encode_some(x, product, norm, block, row, tile);
}

__m512 exp2(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  }
  return _mm512_scalef_ps(y, n);
}

// x / (1 + exp(-t)) with t = x for SiLU, and for GELU twice what the tanh is taken of.
__m512 activate(Gate gate, __m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), log2e = _mm512_set1_ps(-1.4426950f);
  __m512 t = x;
  if (gate == Gate::kGelu) {
    const __m512 cube = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(0.044715f), x), _mm512_mul_ps(x, x), x);
    t = _mm512_mul_ps(_mm512_set1_ps(1.5957691f), cube);
  }
  return _mm512_div_ps(x, _mm512_add_ps(one, exp2(_mm512_mul_ps(t, log2e))));
}

void combine(Gate gate, const float* x, const float* up, float* out) {
  _mm512_storeu_ps(out, _mm512_mul_ps(activate(gate, _mm512_loadu_ps(x)), _mm512_loadu_ps(up)));
}

constexpr MatMulKernels kKernels{"avx512-vnni", {12, 10, 8, 6, 4, 2, 1}, encode, multiply_panel, combine};

}  // namespace

const MatMulKernels* avx512_matmul() { return &kKernels; }

}  // namespace edgekv

#else
namespace edgekv {
const MatMulKernels* avx512_matmul() { return nullptr; }
}  // namespace edgekv
#endif
