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

constexpr int kMostRows = 4, kWholePanelRows = 4;

#include "matmul_256.inl"

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

template <int R, int H, int Bits>
void dot_block(__m256i (&dots)[H][R], const uint8_t* codes, const int8_t* x, int steps) {
  EDGEKV_UNROLL
  for (int h = 0; h < H; h++) {
    if constexpr (Bits == 8) {
      dot_bytes<R>(dots[h], codes + h * 4 * kLanes, x, steps);
    } else {
      dot_nibbles<R, Bits>(dots[h], codes + h * 4 * kLanes, x, steps);
    }
  }
}

constexpr MatMulKernels kKernels{"avx2", {4, 2, 1}, encode, multiply_panel, combine};

}  // namespace

const MatMulKernels* avx2_matmul() { return &kKernels; }

}  // namespace edgekv

#else
namespace edgekv {
const MatMulKernels* avx2_matmul() { return nullptr; }
}  // namespace edgekv
#endif
