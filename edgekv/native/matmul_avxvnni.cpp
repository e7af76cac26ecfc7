// The product's kernels for AVX-VNNI, which laptops have where they lack AVX-512. Compiled with its flag and called
// only after cpu.cpp has found it.
#include "matmul.h"
#include "unroll.h"

#if defined(__AVX2__) && (defined(__AVXVNNI__) || defined(EDGEKV_EVEX) || defined(EDGEKV_AVXVNNI))
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include <initializer_list>

#include "dot_256.h"

namespace edgekv {
namespace {

// As many sums at once as the products' latency wants.
constexpr int kMostRows = 8, kWholePanelRows = 4;

#include "matmul_256.inl"

template <int R>
void add_step(__m256i* dots, __m256i codes, const int8_t* x) {
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) {
    dots[r] = add_dots_of_four(dots[r], codes, _mm256_set1_epi32(word<int32_t>(x + 4 * r)));
  }
}

// Two steps of codes.
struct Pair {
  __m256i first, second;
};

// Of 8 bits, or of the low nibbles of 4 to 6 bits.
template <int Bits>
Pair pair_at(const uint8_t* codes) {
  const __m256i both = load(codes), nibble = _mm256_set1_epi8(0xF);
  if (Bits == 8) return {both, load(codes + 4 * kPanel)};
  return {_mm256_and_si256(both, nibble), _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble)};
}

template <int R, int H, int Bits>
void dot_block(__m256i (&dots)[H][R], const uint8_t* codes, const int8_t* x, int steps) {
  constexpr int kHigh = Bits == 8 ? 0 : Bits - 4, kRun = kHigh == 1 ? 8 : 4;  // a line has the bits of so many steps
  constexpr int kPairBytes = Bits == 8 ? 8 * kPanel : 4 * kPanel;
  const __m256i above = _mm256_set1_epi8(((1 << kHigh) - 1) << 4);
  const uint8_t* line = codes + steps * 2 * kPanel;
  for (int done = 0; done < steps; done += kRun, line += 4 * kPanel) {
    __m256i bits[H], high[H];
    if (kHigh) prefetch<R>(line);
    EDGEKV_UNROLL
    for (int h = 0; h < H; h++) bits[h] = high[h] = kHigh ? load(line + h * 4 * kLanes) : _mm256_setzero_si256();
    EDGEKV_UNROLL
    for (int step = 0; step < kRun; step += 2, codes += kPairBytes, x += 8 * R) {
      EDGEKV_UNROLL
      for (int byte = 0; byte < kPairBytes; byte += kLine) prefetch<R>(codes + byte);
      EDGEKV_UNROLL
      for (int h = 0; h < H; h++) {
        Pair pair = pair_at<Bits>(codes + h * 4 * kLanes);
        if (kHigh) {  // moved so that the next step's bits lie above a nibble
          const int place = step * kHigh;
          high[h] = place == 0 ? _mm256_slli_epi16(bits[h], 4) : place == 4 ? bits[h] : high[h];
          pair.first = _mm256_or_si256(pair.first, _mm256_and_si256(high[h], above));
          high[h] = _mm256_srli_epi16(high[h], kHigh);
          pair.second = _mm256_or_si256(pair.second, _mm256_and_si256(high[h], above));
          high[h] = _mm256_srli_epi16(high[h], kHigh);
        }
        add_step<R>(dots[h], pair.first, x);
        add_step<R>(dots[h], pair.second, x + 4 * R);
      }
    }
  }
}

constexpr MatMulKernels kKernels{"avx-vnni", {8, 6, 4, 2, 1}, encode, multiply_panel, combine};

}  // namespace

const MatMulKernels* avxvnni_matmul() { return &kKernels; }

}  // namespace edgekv

#else
namespace edgekv {
const MatMulKernels* avxvnni_matmul() { return nullptr; }
}  // namespace edgekv
#endif
