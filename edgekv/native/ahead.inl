// Asking for weights before they are needed. Included by each instruction set within its unnamed namespace, so that
// each compiles its own.

// Where few rows use them, weights are asked for this many bytes ahead: first into the second cache, which has room for
// more requests, then into the first. One row is faster with kFarOne, by up to a quarter, others with kFar.
constexpr int kFarOne = 2048, kFar = 4096, kNear = 256, kFewRows = 4;

template <int R>
void prefetch(const uint8_t* line) {
  if (R > kFewRows) return;
  _mm_prefetch(reinterpret_cast<const char*>(line + (R == 1 ? kFarOne : kFar)), _MM_HINT_T1);
  _mm_prefetch(reinterpret_cast<const char*>(line + kNear), _MM_HINT_T0);
}

// With more rows there is time to fetch from the second cache.
template <int Bytes>
void prefetch_far(const uint8_t* place) {
  EDGEKV_UNROLL
  for (int i = 0; i < Bytes; i += kLine) _mm_prefetch(reinterpret_cast<const char*>(place + i + kFar), _MM_HINT_T1);
}
