// The product with a table for AVX-512: the table is one register, and vpermps looks up 16 codes at once. It reads no
// more than the four lowest bits of an index, so that bytes need no mask.
#include "table.h"
#include "unroll.h"

#if defined(__AVX512F__)
#include <immintrin.h>

#include "table.inl"

namespace edgekv {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16, kRows = 8, kOutputs = 2;
  using Floats = __m512;
  using Table = __m512;

  static Table read(const float* table) { return _mm512_loadu_ps(table); }
  static Table times(Table table, float factor) { return _mm512_mul_ps(table, _mm512_set1_ps(factor)); }
  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats load(const float* x) { return _mm512_loadu_ps(x); }
  static void unpack(Table table, const uint8_t* codes, Floats& even, Floats& odd) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    even = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    odd = _mm512_permutexvar_ps(bytes, table);
  }
  static Floats add_product(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
  static float sum(Floats x) { return _mm512_reduce_add_ps(x); }
};

constexpr TableKernels kKernels{"avx512", Avx512::kLanes, Avx512::kRows, multiply_rows<Avx512>};

}  // namespace

const TableKernels* avx512_table() { return &kKernels; }

}  // namespace edgekv

#else
namespace edgekv {
const TableKernels* avx512_table() { return nullptr; }
}  // namespace edgekv
#endif
