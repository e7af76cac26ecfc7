#include "matmul.h"

#include <algorithm>
#include <cstring>

#include "choice.h"
#include "cpu.h"
#include "scratch.h"

namespace edgekv {
namespace {

constexpr int64_t kGroupRows = 36;          // at most: all are multiplied with a panel while a cache near by has it
constexpr int64_t kGroupTiles = 9;          // at most, of 4 rows
constexpr int64_t kPieceBytes = 32 * 1024;  // of weights times rows: less is not worth giving to another thread
constexpr int64_t kPieces = 32;             // enough for dynamic balance on as many threads as a small device has

int zero(const Packing& packing, const Unpacked& matrix, int64_t output, int64_t group) {
  if (!matrix.zeros) return 1 << (packing.bits - 1);
  if (matrix.bits == 8) return matrix.zeros[output * packing.groups() + group];
  const int64_t index = output * Packing::up(packing.groups(), 2) + group;
  return matrix.zeros[index / 2] >> index % 2 * 4 & 0xF;
}

// The nearest float16's bits of a number that is one.
uint16_t half_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000;
  const int32_t exponent = static_cast<int32_t>(bits >> 23 & 0xff) - 127;
  const uint32_t mantissa = (bits & 0x7fffff) | 0x800000;
  if (exponent >= -14) return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + (mantissa >> 13)));
  if (exponent < -24) return static_cast<uint16_t>(sign);
  return static_cast<uint16_t>(sign | mantissa >> (-1 - exponent));
}

// Scales or minima.
void pack_floats(const Packing& packing, const float* floats, int64_t first, uint8_t* out) {
  for (int64_t group = 0; group < packing.groups(); group++) {
    for (int64_t i = 0; i < kPanel; i++) {
      const int64_t output = first + i, place = group * kPanel + i;
      const float value = output < packing.outputs ? floats[output * packing.groups() + group] : 0.0f;
      const uint16_t bits = half_bits(value);
      if (packing.half) std::memcpy(out + 2 * place, &bits, sizeof bits);
      if (!packing.half) std::memcpy(out + 4 * place, &value, sizeof value);
    }
  }
}

void pack_zeros(const Packing& packing, const Unpacked& matrix, int64_t first, uint8_t* out) {
  for (int64_t group = 0; group < packing.groups(); group++) {
    for (int64_t i = 0; i < kPanel && first + i < packing.outputs; i++) {
      out[group * kPanel + i] = static_cast<uint8_t>(zero(packing, matrix, first + i, group));
    }
  }
}

// Four nibbles, a byte each.
uint32_t spread(uint32_t nibbles) {
  const uint32_t pairs = (nibbles | nibbles << 8) & 0x00ff00ff;
  return (pairs | pairs << 4) & 0x0f0f0f0f;
}

// Codes of four inputs, a byte each; `place` counts inputs.
uint32_t four_codes(const Unpacked& matrix, const uint8_t* row, int64_t place) {
  if (matrix.bits == 4) {
    uint16_t nibbles;
    std::memcpy(&nibbles, row + place / 2, sizeof nibbles);
    return spread(nibbles);
  }
  uint32_t word;
  std::memcpy(&word, row + place, sizeof word);
  return word - 0x01010101u * static_cast<uint32_t>(matrix.base);
}

void put(uint8_t* place, uint32_t word) { std::memcpy(place, &word, sizeof word); }

// Codes of one block and one output, as many steps as there are: a multiple of four. `High` bits lie apart.
template <int High>
void pack_block(const Unpacked& matrix, const uint8_t* row, int64_t first, int steps, uint8_t* out, uint8_t* lines) {
  constexpr uint32_t kLow = 0x0f0f0f0f;
  uint32_t high = 0;
  for (int step = 0; step < steps; step += 2) {
    const uint32_t one = four_codes(matrix, row, first + 4 * step);
    const uint32_t next = four_codes(matrix, row, first + 4 * step + 4);
    put(out + step * 2 * kPanel, (one & kLow) | (next & kLow) << 4);
    if (!High) continue;
    const int place = step * High % 8;
    high = (place ? high : 0) | (one >> 4 & kLow) << place | (next >> 4 & kLow) << (place + High);
    put(lines + step * High / 8 * 4 * kPanel, high);
  }
}

// Block by block, so that a panel is written from end to end. What lies beyond K in the last group is copied too: the
// inputs are zero there.
void pack_codes(const Packing& packing, const Unpacked& matrix, int64_t first, uint8_t* out) {
  const int64_t columns = packing.groups() * packing.group, last = std::min(packing.padded(), columns);
  const int64_t outputs = std::min<int64_t>(kPanel, packing.outputs - first), row_bytes = columns * matrix.bits / 8;
  const int block = packing.block(), high = packing.high_bits();
  const auto pack_one = high == 2 ? pack_block<2> : high == 1 ? pack_block<1> : pack_block<0>;
  for (int64_t input = 0; input < last; input += block, out += block * kPanel * packing.bits / 8) {
    const int steps = static_cast<int>(std::min<int64_t>(block, last - input) / 4);
    for (int64_t i = 0; i < outputs; i++) {
      const uint8_t* row = matrix.codes + (first + i) * row_bytes;
      if (packing.bits < 8) pack_one(matrix, row, input, steps, out + 4 * i, out + block * kPanel / 2 + 4 * i);
      for (int step = 0; packing.bits == 8 && step < steps; step++) {
        put(out + step * 4 * kPanel + 4 * i, four_codes(matrix, row, input + 4 * step));
      }
    }
  }
}

// The rows as bytes, cut into tiles.
class Inputs {
 public:
  Inputs(const Product& product, const MatMulKernels& kernels, void* memory)
      : packing_(product.packing), sizes_(kernels.sizes), codes_(static_cast<int8_t*>(memory)) {
    const int64_t rows = stored(product);
    scales_ = reinterpret_cast<float*>(codes_ + rows * packing_.padded());
    offsets_ = reinterpret_cast<int32_t*>(scales_ + rows * packing_.blocks());
    totals_ = packing_.minima ? reinterpret_cast<float*>(offsets_ + rows * packing_.blocks()) : nullptr;
  }
  static size_t floats(const Product& product) {
    const Packing& packing = product.packing;
    return static_cast<size_t>(stored(product) * (packing.padded() / 4 + (packing.minima ? 3 : 2) * packing.blocks()));
  }
  // The tile that begins with this row, of a group of rows that ends before `last`. A group's tiles have nearly as many
  // rows each, since a tile of few takes nearly as long as one of half the most; only the last is filled up.
  InputTile tile(int64_t row, int64_t last, bool first) const {
    const int64_t left = last - row, tiles = (left + sizes_[0] - 1) / sizes_[0], even = (left + tiles - 1) / tiles;
    const int* size = sizes_;
    while (*size > even && size[1] >= even) size++;
    const int64_t place = row * packing_.blocks();
    return {row, *size, static_cast<int>(std::min<int64_t>(*size, left)), first, codes_ + row * packing_.padded(),
            scales_ + place, offsets_ + place, totals_ ? totals_ + place : nullptr};
  }

 private:
  // Rows, and those that fill the last tile up.
  static int64_t stored(const Product& product) { return Packing::up(product.rows, kTileRows); }

  const Packing& packing_;
  const int* sizes_;
  int8_t* codes_;
  float* scales_;
  int32_t* offsets_;
  float* totals_;  // null where there are no minima
};

struct Job {
  const Product& product;
  const MatMulKernels& kernels;
  const Inputs& inputs;
  int64_t groups;        // of rows, each times a range of panels a piece
  int64_t group_rows;    // in each but the last
  int64_t group_tiles;   // at most
  int64_t ranges;        // of panels
  int64_t range_panels;  // in each, or pairs of panels
};

// A group of rows in tiles.
struct Group {
  int count = 0;
  InputTile tiles[kGroupTiles];

  Group(const Job& job, int64_t index) {
    const int64_t first = index * job.group_rows, last = std::min(first + job.group_rows, job.product.rows);
    for (int64_t row = first; row < last; row += tiles[count++].used) {
      tiles[count] = job.inputs.tile(row, last, row == first);
    }
  }
};

// Rows that fill the tile up are zero.
void encode_tile(const Job& job, const InputTile& tile) {
  const Product& p = job.product;
  for (int r = 0; r < tile.used; r++) job.kernels.encode(p.x + (tile.row + r) * p.packing.inputs, p, r, tile);
  for (int64_t i = 0; i < p.packing.blocks(); i++) {
    for (int r = tile.used; r < tile.rows; r++) {
      tile.scales[i * tile.rows + r] = 0;
      if (tile.totals) tile.totals[i * tile.rows + r] = 0;
    }
  }
}

void encode_piece(void* argument, size_t index) {
  const Job& job = *static_cast<Job*>(argument);
  const Group group(job, static_cast<int64_t>(index) / job.group_tiles);
  const int64_t tile = static_cast<int64_t>(index) % job.group_tiles;
  if (tile < group.count) encode_tile(job, group.tiles[tile]);
}

// One tile times a pair of panels: act(first) * second.
void multiply_gated(const Job& job, int64_t pair, const InputTile& tile) {
  const Product& p = job.product;
  const int64_t bytes = p.packing.panel_bytes();
  float gates[kTileRows * kPanel], ups[kTileRows * kPanel];
  job.kernels.multiply(p.packing, p.weights + 2 * pair * bytes, tile, {}, gates, kPanel);
  job.kernels.multiply(p.packing, p.weights + (2 * pair + 1) * bytes, tile, {}, ups, kPanel);
  for (int r = 0; r < tile.used; r++) {
    float* out = p.out + (tile.row + r) * p.width() + pair * kPanel;
    job.kernels.combine(p.gate, gates + r * kPanel, ups + r * kPanel, out);
  }
}

// The last outputs, fewer than a panel has: what lies beyond them is kept apart.
void multiply_part(const Job& job, const uint8_t* weights, const InputTile& tile, const Addends& added, int64_t count,
                   float* out) {
  const int64_t stride = job.product.packing.outputs;
  float sums[kTileRows * kPanel], residual[kTileRows * kPanel] = {}, bias[kPanel] = {};
  if (added.bias) std::copy_n(added.bias, count, bias);
  for (int r = 0; added.residual && r < tile.used; r++) {
    std::copy_n(added.residual + r * stride, count, residual + r * kPanel);
  }
  job.kernels.multiply(job.product.packing, weights, tile, {bias, residual}, sums, kPanel);
  for (int r = 0; r < tile.used; r++) std::copy_n(sums + r * kPanel, count, out + r * stride);
}

// One tile times one panel.
void multiply_one(const Job& job, int64_t panel, const InputTile& tile) {
  const Product& p = job.product;
  const int64_t first = panel * kPanel, stride = p.packing.outputs, place = tile.row * stride + first;
  const uint8_t* weights = p.weights + panel * p.packing.panel_bytes();
  const Addends added{p.bias ? p.bias + first : nullptr, p.residual ? p.residual + place : nullptr};
  if (stride - first >= kPanel) {
    job.kernels.multiply(p.packing, weights, tile, added, p.out + place, stride);
  } else {
    multiply_part(job, weights, tile, added, stride - first, p.out + place);
  }
}

// Panels, or pairs of them.
int64_t panels(const Product& p) { return p.packing.panels() / (p.gate == Gate::kNone ? 1 : 2); }

// A group of rows times a range of panels.
void multiply_piece(void* argument, size_t index) {
  const Job& job = *static_cast<Job*>(argument);
  const int64_t number = static_cast<int64_t>(index), first = number % job.ranges * job.range_panels;
  const int64_t last = std::min(first + job.range_panels, panels(job.product));
  const Group group(job, number / job.ranges);
  const auto one = job.product.gate == Gate::kNone ? multiply_one : multiply_gated;
  for (int64_t panel = first; panel < last; panel++) {
    for (int i = 0; i < group.count; i++) one(job, panel, group.tiles[i]);
  }
}

int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

Job make_job(const Product& p, const MatMulKernels& kernels, const Inputs& inputs) {
  const int64_t groups = parts(p.rows, kGroupRows), count = panels(p);
  const int64_t group_rows = groups == 1 ? p.rows : Packing::up(parts(p.rows, groups), kTileRows);
  const int64_t worthwhile = group_rows * p.packing.bytes() / kPieceBytes + 1;
  const int64_t wanted = std::min({worthwhile, parts(kPieces, groups), count}), range_panels = parts(count, wanted);
  return {p, kernels, inputs, parts(p.rows, group_rows), group_rows, parts(group_rows, kernels.sizes[0]),
          parts(count, range_panels), range_panels};
}

constexpr Choice<const MatMulKernels* (*)()> kChoices[] = {
    {"avx512", has_avx512, avx512_matmul},
    {"avxvnni", has_avxvnni, avxvnni_matmul},
    {"avx2", has_avx2, avx2_matmul},
};

}  // namespace

const MatMulKernels* best_matmul(const char* limit) {
  const auto* kernels = first_choice(kChoices, limit);
  return kernels ? kernels : plain_matmul();
}

const char* fault(const Packing& p) {
  if (p.outputs < 1 || p.inputs < 1) return "a matrix has no rows or no columns";
  if (p.outputs > int64_t{1} << 31 || p.inputs > int64_t{1} << 31) return "a matrix is too large";
  if (p.bits < 4 || p.bits == 7 || p.bits > 8) return "codes have none of 4, 5, 6 and 8 bits";
  if (p.group < 16 || p.group > 1 << 20 || (p.group & (p.group - 1))) return "the group is no power of two from 16 on";
  if (p.bits == 5 && p.block() < 32) return "codes of 5 bits are in groups of 16";
  if (p.zeros && p.minima) return "there are zero points and minima";
  return nullptr;
}

void pack(const Packing& packing, const Unpacked& matrix, int64_t first, int64_t last, int64_t step, uint8_t* out) {
  const int64_t bytes = packing.panel_bytes();
  for (int64_t panel = first; panel < last; panel++) {
    uint8_t* place = out + panel * step * bytes;
    std::memset(place, 0, static_cast<size_t>(bytes));
    pack_floats(packing, matrix.scales, panel * kPanel, place);
    if (packing.zeros) pack_zeros(packing, matrix, panel * kPanel, place + packing.scale_bytes());
    if (packing.minima) pack_floats(packing, matrix.minima, panel * kPanel, place + packing.minima_place());
    pack_codes(packing, matrix, panel * kPanel, place + packing.codes_place());
  }
}

void multiply(const Product& product, const MatMulKernels& kernels, const Parallel& parallel) {
  Scratch scratch(Inputs::floats(product));
  const Inputs inputs(product, kernels, scratch.data());
  Job job = make_job(product, kernels, inputs);
  const auto run = [&](void (*body)(void*, size_t), int64_t count) {
    if (count == 1) return body(&job, 0);
    parallel.run(parallel.context, body, static_cast<size_t>(count), &job);
  };
  run(encode_piece, job.groups * job.group_tiles);
  run(multiply_piece, job.groups * job.ranges);
}

}  // namespace edgekv
