// The product with a table for AVX2: two registers hold the table, and bit 3 of a code chooses between what is found in
// them.
#include "table.h"
#include "unroll.h"

#if defined(__AVX2__) && (defined(__FMA__) || defined(_MSC_VER))
#include <immintrin.h>

#include "table.inl"

namespace edgekv {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8, kRows = 4, kOutputs = 1;
  using Floats = __m256;
  struct Table {
    __m256 low, high;
  };

  static Table read(const float* table) { return {_mm256_loadu_ps(table), _mm256_loadu_ps(table + 8)}; }
  static Table times(const Table& table, float factor) {
    const __m256 all = _mm256_set1_ps(factor);
    return {_mm256_mul_ps(table.low, all), _mm256_mul_ps(table.high, all)};
  }
  static Floats zero() { return _mm256_setzero_ps(); }
  static Floats load(const float* x) { return _mm256_loadu_ps(x); }
  static void unpack(const Table& table, const uint8_t* codes, Floats& even, Floats& odd) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    even = look_up(table, _mm256_srli_epi32(bytes, 4));
    odd = look_up(table, bytes);
  }
  // vpermps reads the three lowest bits of an index, vblendvps the highest.
  static Floats look_up(const Table& table, __m256i codes) {
    const __m256 low = _mm256_permutevar8x32_ps(table.low, codes), high = _mm256_permutevar8x32_ps(table.high, codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }
  static Floats add_product(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }
  static float sum(Floats x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
};

constexpr TableKernels kKernels{"avx2", Avx2::kLanes, Avx2::kRows, multiply_rows<Avx2>};

}  // namespace

const TableKernels* avx2_table() { return &kKernels; }

}  // namespace edgekv

#else
namespace edgekv {
const TableKernels* avx2_table() { return nullptr; }
}  // namespace edgekv
#endif
