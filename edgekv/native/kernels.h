// What the operator computes, as plain data, and the table of functions that each instruction set provides.
//
// One call handles T new tokens of one layer. Rows are quantised and appended to the cache first, then every query row
// attends to what its token may see. A "row" is one query head of one token; the G = H / K heads that share a KV head
// lie side by side (row = token * G + head in the group), because they read the same keys and values.
//
// The cache of one KV head is a sequence of blocks of 16 slots, 16 * D numbers each, interleaved so that neither the
// scores nor the weighted sum needs a horizontal addition:
//
//     INT8    keys   [D / 4][16 slots][4 channels]      values  [4][D channels][4 slots]
//     K8V4    keys   as in INT8                         values  [4][D / 16][8 pairs of channels][4 slots]
//     INT4    keys   [D / 8][16 slots][4 pairs]         values  as in K8V4
//     float   keys   [D][16 slots]                      values  [16 slots][D]
//     FP8     the same, a byte a number
//
// In INT8 four channels (keys) or four slots (values) lie in one 32-bit word: what a dot-product instruction takes.
// Numbers of 4 bits do so, too: of 16 channels the first 8 lie in the lower halves of bytes, the others in the upper
// halves, of 8 words of values or of two of keys. No byte belongs to two slots, so rows are written without regard to
// each other.
// Behind a head's blocks come the factors of its rows, [slots], a bfloat16 each.
//
//     INT8    a value   v[d] = scale[d] * factor * code[d]
//             a key     k[d] = scale[d] / n * factor * (H code)[d]
//     K8V4    a value   v[d] = scale[d] / n * factor * (H (code + 1/2))[d],   code -8 .. 7 in two's complement
//     INT4    either    as a value of K8V4
//     FP8     either    scale[d] * the number of E4M3
//
// Where keys or values are held less a centre, these are what is left of them.
//
// The factor is the least that keeps every code of the row within 127 (or what 4 bits hold within 8): a row with small
// numbers is as finely divided as one with large ones, and none is clipped. The channels of a key are mixed by a
// Hadamard matrix H (H H = n I) before, because a few of them are much larger than the others and would leave these few
// codes. Queries are mixed alike, and scores do not change. Values have no such channels; those of 4 bits are mixed,
// because every bit counts there, and the output is mixed back. kv/rows.py says more.
#pragma once

#include <cstddef>
#include <cstdint>

#include "unroll.h"

// The innermost loops need every register for themselves: inlined into all that is around them, they keep accumulators
// on the stack. Where they begin decides 4 % of their speed, so they begin at a cache line.
#if defined(_MSC_VER)
#define EDGEKV_APART __declspec(noinline)
#else
#define EDGEKV_APART __attribute__((noinline, aligned(64)))
#endif

namespace edgekv {

constexpr int kBlock = 16;    // slots in a block
constexpr int kMaxDim = 256;  // head sizes are multiples of 16 up to this
constexpr int kMaxRows = 32;  // query rows that one unit of work handles
constexpr int kMaxTileSlots = 1024;  // slots of a tile: the integer sums of INT8 fit 32 bits up to here, or up to fewer
// Of what is described above and of the operator's inputs; 1 had no factors, 2 neither K8V4 nor FP8, 3 no value centre,
// 4 no INT4.
constexpr int kCacheFormat = 5;
constexpr int kFactorBytes = 2;  // of a row of codes
constexpr int kMaxTurned = kMaxDim / 2;  // pairs of channels whose centre is taken out of the keys

enum class CacheType { kFloat, kInt8, kK8V4, kFp8, kInt4 };
constexpr int kCacheTypes = 5;

struct Nibbles {  // the codes of two channels
  uint8_t bits;
  // Sixteen times each: what one shift and one mask leave.
  int8_t low() const { return static_cast<int8_t>(bits << 4); }
  int8_t high() const { return static_cast<int8_t>(bits & 0xF0); }
};

// How many items hold so many codes.
constexpr int64_t codes_in(const int8_t*, int64_t count) { return count; }
constexpr int64_t codes_in(const Nibbles*, int64_t count) { return count / 2; }

// How many groups of four channels of keys lie together.
constexpr int fours_of(const int8_t*) { return 1; }
constexpr int fours_of(const Nibbles*) { return 4; }

struct E4m3 {  // a sign, four bits of exponent, three of mantissa (Micikevicius et al., arXiv 2209.05433)
  uint8_t bits;
};

// Where the cache stands before the new tokens, in tokens; `before` counts the filled slots.
struct State {
  int64_t before;
  int64_t evicted;
  int64_t pinned;    // S
  int64_t capacity;  // C
  int64_t ring;      // slots of a layer that keeps the last tokens only, pinned or not; 0: a slot for each of C
};

struct Problem {
  CacheType type;
  int heads;     // H
  int kv_heads;  // K
  int dim;       // D
  float scale;   // of the scores, usually 1 / sqrt(D)
  float softcap;   // scores s become softcap tanh(s / softcap); 0: they stay
  int64_t window;  // a token sees this many, itself included, counted in the cache; 0: all before it
  int64_t tokens;
  int64_t slots;  // allocated: C rounded up to whole blocks
  State state;
  const float* qkv;  // [T, (H + 2 K) D]
  void* keys;        // [K, slots, D] in blocks, those of codes with the [slots] factors behind each head's
  void* values;      // the same
  const float* k_scale;     // [K, D]; null in float
  const float* v_scale;     // [K, D]; null in float
  int half;                 // R / 2 of the R <= D channels that are rotated; 0: none, and the angles may be null
  const float* cos;         // [T, R / 2] at each token's absolute position
  const float* sin;         // [T, R / 2]
  const float* cos_pinned;  // [T, R / 2] at that position less the evicted tokens
  const float* sin_pinned;  // [T, R / 2]
  // A constant that is taken out of the keys before they turn, and put back into the scores: q . R(n) centre, of the
  // key at position n. It is zero but for a few pairs of channels; null: nothing is taken out.
  const float* centre;   // [K, D]
  const int64_t* pairs;  // [P]: channels pairs[i] and pairs[i] + R / 2
  const float* turns;    // [2, P, slots]: cos and sin of those pairs at the angle of each slot's key
  int turned;            // P
  // INT4 has them as codes of a 127th instead, [slots, 2 P] as keys of INT8 lie: cos and sin of each pair in turn,
  // filled up to a multiple of 4 with zeros. What these codes make of the centre is taken out of turned keys and put
  // back.
  const int8_t* turn_codes;
  // What is taken out of the values and added to the output, because weights sum to 1; null: nothing.
  const float* v_centre;  // [K, D]
  float* out;            // [T, H D]

  int group() const { return heads / kv_heads; }  // G
  int64_t rows() const { return tokens * group(); }
  int64_t total() const { return state.before + tokens; }
  // The first of the cached tokens that the token at this place in the cache may see.
  int64_t oldest(int64_t token) const { return window && token >= window ? token - window + 1 : 0; }
  // How many codes a slot has in turn_codes.
  int turn_items() const { return (2 * turned + 3) / 4 * 4; }
  int64_t qkv_stride() const { return int64_t{heads + 2 * kv_heads} * dim; }
};

// A run of slots that hold consecutive tokens. Tokens are counted as the cache holds them, without the evicted ones.
struct Segment {
  int64_t token;
  int64_t slot;
  int64_t count;
  bool pinned;  // these keys are met by the query at its position less the evicted tokens
};

// The slots in the order of their tokens: pinned prefix, then the window, which may wrap round once. A layer with a
// ring of its own has no pinned prefix, and starts at the first token that any new one sees.
struct Layout {
  Segment segments[3];
  int count;
};

// A piece of work: some rows of one KV head over some tokens of the cache.
struct Unit {
  int kv_head;
  int64_t row;
  int rows;             // at most kMaxRows
  int64_t first, last;  // cached tokens
  float* partial;       // [rows, D + 2] for the maximum, the sum and the weighted values; null: write the output
};

struct Kernels {
  const char* name;
  void (*append)(const Problem&, int64_t first, int64_t last);  // new tokens first .. last - 1
  void (*attend)(const Problem&, const Layout&, const Unit&);
};

// How many neighbouring channels of a key are mixed, n: the largest power of two that divides D.
inline int mixed(int dim) { return dim & -dim; }

// The slot of a cached token (counted without the evicted ones).
inline int64_t slot_of(const State& s, int64_t token) {
  if (s.ring) return (token + s.evicted) % s.ring;
  if (s.evicted == 0 || token < s.pinned) return token;
  return s.pinned + (token - s.pinned + s.evicted) % (s.capacity - s.pinned);
}

// One per instruction set that this build has; the pointers are null where the build lacks it.
const Kernels* plain_kernels(CacheType);
const Kernels* avx2_kernels(CacheType);
const Kernels* avxvnni_kernels(CacheType);
const Kernels* avx512_kernels(CacheType);
const Kernels* neon_kernels(CacheType);

// The fastest that this processor runs. `limit` names one to stop at ("plain", "avx2", "avxvnni", "avx512", "neon"),
// for tests.
const Kernels* best_kernels(CacheType, const char* limit = nullptr);

}  // namespace edgekv
