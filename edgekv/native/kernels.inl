// The kernels, written once over the few primitives of a `simd` struct and compiled once per instruction set.
//
// The including file defines, in an unnamed namespace, `struct simd` with the members listed in kernels_plain.cpp, and
// EDGEKV_KERNELS, the name of the function to define. Everything here has internal linkage and uses no template of the
// standard library: a function that two translation units share could be linked in its AVX-512 form and then be called
// on a processor without AVX-512.
//
// Attention of one unit, FlashAttention's online softmax (Dao et al., arXiv 2205.14135) over tiles of slots:
//
//     scores    raw[r][s] = sum_d q[r][d] k[s][d]           q has the softmax scale and K's channel scales folded in
//     softmax   p[r][s] = exp(raw - maximum of the tile)    relative to the tile, so a sink elsewhere costs no digits
//     weigh     o[r][d] = o[r][d] alpha + beta sum_s p[r][s] v[s][d]
//
// Where keys are held less their centre c, the score of the key at position n is q . R(n) (k - c) + q . R(n) c, and of a
// pair of channels the latter is (q1 c1 + q2 c2) cos(n w) + (q2 c1 - q1 c2) sin(n w): two products a pair and slot.
//
// In INT8 q and p are integers of 15 or 16 bits, so that both sums are integer dot products over the stored codes:
// exact, and nothing is ever dequantised. V's channel scales are applied to the output.

#include <math.h>
#include <string.h>

namespace edgekv {
namespace {

constexpr float kLog2e = 1.44269504088896f;
constexpr float kMasked = -3e38f;
constexpr float kTinyScale = 1e-30f;  // of a query that is all zeros: masked scores must stay far below the others
constexpr int kTileScores = 8192;     // rows * slots of a tile
constexpr int kMaxTileSlots = 1024;   // the integer sums of `weigh` fit 32 bits up to here
constexpr int kAheadLines = 4;        // cache lines asked for with every vector of weights
constexpr int kMaxTileCodes = 65536;  // slots * D: keys of a tile stay in the second-level cache while rows go by

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The cache in INT8.
struct Int8 {
  using Element = int8_t;
  using Query = uint8_t;   // 2 D bytes a row, as simd::encode_query writes them
  using Weight = uint8_t;  // 2 bytes a slot, as simd::encode_weights writes them
  static constexpr int kQueryBytes = 2;
  static constexpr int kWeightBytes = 2;
  static constexpr int kScoreRows = simd::kInt8ScoreRows;
  static constexpr int kWeighRows = simd::kInt8WeighRows;

  static int64_t key_at(int slot, int d) { return (d / 4) * 4 * kBlock + slot * 4 + d % 4; }
  static int64_t value_at(int slot, int d, int dim) { return (slot / 4) * 4 * int64_t{dim} + d * 4 + slot % 4; }

  static int8_t encode(float x, float scale) {
    const float code = nearbyintf(x / scale);
    if (!(code > -127.0f)) return code == code ? -127 : 0;  // a NaN must not become an undefined integer
    return static_cast<int8_t>(code < 127.0f ? code : 127.0f);
  }
};

// The cache in float32.
struct Float {
  using Element = float;
  static constexpr int kQueryBytes = 4;
  static constexpr int kWeightBytes = 4;
  static constexpr int kScoreRows = 4;
  static constexpr int kWeighRows = 3;

  static int64_t key_at(int slot, int d) { return d * kBlock + slot; }
  static int64_t value_at(int slot, int d, int dim) { return int64_t{slot} * dim + d; }
  static float encode(float x, float) { return x; }
};

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

template <class Cache>
void append_row(const Problem& p, int64_t token, int kv_head) {
  using Element = typename Cache::Element;
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
  const int64_t block = (kv_head * p.slots + slot / kBlock * kBlock) * dim;
  Element* keys = static_cast<Element*>(p.keys) + block;
  Element* values = static_cast<Element*>(p.values) + block;
  const int place = static_cast<int>(slot % kBlock);
  float rotated[kMaxDim], left[kMaxDim];
  if (p.centre) {
    for (int d = 0; d < dim; d++) left[d] = key[d] - p.centre[int64_t{kv_head} * dim + d];
    key = left;
  }
  rotate(p, key, token, pinned, rotated);
  for (int d = 0; d < dim; d++) {
    keys[Cache::key_at(place, d)] = Cache::encode(rotated[d], k_scale ? k_scale[d] : 1.0f);
    values[Cache::value_at(place, d, dim)] = Cache::encode(value[d], v_scale ? v_scale[d] : 1.0f);
  }
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
  float maximum[kMaxRows];                                // running, in scores
  float sum[kMaxRows];                                    // running, in the units of the weights
  float alpha[kMaxRows];
  float beta[kMaxRows];
  bool finite[kMaxRows];
  int tile_slots;         // the stride of scores and weights
  const char* ahead;      // the memory to ask for while weights are made, up to
  const char* ahead_end;  // here
};

// What a rotated query makes of the centre: the factors of each pair's cos and sin in its scores.
inline void turn_query(const Problem& p, int kv_head, const float* q, float* turn) {
  const float* centre = p.centre + int64_t{kv_head} * p.dim;
  for (int i = 0; i < p.turned; i++) {
    const int64_t low = p.pairs[i], high = low + p.half;
    turn[2 * i] = (q[low] * centre[low] + q[high] * centre[high]) * p.scale;
    turn[2 * i + 1] = (q[high] * centre[low] - q[low] * centre[high]) * p.scale;
  }
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
  float largest = 0, check = 0;
  for (int d = 0; d < dim; d++) {
    q[d] *= k_scale ? k_scale[d] * p.scale : p.scale;
    const float size = fabsf(q[d]);
    largest = size > largest ? size : largest;
    check += size * 0.0f;  // NaN as soon as one number is not finite
  }
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
  }
}

// Decoding reads everything once, so memory must never be idle: while scores are made from this tile's keys its values
// are asked for, and while weights are made, the keys after it. Worth 15 % beside the processor's own prefetching, which
// starts anew with every tile. A prefill finds its tile in the second-level cache.
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

// Set what `soften_row` asks for: as many keys as this tile has, after it.
template <class Cache>
void plan_ahead(const Problem& p, const Unit& unit, int64_t slot, int slots, Work<Cache>& work) {
  using Element = typename Cache::Element;
  const int64_t next = (unit.kv_head * p.slots + slot + slots) * p.dim, end = p.kv_heads * p.slots * p.dim;
  const int64_t last = reads_once<Cache>(unit) ? least(next + int64_t{slots} * p.dim, end) : next;
  const Element* keys = static_cast<const Element*>(p.keys);
  work.ahead = reinterpret_cast<const char*>(keys + next);
  work.ahead_end = reinterpret_cast<const char*>(keys + last);
}

// The part of a tile that some rows see: slots low .. high - 1 of it, each row a part of these.
struct Tile {
  int64_t slot;  // where it begins in the cache: the start of a block
  int slots;
  bool pinned;
  int first_row, last_row;  // rows first .. last - 1 see something of it
  int low, high;
};

// Rows of raw scores against consecutive blocks; rows go in groups that share each load of the keys.
template <class Cache>
void score_tile(const Problem& p, const Unit& unit, const Tile& tile, Work<Cache>& work) {
  using Element = typename Cache::Element;
  const int64_t start = (unit.kv_head * p.slots + tile.slot) * p.dim;
  const int blocks = tile.slots / kBlock;
  const Element* keys = static_cast<const Element*>(p.keys) + start;
  const Element* values = static_cast<const Element*>(p.values) + start;
  const int64_t block_bytes = static_cast<int64_t>(sizeof(Element)) * kBlock * p.dim;
  const int64_t query_bytes = int64_t{p.dim} * Cache::kQueryBytes;
  for (int block = 0; block < blocks; block++, keys += kBlock * p.dim, values += kBlock * p.dim) {
    if (reads_once<Cache>(unit)) {
      if (block + 1 < blocks) prefetch(keys + kBlock * p.dim, block_bytes);
      prefetch(values, block_bytes);
    }
    int row = tile.first_row;
    while (row < tile.last_row) {
      const int rows = static_cast<int>(least(Cache::kScoreRows, tile.last_row - row));
      const uint8_t* query = work.queries[tile.pinned] + row * query_bytes;
      float* out = work.scores + int64_t{row} * work.tile_slots + block * kBlock;
      simd::score(rows, query, work.query_sum[tile.pinned] + row, keys, p.dim, out, work.tile_slots);
      row += rows;
    }
  }
}

// Put the centre's part back into one row of raw scores.
template <class Cache>
void add_centre(const Problem& p, const Tile& tile, int row, Work<Cache>& work) {
  using F = typename simd::F;
  float* scores = work.scores + int64_t{row} * work.tile_slots;
  const float* turn = work.turn[tile.pinned][row];
  for (int i = 0; i < p.turned; i++) {
    const F a = simd::set(turn[2 * i]), b = simd::set(turn[2 * i + 1]);
    const float* cosine = p.turns + i * p.slots + tile.slot;
    const float* sine = p.turns + (p.turned + i) * p.slots + tile.slot;
    for (int s = 0; s < tile.slots; s += simd::kWidth) {
      const F sum = simd::fma(b, simd::load(sine + s), simd::load(scores + s));
      simd::store(scores + s, simd::fma(a, simd::load(cosine + s), sum));
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
  using F = typename simd::F;
  F best = simd::set(kMasked);
  for (int i = 0; i < slots; i += simd::kWidth) best = simd::max(best, simd::load(scores + i));
  const float raw = simd::largest(best);
  const F top = simd::set(raw), factor = simd::set(query_scale * kLog2e);
  uint8_t* weights = work.weights + int64_t{row} * work.tile_slots * Cache::kWeightBytes;
  F sum = simd::set(0.0f);
  for (int i = 0; i < slots; i += simd::kWidth) {
    for (int line = 0; line < kAheadLines && work.ahead < work.ahead_end; line++, work.ahead += 64) prefetch(work.ahead);
    const F weight = simd::exp2(simd::mul(simd::sub(simd::load(scores + i), top), factor));
    if constexpr (Cache::kWeightBytes == 4) {
      simd::store(reinterpret_cast<float*>(weights) + i, weight);
      sum = simd::add(sum, weight);
    } else {
      sum = simd::add(sum, simd::encode_weights(weight, weights, work.tile_slots, i));
    }
  }
  const float tile_maximum = raw * query_scale;
  const float before = work.maximum[row];
  const float maximum = tile_maximum > before ? tile_maximum : before;
  work.alpha[row] = before == maximum ? 1.0f : expf(before - maximum);
  work.beta[row] = tile_maximum == maximum ? 1.0f : expf(tile_maximum - maximum);
  work.maximum[row] = maximum;
  work.sum[row] = work.sum[row] * work.alpha[row] + work.beta[row] * simd::total(sum);
}

// o = o alpha + beta sum p v for the tile's rows.
template <class Cache>
void weigh_tile(const Problem& p, const Unit& unit, const Tile& tile, Work<Cache>& work) {
  using Element = typename Cache::Element;
  const Element* values = static_cast<const Element*>(p.values) + (unit.kv_head * p.slots + tile.slot) * p.dim;
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

// Slots `slot` (the start of a block) .. slot + slots - 1 against the rows that see some of them. Rows come in the order
// of their tokens, so these are consecutive.
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
  score_tile(p, unit, tile, work);
  plan_ahead(p, unit, slot, slots, work);
  tile.low = slots;
  for (int row = tile.first_row; row < tile.last_row; row++) {
    const Span span = visible(p, unit, segment, row);
    const int low = static_cast<int>(most(span.begin - slot, 0)), high = static_cast<int>(least(span.end - slot, slots));
    if (p.centre) add_centre(p, tile, row, work);
    soften_row(p, row, slots, low, high, work.query_scale[segment.pinned][row], work);
    tile.low = low < tile.low ? low : tile.low;
    tile.high = high > tile.high ? high : tile.high;
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

template <class Cache>
void write_output(const Problem& p, const Unit& unit, const Work<Cache>& work) {
  const float* v_scale = p.v_scale ? p.v_scale + int64_t{unit.kv_head} * p.dim : nullptr;
  for (int row = 0; row < unit.rows; row++) {
    const int64_t token = (unit.row + row) / p.group();
    const int64_t head = unit.kv_head * p.group() + (unit.row + row) % p.group();
    float* out = p.out + (token * p.heads + head) * p.dim;
    const float* values = work.values + int64_t{row} * p.dim;
    const float factor = work.finite[row] ? 1.0f / work.sum[row] : NAN;
    for (int d = 0; d < p.dim; d++) out[d] = values[d] * factor * (v_scale ? v_scale[d] : 1.0f);
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
  const int64_t slots = least(least(kTileScores / unit.rows, kMaxTileSlots), kMaxTileCodes / p.dim);
  work.tile_slots = static_cast<int>(slots / kBlock * kBlock);
  memset(work.values, 0, static_cast<size_t>(unit.rows) * p.dim * sizeof(float));
  for (int row = 0; row < unit.rows; row++) {
    work.maximum[row] = -INFINITY;
    work.sum[row] = 0;
    work.finite[row] = true;
  }
  bool ready[2] = {false, false};
  for (int i = 0; i < layout.count; i++) {
    const Segment& segment = layout.segments[i];
    if (segment.token >= unit.last || segment.token + segment.count <= unit.first) continue;
    if (!ready[segment.pinned]) {
      for (int row = 0; row < unit.rows; row++) prepare_query(p, unit, row, segment.pinned, work);
      ready[segment.pinned] = true;
    }
    attend_segment(p, unit, segment, work);
  }
  if (unit.partial) {
    write_partial(p, unit, work);
  } else {
    write_output(p, unit, work);
  }
}

}  // namespace

const Kernels* EDGEKV_KERNELS(CacheType type) {
  static const Kernels int8{simd::kName, append<Int8>, attend<Int8>};
  static const Kernels floats{simd::kName, append<Float>, attend<Float>};
  return type == CacheType::kInt8 ? &int8 : &floats;
}

}  // namespace edgekv
