// The kernels, written once over the few primitives of a `simd` struct and compiled once per instruction set.
//
// The including file defines, in an unnamed namespace, `struct simd` with the members listed in kernels_plain.cpp, and
// EDGEKV_KERNELS, the name of the function to define. Everything here has internal linkage and uses no template of the
// standard library: a function that two translation units share could be linked in its AVX-512 form and then be called
// on a processor without AVX-512.
//
// Attention of one unit, FlashAttention's online softmax (Dao et al., arXiv 2205.14135) over tiles of slots:
//
//     scores    raw[r][s] = kf[s] sum_d q[r][d] k[s][d]     q has the softmax scale and K's channel scales folded in
//                                                           and is mixed as k is; kf is the factor of the slot's key
//     softmax   p[r][s] = exp(raw - maximum of the tile)    relative to the tile, so a sink elsewhere costs no digits;
//                                                           in INT8 the maximum of p vf
//     weigh     o[r][d] = o[r][d] alpha + beta sum_s p[r][s] vf[s] v[s][d]
//
// Where keys are held less their centre c, the score of the key at position n is q . R(n) (k - c) + q . R(n) c, and of
// a pair of channels the latter is (q1 c1 + q2 c2) cos(n w) + (q2 c1 - q1 c2) sin(n w): two products a pair and slot.
// In INT4 all pairs have them, and they are made as scores are: integers of 15 or 16 bits by codes of cos and sin.
//
// In INT8 q and p vf are integers of 15 or 16 bits, so that both sums are integer dot products over the stored codes:
// exact, and nothing is ever dequantised; codes of 4 bits are widened in registers, and so is FP8. The integers of p vf
// are relative to the tile's largest: a sink with a large weight and a small value must not cost the others their
// digits. V's channel scales are applied to the output, and what values are held less is added to it.

#include <math.h>
#include <string.h>

namespace edgekv {
namespace {

constexpr float kLog2e = 1.44269504088896f;
constexpr float kMasked = -3e38f;
constexpr float kTurnCodes = 127.0f;    // the code of a cosine of 1
constexpr float kTinyScale = 1e-30f;  // of a query that is all zeros: masked scores must stay far below the others
constexpr float kLeastFactor = 0x1p-64f, kLargestFactor = 0x1p64f;  // beyond, a row is as good as 0 or not finite
constexpr int kTileScores = 8192;     // rows * slots of a tile
constexpr int kAheadLines = 4;        // cache lines asked for with every vector of weights
constexpr int kMaxTileCodes = 65536;  // slots * D: keys of a tile stay in the second-level cache while rows go by

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The least bfloat16 that is not below a positive x.
inline float round_up(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0xFFFFu) & 0xFFFF0000u;
  memcpy(&x, &bits, sizeof bits);
  return x;
}

// ---------------------------------------------------------------------------------------------------- storage
//
// Each way to hold keys or values: the type of what lies in a block, how many items a row has, how a row already
// divided by its scales is written into slot `place` of a block, and what it is to be multiplied by (kUnit) beside its
// factor and scales. `store` returns the factor.

// The largest size of D numbers; NaN does not count. Sizes are compared as integers, which order alike and which,
// unlike floats, the compiler may compare in any order.
inline float largest_number(const float* x, int dim) {
  int32_t largest = 0;
  for (int d = 0; d < dim; d++) {
    int32_t bits;
    memcpy(&bits, x + d, sizeof bits);
    bits &= 0x7FFFFFFF;
    bits = bits > 0x7F800000 ? 0 : bits;
    largest = bits > largest ? bits : largest;
  }
  float size;
  memcpy(&size, &largest, sizeof size);
  return size;
}

// The least factor, a bfloat16, that keeps the codes of a row within `limit`.
inline float row_factor(const float* x, int dim, float limit) {
  const float least = largest_number(x, dim) / limit;
  return round_up(least > kLeastFactor ? (least < kLargestFactor ? least : kLargestFactor) : kLeastFactor);
}

inline int8_t int8_code(float code) {
  code = nearbyintf(code);
  const float low = code > -127.0f ? code : -127.0f, inside = low < 127.0f ? low : 127.0f;
  return static_cast<int8_t>(code == code ? inside : 0.0f);  // a NaN must not become an undefined integer
}

struct Int8Rows {
  using Element = int8_t;
  static constexpr int kFactorBytes = edgekv::kFactorBytes;
  static constexpr float kUnit = 1.0f;
  static int64_t items(int dim) { return dim; }

  static float encode_row(const float* x, int dim, int8_t* codes) {
    const float factor = row_factor(x, dim, 127.0f);
    for (int d = 0; d < dim; d++) codes[d] = int8_code(x[d] / factor);
    return factor;
  }
};

struct Int8Keys : Int8Rows {
  static constexpr bool kMixed = true;
  static float store(int8_t* block, int place, const float* x, int dim) {
    int8_t codes[kMaxDim];
    const float factor = encode_row(x, dim, codes);
    for (int d = 0; d < dim; d += 4) memcpy(block + d * kBlock + place * 4, codes + d, 4);
    return factor;
  }
};

struct Int8Values : Int8Rows {
  static constexpr bool kMixed = false;
  static float store(int8_t* block, int place, const float* x, int dim) {
    int8_t codes[kMaxDim];
    const float factor = encode_row(x, dim, codes);
    int8_t* column = block + place / 4 * 4 * dim + place % 4;
    for (int d = 0; d < dim; d++) column[4 * d] = codes[d];
    return factor;
  }
};

// Numbers of 4 bits, mixed. What is written are cells of the factor's width, each of which stands for its middle.
struct Int4Rows {
  using Element = Nibbles;
  static constexpr int kFactorBytes = edgekv::kFactorBytes;
  static constexpr bool kMixed = true;
  static constexpr float kUnit = 1.0f / 16;  // Nibbles::low
  static int64_t items(int dim) { return dim / 2; }

  static uint8_t code(float x, float factor) {
    const float cell = floorf(x / factor);
    if (!(cell > -8.0f)) return cell == cell ? 8 : 0;
    return static_cast<uint8_t>(static_cast<int>(cell < 7.0f ? cell : 7.0f) & 0xF);
  }

  // The D / 2 bytes of a row, channels i and i + 8 of every 16 in one.
  static float encode_row(const float* x, int dim, Nibbles* codes) {
    const float factor = row_factor(x, dim, 8.0f);
    for (int i = 0; i < dim / 2; i++) {
      const float* low = x + i / 8 * 16 + i % 8;
      codes[i].bits = static_cast<uint8_t>(code(low[0], factor) | code(low[8], factor) << 4);
    }
    return factor;
  }
};

struct Int4Keys : Int4Rows {
  static float store(Nibbles* block, int place, const float* x, int dim) {
    Nibbles codes[kMaxDim / 2];
    const float factor = encode_row(x, dim, codes);
    for (int i = 0; i < dim / 2; i += 4) memcpy(block + i * kBlock + place * 4, codes + i, 4);
    return factor;
  }
};

struct Int4Values : Int4Rows {
  static float store(Nibbles* block, int place, const float* x, int dim) {
    Nibbles codes[kMaxDim / 2];
    const float factor = encode_row(x, dim, codes);
    Nibbles* column = block + place / 4 * 2 * dim + place % 4;
    for (int i = 0; i < dim / 2; i++) column[4 * i] = codes[i];
    return factor;
  }
};

inline void encode(float x, float* out) { *out = x; }

// The nearest number of E4M3, ties to even, at most 448.
inline void encode(float x, E4m3* out) {
  const float size = fabsf(x);
  const uint8_t sign = x < 0 ? 0x80 : 0;
  if (!(size < 448.0f)) {
    out->bits = size == size ? sign | 0x7E : 0;  // a NaN is held as 0, as in INT8
  } else if (size < 0x1p-6f) {
    out->bits = static_cast<uint8_t>(sign | static_cast<int>(nearbyintf(size * 512)));  // steps of 2^-9
  } else {
    uint32_t bits;
    memcpy(&bits, &size, sizeof bits);
    bits = (bits + 0x7FFFFu + (bits >> 20 & 1)) >> 20;  // three bits of mantissa are left
    out->bits = static_cast<uint8_t>(sign | (bits - (120u << 3)));  // biases 127 and 7
  }
}

// Numbers as floats, in float32 or E4M3.
template <class Number>
struct FloatRows {
  using Element = Number;
  static constexpr int kFactorBytes = 0;
  static constexpr bool kMixed = false;
  static constexpr float kUnit = sizeof(Number) == 1 ? 256.0f : 1.0f;  // simd::widen
  static int64_t items(int dim) { return dim; }
};

template <class Number>
struct FloatKeys : FloatRows<Number> {
  static float store(Number* block, int place, const float* x, int dim) {
    for (int d = 0; d < dim; d++) encode(x[d], block + d * kBlock + place);
    return 1.0f;
  }
};

template <class Number>
struct FloatValues : FloatRows<Number> {
  static float store(Number* block, int place, const float* x, int dim) {
    for (int d = 0; d < dim; d++) encode(x[d], block + int64_t{place} * dim + d);
    return 1.0f;
  }
};

// The kinds of cache.
struct Int8 {
  using Keys = Int8Keys;
  using Values = Int8Values;
  static constexpr int kQueryBytes = 2;   // of each of D numbers, as simd::encode_query writes them
  static constexpr int kWeightBytes = 2;  // of each slot, as simd::encode_weights writes them
  static constexpr int kScoreRows = simd::kInt8ScoreRows;
  static constexpr int kWeighRows = simd::kInt8WeighRows;
};

struct K8V4 : Int8 {
  using Values = Int4Values;
};

struct Int4 : K8V4 {
  using Keys = Int4Keys;
};

template <class Number>
struct Floats {
  using Keys = FloatKeys<Number>;
  using Values = FloatValues<Number>;
  static constexpr int kQueryBytes = 4;
  static constexpr int kWeightBytes = 4;
  static constexpr int kScoreRows = 4;
  static constexpr int kWeighRows = 3;
};

// Where one KV head's keys (or values) are.
template <class Storage>
struct Rows {
  typename Storage::Element* codes;  // [slots, items] in blocks
  uint16_t* factors;                 // [slots], of codes only
  int64_t items;

  // The block that begins with this slot.
  typename Storage::Element* block(int64_t slot) const { return codes + slot * items; }
};

template <class Storage>
Rows<Storage> rows_of(const Problem& p, void* part, int64_t kv_head) {
  using Element = typename Storage::Element;
  const int64_t items = Storage::items(p.dim), codes = p.slots * items * static_cast<int64_t>(sizeof(Element));
  uint8_t* head = static_cast<uint8_t*>(part) + kv_head * (codes + p.slots * Storage::kFactorBytes);
  return {reinterpret_cast<Element*>(head), reinterpret_cast<uint16_t*>(head + codes), items};
}

template <class Cache>
Rows<typename Cache::Keys> keys_of(const Problem& p, int64_t kv_head) {
  return rows_of<typename Cache::Keys>(p, p.keys, kv_head);
}

template <class Cache>
Rows<typename Cache::Values> values_of(const Problem& p, int64_t kv_head) {
  return rows_of<typename Cache::Values>(p, p.values, kv_head);
}

// ---------------------------------------------------------------------------------------------------- append

// Half-split rotary embedding of a new token's row: of the first R channels, d turns with d + R / 2.
inline void rotate(const Problem& p, const float* x, int64_t token, bool pinned, float* out) {
  const int half = p.half;
  const float* cosine = (pinned ? p.cos_pinned : p.cos) + token * half;
  const float* sine = (pinned ? p.sin_pinned : p.sin) + token * half;
  for (int d = 0; d < half; d++) {
    out[d] = x[d] * cosine[d] - x[d + half] * sine[d];
    out[d + half] = x[d + half] * cosine[d] + x[d] * sine[d];
  }
  for (int d = 2 * half; d < p.dim; d++) out[d] = x[d];
}

// Mix channels with Sylvester's Hadamard matrix, H[i][j] = (-1)^popcount(i & j), in groups as large as the power of two
// that D has. Every stage pairs the two halves and interleaves the results, which the compiler turns into vectors.
inline void mix(float* x, int dim) {
  const int n = mixed(dim), half = n / 2;
  float other[kMaxDim];
  for (int first = 0; first < dim; first += n) {
    float *from = x + first, *to = other;
    for (int stage = 1; stage < n; stage *= 2) {
      for (int i = 0; i < half; i++) {
        const float low = from[i], high = from[i + half];
        to[2 * i] = low + high;
        to[2 * i + 1] = low - high;
      }
      float* done = to;
      to = from;
      from = done;
    }
    if (from != x + first) memcpy(x + first, from, n * sizeof(float));
  }
}

// Write a row of D numbers, which is lost; `scale` of its channels, or null.
template <class Storage>
void store_row(const Problem& p, const Rows<Storage>& rows, int64_t slot, float* x, const float* scale) {
  for (int d = 0; scale && d < p.dim; d++) x[d] /= scale[d];
  if constexpr (Storage::kMixed) mix(x, p.dim);
  const int place = static_cast<int>(slot % kBlock);
  const float factor = Storage::store(rows.block(slot / kBlock * kBlock), place, x, p.dim);
  if constexpr (Storage::kFactorBytes != 0) {
    uint32_t bits;
    memcpy(&bits, &factor, sizeof bits);
    rows.factors[slot] = static_cast<uint16_t>(bits >> 16);
  }
}

inline void less(const float* row, const float* centre, int dim, float* out) {
  for (int d = 0; d < dim; d++) out[d] = row[d] - centre[d];
}

// Take what the codes of a slot's angle make of the centre out of a key that is turned already.
inline void take_centre(const Problem& p, int kv_head, int64_t slot, float* key) {
  const float* centre = p.centre + int64_t{kv_head} * p.dim;
  const int8_t* codes = p.turn_codes + slot / kBlock * kBlock * p.turn_items() + slot % kBlock * 4;
  for (int i = 0; i < p.turned; i++) {
    const int8_t* code = codes + i / 2 * 4 * kBlock + i % 2 * 2;
    const float cosine = code[0] / kTurnCodes, sine = code[1] / kTurnCodes;
    const int64_t low = p.pairs[i], high = low + p.half;
    key[low] -= centre[low] * cosine - centre[high] * sine;
    key[high] -= centre[high] * cosine + centre[low] * sine;
  }
}

template <class Cache>
void append_row(const Problem& p, int64_t token, int kv_head) {
  const int dim = p.dim;
  const int64_t cached = p.state.before + token;
  const int64_t slot = slot_of(p.state, cached);
  // A pinned slot is met by queries at their position less the evicted tokens, so its key stands at its own slot.
  const bool pinned = p.state.evicted != 0 && cached < p.state.pinned && !p.state.ring;
  const float* row = p.qkv + token * p.qkv_stride();
  const float* key = row + int64_t{p.heads + kv_head} * dim;
  const float* value = row + int64_t{p.heads + p.kv_heads + kv_head} * dim;
  const float* k_scale = p.k_scale ? p.k_scale + int64_t{kv_head} * dim : nullptr;
  const float* v_scale = p.v_scale ? p.v_scale + int64_t{kv_head} * dim : nullptr;
  float rotated[kMaxDim], left[kMaxDim];
  if (p.centre && !p.turn_codes) {
    less(key, p.centre + int64_t{kv_head} * dim, dim, left);
    key = left;
  }
  rotate(p, key, token, pinned, rotated);
  if (p.centre && p.turn_codes) take_centre(p, kv_head, slot, rotated);
  store_row(p, keys_of<Cache>(p, kv_head), slot, rotated, k_scale);
  if (p.v_centre) {
    less(value, p.v_centre + int64_t{kv_head} * dim, dim, left);
  } else {
    memcpy(left, value, dim * sizeof(float));
  }
  store_row(p, values_of<Cache>(p, kv_head), slot, left, v_scale);
}

template <class Cache>
void append(const Problem& p, int64_t first, int64_t last) {
  for (int64_t token = first; token < last; token++) {
    for (int kv_head = 0; kv_head < p.kv_heads; kv_head++) append_row<Cache>(p, token, kv_head);
  }
}

// ---------------------------------------------------------------------------------------------------- one unit

// Everything that a unit of work needs, on the stack of the thread that does it.
template <class Cache>
struct alignas(64) Work {
  float scores[kTileScores];                              // [rows, tile slots]
  uint8_t weights[kTileScores * Cache::kWeightBytes];     // [rows, tile slots]
  uint8_t queries[2][kMaxRows * kMaxDim * Cache::kQueryBytes];  // [rows, D] for window and for pinned slots
  float values[kMaxRows * kMaxDim];                       // [rows, D], the running weighted sum
  float query_scale[2][kMaxRows];                         // a raw score times this is the score
  int32_t query_sum[2][kMaxRows];                         // for simd::score
  float turn[2][kMaxRows][2 * kMaxTurned];                // of cos and of sin in a raw score, for each pair
  uint8_t turn_codes[2][kMaxRows * 2 * kMaxTurned * Cache::kQueryBytes];  // INT4: the same, by simd::encode_query
  int32_t turn_sum[2][kMaxRows];                          // for simd::score
  float turn_unit[2][kMaxRows];                           // what their sums are to be multiplied by
  float factors[3][kMaxTileSlots];  // keys' factors; logarithms of the values' factors; 1 / factor
  float maximum[kMaxRows];                                // running, in scores
  float sum[kMaxRows];                                    // running, of the weights
  float half[kMaxRows];                                   // running, of half the weights with factors: Int4Values
  float alpha[kMaxRows];                                  // what a tile multiplies the running sums by
  float beta[kMaxRows];                                   // and its own sum over the integers of its weights
  bool finite[kMaxRows];
  int tile_slots;         // the stride of scores and weights
  const char* ahead;      // the memory to ask for while weights are made, up to
  const char* ahead_end;  // here
};

// The largest of |x|, and a check that is 0 where all of them are finite, and else NaN.
inline float largest_size(const float* x, int dim, float* check) {
  using F = typename simd::F;
  const F zero = simd::set(0.0f);
  F largest = zero, sum = zero;
  for (int d = 0; d < dim; d += simd::kWidth) {
    const F number = simd::load(x + d);
    largest = simd::max(largest, simd::max(number, simd::sub(zero, number)));
    sum = simd::fma(number, zero, sum);
  }
  *check = simd::total(sum);
  return simd::largest(largest);
}

// What a rotated query makes of the centre: the factors of each pair's cos and sin in its scores.
inline void turn_query(const Problem& p, int kv_head, const float* q, float* turn) {
  const float* centre = p.centre + int64_t{kv_head} * p.dim;
  for (int i = 0; i < p.turned; i++) {
    const int64_t low = p.pairs[i], high = low + p.half;
    turn[2 * i] = (q[low] * centre[low] + q[high] * centre[high]) * p.scale;
    turn[2 * i + 1] = (q[high] * centre[low] - q[low] * centre[high]) * p.scale;
  }
}

// What a query makes of the centre as integers, like the query's own.
template <class Cache>
void encode_turn(const Problem& p, int row, bool pinned, bool usable, Work<Cache>& work) {
  const int items = p.turn_items();
  float* turn = work.turn[pinned][row];
  for (int i = 2 * p.turned; i < items; i++) turn[i] = 0;
  float largest = 0;
  for (int i = 0; i < items; i++) largest = fabsf(turn[i]) > largest ? fabsf(turn[i]) : largest;
  usable = usable && largest > 0 && largest < 1e30f;
  const float step = usable ? largest / simd::kQueryLimit : 0.0f;
  work.turn_unit[pinned][row] = step / kTurnCodes;
  uint8_t* target = work.turn_codes[pinned] + int64_t{row} * items * Cache::kQueryBytes;
  work.turn_sum[pinned][row] = simd::encode_query(turn, usable ? 1.0f / step : 0.0f, usable, items, target);
}

// A row of the unit's queries: rotated, scaled, and for INT8 made an integer.
template <class Cache>
void prepare_query(const Problem& p, const Unit& unit, int row, bool pinned, Work<Cache>& work) {
  const int dim = p.dim;
  const int64_t token = (unit.row + row) / p.group();
  const int64_t head = unit.kv_head * p.group() + (unit.row + row) % p.group();
  float q[kMaxDim];
  rotate(p, p.qkv + token * p.qkv_stride() + head * dim, token, pinned, q);
  const float* k_scale = p.k_scale ? p.k_scale + int64_t{unit.kv_head} * dim : nullptr;
  float* turn = work.turn[pinned][row];
  if (p.centre) turn_query(p, unit.kv_head, q, turn);
  constexpr bool kMixed = Cache::Keys::kMixed;
  const float scale = Cache::Keys::kUnit * (kMixed ? p.scale / static_cast<float>(mixed(dim)) : p.scale);  // H H = n I
  for (int d = 0; d < dim; d++) q[d] *= k_scale ? k_scale[d] * scale : scale;
  if constexpr (kMixed) mix(q, dim);
  float check;
  const float largest = largest_size(q, dim, &check);
  work.finite[row] = work.finite[row] && check == 0.0f;
  uint8_t* target = work.queries[pinned] + int64_t{row} * dim * Cache::kQueryBytes;
  if constexpr (Cache::kQueryBytes == 4) {
    for (int d = 0; d < dim; d++) q[d] = check == 0.0f ? q[d] : 0.0f;
    memcpy(target, q, dim * sizeof(float));
    work.query_scale[pinned][row] = 1.0f;
  } else {
    const bool usable = check == 0.0f && largest > 1e-25f;
    const float step = usable ? largest / simd::kQueryLimit : kTinyScale;
    work.query_scale[pinned][row] = step;
    work.query_sum[pinned][row] = simd::encode_query(q, usable ? 1.0f / step : 0.0f, usable, dim, target);
    for (int i = 0; i < 2 * p.turned; i++) turn[i] /= step;
    if (p.turn_codes) encode_turn(p, row, pinned, usable, work);
  }
}

// Decoding reads everything once, so memory must never be idle: while scores are made from this tile's keys its values
// are asked for, and while weights are made, the keys after it. Worth 15 % beside the processor's own prefetching,
// which starts anew with every tile. A prefill finds its tile in the second-level cache.
template <class Cache>
bool reads_once(const Unit& unit) {
  return unit.rows <= Cache::kScoreRows;
}

inline void prefetch(const void* line) {
#if defined(__GNUC__)
  __builtin_prefetch(line, 0, 2);
#else
  (void)line;
#endif
}

inline void prefetch(const void* start, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(static_cast<const char*>(start) + i);
}

// Set what `read_ahead` asks for: as many keys as this tile has, after it.
template <class Cache>
void plan_ahead(const Problem& p, const Unit& unit, int64_t slot, int slots, Work<Cache>& work) {
  const auto keys = keys_of<Cache>(p, unit.kv_head);
  const int64_t next = slot + slots;
  const int64_t last = reads_once<Cache>(unit) ? least(next + slots, p.slots) : next;
  work.ahead = reinterpret_cast<const char*>(keys.block(next));
  work.ahead_end = reinterpret_cast<const char*>(keys.block(last));
}

template <class Cache>
void read_ahead(Work<Cache>& work) {
  for (int line = 0; line < kAheadLines && work.ahead < work.ahead_end; line++, work.ahead += 64) prefetch(work.ahead);
}

// Ask for what a unit needs first, the factors and a block of keys, before its queries are made.
template <class Cache>
void begin_reading(const Problem& p, const Unit& unit, const Segment& segment) {
  const int64_t first = most(unit.first, segment.token), last = least(unit.last, segment.token + segment.count);
  if (first >= last) return;
  const int64_t slot = segment.slot + first - segment.token;
  const auto keys = keys_of<Cache>(p, unit.kv_head);
  prefetch(keys.factors + slot, (last - first) * Cache::Keys::kFactorBytes);
  prefetch(values_of<Cache>(p, unit.kv_head).factors + slot, (last - first) * Cache::Values::kFactorBytes);
  prefetch(keys.block(slot / kBlock * kBlock), static_cast<int64_t>(sizeof *keys.codes) * kBlock * keys.items);
}

// The part of a tile that some rows see: slots low .. high - 1 of it, each row a part of these.
struct Tile {
  int64_t slot;  // where it begins in the cache: the start of a block
  int slots;
  bool pinned;
  int first_row, last_row;  // rows first .. last - 1 see something of it
  int low, high;
};

// The factors of the tile's keys as floats; 0 where no row sees them.
inline void load_factors(const uint16_t* factors, const Tile& tile, float* out) {
  for (int i = 0; i < tile.low; i++) out[i] = 0;
  for (int i = tile.low; i < tile.high; i++) {
    const uint32_t bits = uint32_t{factors[tile.slot + i]} << 16;
    memcpy(out + i, &bits, sizeof bits);
  }
  for (int i = tile.high; i < tile.slots; i++) out[i] = 0;
}

// The binary logarithms of the values' factors and 1 / factor; kMasked and 0 where no row sees them. Of the mantissa's
// logarithm a polynomial is within 1.2e-5 for every factor of 16 bits.
inline void load_logarithms(const uint16_t* factors, const Tile& tile, float* logarithm, float* inverse) {
  for (int i = 0; i < tile.low; i++) logarithm[i] = kMasked, inverse[i] = 0;
  for (int i = tile.low; i < tile.high; i++) {
    const uint32_t bits = uint32_t{factors[tile.slot + i]} << 16, mantissa = (bits & 0x7FFFFFu) | 0x3F800000u;
    float factor, m;
    memcpy(&factor, &bits, sizeof bits);
    memcpy(&m, &mantissa, sizeof mantissa);
    const float x = m - 1.5f, exponent = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
    float y = -7.9862122e-2f + 4.5376513e-2f * x;
    y = 1.41304185e-1f + y * x;
    y = -3.19776547e-1f + y * x;
    y = 9.61844768e-1f + y * x;
    logarithm[i] = exponent + (5.84951057e-1f + y * x);
    inverse[i] = 1 / factor;
  }
  for (int i = tile.high; i < tile.slots; i++) logarithm[i] = kMasked, inverse[i] = 0;
}

// Rows of raw scores against consecutive blocks; rows go in groups that share each load of the keys.
template <class Cache>
void score_tile(const Problem& p, const Unit& unit, const Tile& tile, Work<Cache>& work) {
  const int blocks = tile.slots / kBlock;
  const auto keys_at = keys_of<Cache>(p, unit.kv_head);
  const auto values_at = values_of<Cache>(p, unit.kv_head);
  const auto* keys = keys_at.block(tile.slot);
  const auto* values = values_at.block(tile.slot);
  const int64_t keys_step = kBlock * keys_at.items, values_step = kBlock * values_at.items;
  const int64_t query_bytes = int64_t{p.dim} * Cache::kQueryBytes;
  for (int block = 0; block < blocks; block++, keys += keys_step, values += values_step) {
    if (reads_once<Cache>(unit)) {
      if (block + 1 < blocks) prefetch(keys + keys_step, keys_step * static_cast<int64_t>(sizeof *keys));
      prefetch(values, values_step * static_cast<int64_t>(sizeof *values));
    }
    int row = tile.first_row;
    while (row < tile.last_row) {
      const int rows = static_cast<int>(least(Cache::kScoreRows, tile.last_row - row));
      const uint8_t* query = work.queries[tile.pinned] + row * query_bytes;
      float* out = work.scores + int64_t{row} * work.tile_slots + block * kBlock;
      const float* factors = work.factors[0] + block * kBlock;
      simd::score(rows, query, work.query_sum[tile.pinned] + row, keys, factors, p.dim, out, work.tile_slots);
      row += rows;
    }
  }
}

// Add to one row of raw scores what P pairs of the centre make of it, from pair `first` on.
template <int P, class Cache>
EDGEKV_APART void add_turns(const Problem& p, const Tile& tile, int row, int first, Work<Cache>& work) {
  using F = typename simd::F;
  float* scores = work.scores + int64_t{row} * work.tile_slots;
  const float* turn = work.turn[tile.pinned][row] + 2 * first;
  const float* cosine = p.turns + first * p.slots + tile.slot;
  const float* sine = cosine + p.turned * p.slots;
  F a[P], b[P];
  EDGEKV_UNROLL
  for (int i = 0; i < P; i++) a[i] = simd::set(turn[2 * i]), b[i] = simd::set(turn[2 * i + 1]);
  for (int s = 0; s < tile.slots; s += simd::kWidth) {
    F sum = simd::load(scores + s);
    EDGEKV_UNROLL
    for (int i = 0; i < P; i++) {
      sum = simd::fma(b[i], simd::load(sine + i * p.slots + s), sum);
      sum = simd::fma(a[i], simd::load(cosine + i * p.slots + s), sum);
    }
    simd::store(scores + s, sum);
  }
}

// Put the centre's part back into one row of raw scores. FP8 has all pairs: four at a time leave scores in registers.
template <class Cache>
void add_centre(const Problem& p, const Tile& tile, int row, Work<Cache>& work) {
  int i = 0;
  for (; i + 4 <= p.turned; i += 4) add_turns<4>(p, tile, row, i, work);
  for (; i < p.turned; i++) add_turns<1>(p, tile, row, i, work);
}

// The same for all rows of a tile, from codes of cos and sin: scores against keys of INT8 that all layers share.
template <class Cache>
void add_coded_centre(const Problem& p, const Tile& tile, Work<Cache>& work) {
  using F = typename simd::F;
  const int items = p.turn_items();
  float parts[Cache::kScoreRows * kBlock], ones[kBlock];
  for (float& one : ones) one = 1.0f;
  for (int block = 0; block < tile.slots; block += kBlock) {
    const int8_t* codes = p.turn_codes + (tile.slot + block) * items;
    for (int first = tile.first_row; first < tile.last_row; first += Cache::kScoreRows) {
      const int rows = static_cast<int>(least(Cache::kScoreRows, tile.last_row - first));
      const uint8_t* query = work.turn_codes[tile.pinned] + int64_t{first} * items * Cache::kQueryBytes;
      simd::score(rows, query, work.turn_sum[tile.pinned] + first, codes, ones, items, parts, kBlock);
      for (int row = 0; row < rows; row++) {
        float* scores = work.scores + int64_t{first + row} * work.tile_slots + block;
        const F unit = simd::set(work.turn_unit[tile.pinned][first + row]);
        for (int i = 0; i < kBlock; i += simd::kWidth) {
          simd::store(scores + i, simd::fma(simd::load(parts + row * kBlock + i), unit, simd::load(scores + i)));
        }
      }
    }
  }
}

// softcap tanh(score / softcap), in place. With e = 2^(2 x log2 e), tanh x = (e - 1) / (e + 1); its absolute error of a
// few 1e-7 is what counts, because the result is a difference in an exponent.
inline void cap_scores(float* scores, int slots, float query_scale, float softcap) {
  using F = typename simd::F;
  constexpr float kEnough = 60.0f;  // 2^60: tanh is 1 in float32 long before
  const F factor = simd::set(2 * kLog2e * query_scale / softcap), one = simd::set(1.0f), top = simd::set(kEnough);
  for (int i = 0; i < slots; i += simd::kWidth) {
    const F x = simd::mul(simd::load(scores + i), factor);
    const F e = simd::exp2(simd::sub(top, simd::max(simd::sub(top, x), simd::set(0.0f))));
    simd::store(scores + i, simd::mul(simd::set(softcap), simd::div(simd::sub(e, one), simd::add(e, one))));
  }
}

// What a row's weights of a tile amount to.
struct Softened {
  float maximum;  // the score that the weights are relative to
  float sum;      // of the weights
  float unit;     // what the numbers that `weigh` reads are to be multiplied by
  float half;     // of the weights with factors, half the sum: Int4Values
};

// Scores -> weights p v f as integers, the tile's largest being kWeightLimit. With log2(vf) added to a score the
// maximum is known before the weights are, which saves a second pass over them.
template <class Cache>
Softened soften_codes(float* scores, int slots, float query_scale, uint8_t* weights, Work<Cache>& work) {
  using F = typename simd::F;
  const float *logarithm = work.factors[1], *inverse = work.factors[2];
  const F factor = simd::set(query_scale * kLog2e);
  F best = simd::set(kMasked), sum = simd::set(0.0f), all = sum;
  for (int i = 0; i < slots; i += simd::kWidth) {
    const F exponent = simd::fma(simd::load(scores + i), factor, simd::load(logarithm + i));
    simd::store(scores + i, exponent);
    best = simd::max(best, exponent);
  }
  const float largest = simd::largest(best);
  const F top = simd::set(largest);
  for (int i = 0; i < slots; i += simd::kWidth) {
    read_ahead(work);
    const F weight = simd::scaled_exp2(simd::sub(simd::load(scores + i), top));
    simd::encode_weights(weight, weights, work.tile_slots, i);
    sum = simd::fma(weight, simd::load(inverse + i), sum);
    if constexpr (Cache::Values::kMixed) all = simd::add(all, weight);
  }
  constexpr float unit = 1.0f / simd::kWeightLimit;
  return {largest / kLog2e, simd::total(sum) * unit, unit, simd::total(all) * (0.5f * unit)};
}

template <class Cache>
Softened soften_floats(const float* scores, int slots, float query_scale, float* weights, Work<Cache>& work) {
  using F = typename simd::F;
  F best = simd::set(kMasked), sum = simd::set(0.0f);
  for (int i = 0; i < slots; i += simd::kWidth) best = simd::max(best, simd::load(scores + i));
  const float raw = simd::largest(best);
  const F top = simd::set(raw), factor = simd::set(query_scale * kLog2e);
  for (int i = 0; i < slots; i += simd::kWidth) {
    read_ahead(work);
    const F weight = simd::exp2(simd::mul(simd::sub(simd::load(scores + i), top), factor));
    simd::store(weights + i, weight);
    sum = simd::add(sum, weight);
  }
  return {raw * query_scale, simd::total(sum), 1.0f, 0.0f};
}

// Raw scores of one row -> weights, and what its running sums are to be multiplied by. Slots outside low .. high - 1
// get the weight 0.
template <class Cache>
void soften_row(const Problem& p, int row, int slots, int low, int high, float query_scale, Work<Cache>& work) {
  float* scores = work.scores + int64_t{row} * work.tile_slots;
  if (p.softcap != 0.0f) {
    cap_scores(scores, slots, query_scale, p.softcap);
    query_scale = 1.0f;
  }
  for (int i = 0; i < low; i++) scores[i] = kMasked;
  for (int i = high; i < slots; i++) scores[i] = kMasked;
  uint8_t* weights = work.weights + int64_t{row} * work.tile_slots * Cache::kWeightBytes;
  Softened tile;
  if constexpr (Cache::kWeightBytes == 4) {
    tile = soften_floats(scores, slots, query_scale, reinterpret_cast<float*>(weights), work);
  } else {
    tile = soften_codes(scores, slots, query_scale, weights, work);
  }
  const float before = work.maximum[row];
  const float maximum = tile.maximum > before ? tile.maximum : before;
  work.alpha[row] = before == maximum ? 1.0f : expf(before - maximum);
  const float beta = tile.maximum == maximum ? 1.0f : expf(tile.maximum - maximum);
  work.beta[row] = beta * tile.unit * Cache::Values::kUnit;
  if constexpr (Cache::Values::kMixed) work.half[row] = work.half[row] * work.alpha[row] + beta * tile.half;
  work.maximum[row] = maximum;
  work.sum[row] = work.sum[row] * work.alpha[row] + beta * tile.sum;
}

// o = o alpha + beta sum p v for the tile's rows.
template <class Cache>
void weigh_tile(const Problem& p, const Unit& unit, const Tile& tile, Work<Cache>& work) {
  const auto* values = values_of<Cache>(p, unit.kv_head).block(tile.slot);
  for (int row = tile.first_row; row < tile.last_row; row += Cache::kWeighRows) {
    const int rows = static_cast<int>(least(Cache::kWeighRows, tile.last_row - row));
    const uint8_t* weights = work.weights + int64_t{row} * work.tile_slots * Cache::kWeightBytes;
    float* out = work.values + int64_t{row} * p.dim;
    simd::weigh(rows, weights, work.tile_slots, values, tile.low, tile.high, p.dim, out, work.alpha + row,
                work.beta + row);
  }
}

// The slots begin .. end - 1 of a segment that a row may see; end <= begin where it sees none.
struct Span {
  int64_t begin, end;
};

inline Span visible(const Problem& p, const Unit& unit, const Segment& segment, int row) {
  const int64_t token = p.state.before + (unit.row + row) / p.group();  // the row's own place in the cache
  const int64_t first = most(most(unit.first, p.oldest(token)), segment.token);
  const int64_t last = least(least(unit.last, token + 1), segment.token + segment.count);
  const int64_t shift = segment.slot - segment.token;
  return {first + shift, last + shift};
}

// Slots `slot` (the start of a block) .. slot + slots - 1 against the rows that see some of them. Rows come in the
// order of their tokens, so these are consecutive.
template <class Cache>
void attend_tile(const Problem& p, const Unit& unit, const Segment& segment, int64_t slot, int slots,
                 Work<Cache>& work) {
  Tile tile{slot, slots, segment.pinned, 0, unit.rows, 0, 0};
  const auto sees = [&](int row) {
    const Span span = visible(p, unit, segment, row);
    return most(span.begin, slot) < least(span.end, slot + slots);
  };
  while (tile.first_row < tile.last_row && !sees(tile.first_row)) tile.first_row++;
  while (tile.first_row < tile.last_row && !sees(tile.last_row - 1)) tile.last_row--;
  if (tile.first_row == tile.last_row) return;
  tile.low = static_cast<int>(most(visible(p, unit, segment, tile.first_row).begin - slot, 0));
  tile.high = static_cast<int>(least(visible(p, unit, segment, tile.last_row - 1).end - slot, slots));
  if constexpr (Cache::Keys::kFactorBytes != 0) {
    load_factors(keys_of<Cache>(p, unit.kv_head).factors, tile, work.factors[0]);
    load_logarithms(values_of<Cache>(p, unit.kv_head).factors, tile, work.factors[1], work.factors[2]);
  }
  score_tile(p, unit, tile, work);
  plan_ahead(p, unit, slot, slots, work);
  if constexpr (Cache::Keys::kFactorBytes != 0) {
    if (p.centre && p.turn_codes) add_coded_centre(p, tile, work);
  }
  for (int row = tile.first_row; row < tile.last_row; row++) {
    const Span span = visible(p, unit, segment, row);
    const int low = static_cast<int>(most(span.begin - slot, 0));
    const int high = static_cast<int>(least(span.end - slot, slots));
    if (p.centre && !p.turn_codes) add_centre(p, tile, row, work);
    soften_row(p, row, slots, low, high, work.query_scale[segment.pinned][row], work);
  }
  weigh_tile(p, unit, tile, work);
}

template <class Cache>
void attend_segment(const Problem& p, const Unit& unit, const Segment& segment, Work<Cache>& work) {
  const int64_t begin = visible(p, unit, segment, 0).begin;
  const int64_t end = visible(p, unit, segment, unit.rows - 1).end;
  for (int64_t slot = begin / kBlock * kBlock; slot < end; slot += work.tile_slots) {
    const int64_t blocks = (least(work.tile_slots, end - slot) + kBlock - 1) / kBlock;
    attend_tile(p, unit, segment, slot, static_cast<int>(blocks) * kBlock, work);
  }
}

// Values that are held mixed, and as the cells that they lie in: half a cell to each, and mixed back.
template <class Cache>
void unmix_values(const Problem& p, const Unit& unit, Work<Cache>& work) {
  const float back = 1.0f / static_cast<float>(mixed(p.dim));
  for (int row = 0; row < unit.rows; row++) {
    float* values = work.values + int64_t{row} * p.dim;
    for (int d = 0; d < p.dim; d++) values[d] = (values[d] + work.half[row]) * back;
    mix(values, p.dim);
  }
}

template <class Cache>
void write_output(const Problem& p, const Unit& unit, const Work<Cache>& work) {
  const float* v_scale = p.v_scale ? p.v_scale + int64_t{unit.kv_head} * p.dim : nullptr;
  const float* v_centre = p.v_centre ? p.v_centre + int64_t{unit.kv_head} * p.dim : nullptr;
  for (int row = 0; row < unit.rows; row++) {
    const int64_t token = (unit.row + row) / p.group();
    const int64_t head = unit.kv_head * p.group() + (unit.row + row) % p.group();
    float* out = p.out + (token * p.heads + head) * p.dim;
    const float* values = work.values + int64_t{row} * p.dim;
    const float factor = work.finite[row] ? 1.0f / work.sum[row] : NAN;
    for (int d = 0; d < p.dim; d++) out[d] = values[d] * factor * (v_scale ? v_scale[d] : 1.0f);
    for (int d = 0; v_centre && d < p.dim; d++) out[d] += v_centre[d];
  }
}

template <class Cache>
void write_partial(const Problem& p, const Unit& unit, const Work<Cache>& work) {
  for (int row = 0; row < unit.rows; row++) {
    float* out = unit.partial + int64_t{row} * (p.dim + 2);
    out[0] = work.maximum[row];
    out[1] = work.finite[row] ? work.sum[row] : NAN;
    memcpy(out + 2, work.values + int64_t{row} * p.dim, p.dim * sizeof(float));
  }
}

template <class Cache>
void attend(const Problem& p, const Layout& layout, const Unit& unit) {
  Work<Cache> work;
  const int64_t slots = least(least(kTileScores / unit.rows, simd::kTileSlots), kMaxTileCodes / p.dim);
  work.tile_slots = static_cast<int>(slots / kBlock * kBlock);
  memset(work.values, 0, static_cast<size_t>(unit.rows) * p.dim * sizeof(float));
  for (int row = 0; row < unit.rows; row++) {
    work.maximum[row] = -INFINITY;
    work.sum[row] = work.half[row] = 0;
    work.finite[row] = true;
  }
  bool ready[2] = {false, false};
  for (int i = 0; i < layout.count && reads_once<Cache>(unit); i++) begin_reading<Cache>(p, unit, layout.segments[i]);
  for (int i = 0; i < layout.count; i++) {
    const Segment& segment = layout.segments[i];
    if (segment.token >= unit.last || segment.token + segment.count <= unit.first) continue;
    if (!ready[segment.pinned]) {
      for (int row = 0; row < unit.rows; row++) prepare_query(p, unit, row, segment.pinned, work);
      ready[segment.pinned] = true;
    }
    attend_segment(p, unit, segment, work);
  }
  if constexpr (Cache::Values::kMixed) unmix_values(p, unit, work);
  if (unit.partial) {
    write_partial(p, unit, work);
  } else {
    write_output(p, unit, work);
  }
}

}  // namespace

const Kernels* EDGEKV_KERNELS(CacheType type) {
  static const Kernels int8{simd::kName, append<Int8>, attend<Int8>};
  static const Kernels k8v4{simd::kName, append<K8V4>, attend<K8V4>};
  static const Kernels int4{simd::kName, append<Int4>, attend<Int4>};
  static const Kernels fp8{simd::kName, append<Floats<E4m3>>, attend<Floats<E4m3>>};
  static const Kernels floats{simd::kName, append<Floats<float>>, attend<Floats<float>>};
  switch (type) {
    case CacheType::kInt8: return &int8;
    case CacheType::kK8V4: return &k8v4;
    case CacheType::kInt4: return &int4;
    case CacheType::kFp8: return &fp8;
    default: return &floats;
  }
}

}  // namespace edgekv
