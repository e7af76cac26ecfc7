#include "attention.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "scratch.h"

namespace edgekv {
namespace {

Layout layout_of(const Problem& p) {
  const State& s = p.state;
  const int64_t total = p.total();
  if (s.evicted == 0 && !s.ring) return {{{0, 0, total, false}, {}, {}}, 1};
  Layout layout{};
  auto add = [&](int64_t token, int64_t slot, int64_t count, bool pinned) {
    if (count > 0) layout.segments[layout.count++] = {token, slot, count, pinned};
  };
  if (!s.ring) add(0, 0, std::min(s.pinned, total), true);
  const int64_t first = s.ring ? p.oldest(s.before) : s.pinned;
  const int64_t begin = s.ring ? 0 : s.pinned, end = s.ring ? s.ring : s.capacity;  // of the ring
  if (total > first) {
    const int64_t start = slot_of(s, first);
    const int64_t straight = std::min(total - first, end - start);
    add(first, start, straight, false);
    add(first + straight, begin, total - first - straight, false);
  }
  return layout;
}

// How the work is cut: rows in tiles, tokens in ranges. Few row tiles (decoding) are made up for by more ranges, so
// that any number of threads is busy until the end; many row tiles need no merging afterwards.
struct Cut {
  int tile_rows;
  int64_t row_tiles;
  int64_t ranges;
  int64_t first;  // cached token at which the first range begins
  int64_t range_tokens;

  int64_t units(const Problem& p) const { return p.kv_heads * row_tiles * ranges; }
};

constexpr int64_t kRangeBytes = 32 * 1024;  // of keys in INT8: below this a range is not worth its merging
constexpr int64_t kUnits = 64;              // enough for dynamic balance on as many threads as a small device has
constexpr int64_t kLargeUnits = 16;         // of many rows each, which every range makes integers of again
constexpr int kManyRows = 8;

Cut cut_of(const Problem& p) {
  Cut cut{};
  cut.row_tiles = (p.rows() + kMaxRows - 1) / kMaxRows;
  cut.tile_rows = static_cast<int>((p.rows() + cut.row_tiles - 1) / cut.row_tiles);
  const int64_t heads = p.kv_heads * cut.row_tiles;
  cut.first = p.oldest(p.state.before);
  const int64_t seen = p.total() - cut.first;
  const int64_t worthwhile = (seen * p.dim + kRangeBytes - 1) / kRangeBytes;
  const int64_t most = cut.tile_rows > kManyRows ? (kLargeUnits + heads - 1) / heads : kUnits / heads;
  cut.ranges = std::max<int64_t>(1, std::min(worthwhile, most));
  const int64_t even = (seen + cut.ranges - 1) / cut.ranges;
  cut.range_tokens = (even + kBlock - 1) / kBlock * kBlock;
  cut.ranges = (seen + cut.range_tokens - 1) / cut.range_tokens;
  return cut;
}

struct Job {
  const Problem& problem;
  const Kernels& kernels;
  Layout layout;
  Cut cut;
  float* partials;  // [units, tile_rows, D + 2], or null

  float* partial(int64_t unit) const { return partials + unit * cut.tile_rows * (problem.dim + 2); }
};

constexpr int64_t kAppendTokens = 16;  // per piece of parallel work

void append_piece(void* argument, size_t index) {
  const Job& job = *static_cast<Job*>(argument);
  const int64_t first = static_cast<int64_t>(index) * kAppendTokens;
  job.kernels.append(job.problem, first, std::min(first + kAppendTokens, job.problem.tokens));
}

void attend_unit(void* argument, size_t index) {
  const Job& job = *static_cast<Job*>(argument);
  const Problem& p = job.problem;
  const int64_t number = static_cast<int64_t>(index);
  const int64_t range = number % job.cut.ranges, tile = number / job.cut.ranges;
  Unit unit{};
  unit.kv_head = static_cast<int>(tile / job.cut.row_tiles);
  unit.row = tile % job.cut.row_tiles * job.cut.tile_rows;
  unit.rows = static_cast<int>(std::min<int64_t>(job.cut.tile_rows, p.rows() - unit.row));
  unit.first = job.cut.first + range * job.cut.range_tokens;
  unit.last = std::min(unit.first + job.cut.range_tokens, p.total());
  unit.partial = job.partials ? job.partial(number) : nullptr;
  job.kernels.attend(p, job.layout, unit);
}

// One row's output from its partial results: (maximum, sum, values) each, `stride` floats apart.
void merge_row(const Problem& p, const float* first, int64_t parts, int64_t stride, int64_t kv_head, float* out) {
  const float* v_scale = p.v_scale ? p.v_scale + kv_head * p.dim : nullptr;
  const float* v_centre = p.v_centre ? p.v_centre + kv_head * p.dim : nullptr;
  float maximum = first[0];
  for (int64_t i = 1; i < parts; i++) maximum = std::max(maximum, first[i * stride]);
  float sum = 0;
  std::fill(out, out + p.dim, 0.0f);
  for (int64_t i = 0; i < parts; i++) {
    const float* part = first + i * stride;
    if (part[1] == 0) continue;  // a row that may see nothing of this range
    const float weight = std::exp(part[0] - maximum);
    sum += weight * part[1];
    for (int d = 0; d < p.dim; d++) out[d] += weight * part[2 + d];
  }
  for (int d = 0; d < p.dim; d++) out[d] *= (v_scale ? v_scale[d] : 1.0f) / sum;
  for (int d = 0; v_centre && d < p.dim; d++) out[d] += v_centre[d];
}

void merge_head(void* argument, size_t index) {
  const Job& job = *static_cast<Job*>(argument);
  const Problem& p = job.problem;
  const int64_t kv_head = static_cast<int64_t>(index), unit_floats = int64_t{job.cut.tile_rows} * (p.dim + 2);
  for (int64_t row = 0; row < p.rows(); row++) {
    const int64_t tile = kv_head * job.cut.row_tiles + row / job.cut.tile_rows;
    const float* first = job.partial(tile * job.cut.ranges) + row % job.cut.tile_rows * (p.dim + 2);
    const int64_t head = kv_head * p.group() + row % p.group();
    float* out = p.out + (row / p.group() * p.heads + head) * p.dim;
    merge_row(p, first, job.cut.ranges, unit_floats, kv_head, out);
  }
}

// The rows' outputs from their partial results; a few rows are done before another thread has been called.
void merge(Job& job, const Parallel& parallel) {
  const size_t heads = static_cast<size_t>(job.problem.kv_heads);
  if (job.problem.rows() > kMaxRows) return parallel.run(parallel.context, merge_head, heads, &job);
  for (size_t kv_head = 0; kv_head < heads; kv_head++) merge_head(&job, kv_head);
}

}  // namespace

const char* fault(const Problem& p) {
  const State& s = p.state;
  if (p.heads < 1 || p.kv_heads < 1 || p.heads % p.kv_heads) return "num_heads is no multiple of kv_num_heads";
  if (p.dim < 16 || p.dim > kMaxDim || p.dim % 16) return "the head size is not a multiple of 16 up to 256";
  if (p.tokens < 1) return "there are no new tokens";
  if (p.slots < 1 || p.slots % kBlock) return "the cache is not a whole number of blocks of 16 slots";
  if (p.half < 0 || p.half > p.dim / 2) return "more channels are rotated than there are";
  if (p.window < 0) return "the window is negative";
  if (!(p.softcap >= 0)) return "the softcap is negative";
  if (s.ring < 0 || s.ring > p.slots || (s.ring && !p.window)) return "the ring does not fit the layer's cache";
  if (s.capacity < 1 || (!s.ring && s.capacity > p.slots)) return "the capacity does not fit the cache";
  if (s.before < 0 || s.before > s.capacity) return "the count of cached tokens is out of range";
  if (p.tokens > s.capacity - s.before) return "the new tokens do not fit the cache";
  if (s.evicted < 0 || s.evicted > int64_t{1} << 53) return "the count of evicted tokens is out of range";
  if (s.pinned < 0 || s.pinned >= s.capacity) return "the pinned prefix leaves no window";
  if (p.turned < 0 || p.turned > kMaxTurned || (p.centre && s.ring)) return "the centre does not fit the layer";
  if (p.centre && p.turned == 0) return "the centre has no pairs";
  for (int i = 0; i < p.turned; i++) {
    if (p.pairs[i] < 0 || p.pairs[i] >= p.half) return "the centre has a pair that is not rotated";
  }
  if (s.ring && p.total() - p.oldest(s.before) > s.ring) return "the new tokens do not fit the layer's ring";
  return nullptr;
}

void cached_attention(const Problem& problem, const Kernels& kernels, const Parallel& parallel) {
  Job job{problem, kernels, layout_of(problem), cut_of(problem), nullptr};
  if (problem.tokens <= kAppendTokens) {
    kernels.append(problem, 0, problem.tokens);
  } else {
    const size_t pieces = static_cast<size_t>((problem.tokens + kAppendTokens - 1) / kAppendTokens);
    parallel.run(parallel.context, append_piece, pieces, &job);
  }
  const size_t units = static_cast<size_t>(job.cut.units(problem));
  if (job.cut.ranges == 1) {
    parallel.run(parallel.context, attend_unit, units, &job);
    return;
  }
  Scratch scratch(units * static_cast<size_t>(job.cut.tile_rows * (problem.dim + 2)));
  job.partials = scratch.data();
  parallel.run(parallel.context, attend_unit, units, &job);
  merge(job, parallel);
}

}  // namespace edgekv
