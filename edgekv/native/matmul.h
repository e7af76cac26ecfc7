// A product with weights of 4, 5, 6 or 8 bits, y = norm(x) W' + bias + residual, as plain data, and the table of
// functions that each instruction set provides.
//
// The weights are unsigned codes c with a scale s, and a zero point z, for every `group` inputs of an output:
// w = s (c - z); or, where no integer is a zero point, with a minimum m: w = s c + m. Inputs are rounded to signed
// bytes with a scale for every block of 32 (16 where groups are of 16), as ONNX Runtime's MatMulNBits does at accuracy
// level 4, so that all products are of bytes.
//
// A matrix is packed once into panels of 16 outputs, one after another, because one panel is then one stream of memory:
//
//     scales  [groups][16]           float16 where all of them, and all minima, are float16 numbers, else float32
//     zeros   [groups][16] bytes     only where they are not all 2^(bits - 1)
//     minima  [groups][16]           as the scales; only where the weights have them
//     codes   [K / 4][16][4 inputs]  8 bits
//             [blocks] of            4, 5 and 6 bits
//                 [steps / 2][16][4 inputs, 2 steps a byte]  the low four bits; low nibbles are of the first step
//                 [lines][16][4 inputs, 8 bits]              the bits above: a line has those of 8 steps (5 bits) or of
//                                                            4 (6 bits), the first step's lowest
//
// A step is four inputs. So a block of 32 inputs is 4, 5 or 6 lines of 64 bytes, and what a vector of 64 codes lacks
// comes from one line by a shift. Groups of 16 have no codes of 5 bits: a line would belong to two blocks.
//
// Each part begins at a multiple of 64 bytes; K is rounded up to a multiple of 32. Four inputs lie in one 32-bit word:
// what a dot-product instruction takes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "parallel.h"

namespace edgekv {

constexpr int kPanel = 16;     // outputs in a panel
constexpr int kTileRows = 12;  // rows that one pass over a panel handles at most; a multiple of every kernel's own most
constexpr int kTileSizes = 7;
constexpr int64_t kLine = 64;  // bytes that the parts of a panel are aligned to

// What the loader and this library must agree on: the two structures that follow, and the operators that read what is
// packed.
constexpr int kPackingFormat = 3;

// How one matrix is packed.
struct Packing {
  int64_t outputs;  // N
  int64_t inputs;   // K
  int bits;         // 4, 5, 6 or 8
  int64_t group;    // inputs that share a scale: a power of two, at least 16
  bool zeros;       // zero points are stored
  bool half;        // scales are float16, and so are minima
  bool minima = false;  // are stored; then there are no zero points

  static int64_t up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
  int block() const { return group < 32 ? 16 : 32; }
  int high_bits() const { return bits == 8 ? 0 : bits - 4; }  // that lie apart
  int64_t padded() const { return up(inputs, 32); }
  int64_t blocks() const { return padded() / block(); }
  int64_t groups() const { return (inputs + group - 1) / group; }
  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t packed_groups() const { return (padded() + group - 1) / group; }  // one more may lie beyond K
  int64_t scale_bytes() const { return up(packed_groups() * kPanel * (half ? 2 : 4), kLine); }
  int64_t minimum_bytes() const { return minima ? scale_bytes() : 0; }
  int64_t zero_bytes() const { return zeros ? up(packed_groups() * kPanel, kLine) : 0; }
  int64_t code_bytes() const { return padded() * kPanel * bits / 8; }
  int64_t minima_place() const { return scale_bytes() + zero_bytes(); }
  int64_t codes_place() const { return minima_place() + minimum_bytes(); }
  int64_t panel_bytes() const { return codes_place() + code_bytes(); }
  int64_t bytes() const { return panels() * panel_bytes(); }
};

// A matrix as MatMulNBits takes it, in 4 or 8 bits, and with minima.
struct Unpacked {
  const uint8_t* codes;  // [N, groups, group * bits / 8], low nibble first
  const float* scales;   // [N, groups]
  const uint8_t* zeros;  // [N, groups], in 4 bits two a byte with rows padded to whole bytes; null: all are the middle
  const float* minima;   // [N, groups], or null
  int bits;
  int base;              // what is taken from codes of 8 bits that are to be packed in fewer
};

enum class Gate { kNone, kSilu, kGelu };

struct Product {
  Packing packing;
  const uint8_t* weights;  // `packing.bytes()` of them, from a multiple of 64 bytes on
  int64_t rows;            // T
  const float* x;          // [T, K]
  const float* bias;       // [N] or null
  const float* residual;   // [T, N] or null
  const float* gain;       // [K]: x is first brought to a root mean square of 1, and multiplied by this; or null
  float epsilon;           // added to the mean square
  Gate gate;               // not kNone: panels are in pairs, and act(first) * second is the output, [T, N / 2]
  float* out;              // [T, N]

  int64_t width() const { return gate == Gate::kNone ? packing.outputs : packing.outputs / 2; }
};

// Some rows of inputs as bytes.
struct InputTile {
  int64_t row;       // the first of them
  int rows;          // one of the kernels' sizes
  int used;          // of which there are so many; the rest fill the tile up, and nothing is written for them
  bool first;        // of those that a panel is multiplied with: weights are asked for ahead
  int8_t* codes;     // [K / 4][rows][4 inputs]
  float* scales;     // [blocks][rows]
  int32_t* offsets;  // [blocks][rows]: the codes' sum times -2^(bits - 1), or times -1 where there are zero points
  float* totals;     // [blocks][rows]: the codes' sum times the scale; only where there are minima, and no offsets then
};

// What is added to the sums of a panel; either may be null.
struct Addends {
  const float* bias;      // [16]
  const float* residual;  // [rows, 16], rows as far apart as those of the output
};

struct MatMulKernels {
  const char* name;
  int sizes[kTileSizes];  // that tiles may have in rows, the largest first and 1 last
  // One row of K floats, normed where there is a gain, into its place in a tile.
  void (*encode)(const float* x, const Product&, int row, const InputTile&);
  // The tile times one panel: [rows, 16] sums, rows `stride` floats apart.
  void (*multiply)(const Packing&, const uint8_t* panel, const InputTile&, const Addends&, float* out, int64_t stride);
  // act(gate) * up, of a panel's outputs in one row.
  void (*combine)(Gate, const float* gate, const float* up, float* out);
};

// Why the problem is not one that can be computed; null if it is.
const char* fault(const Packing&);

// Packs the panels first .. last - 1 of a matrix, whose panels lie `step` panels apart from `out` on.
void pack(const Packing&, const Unpacked&, int64_t first, int64_t last, int64_t step, uint8_t* out);

// The weights of one output, [K]: s (c - z) or s c + m, of a matrix that `pack` packed.
void unpack(const Packing&, const uint8_t* weights, int64_t output, float* out);

// Computes the product.
void multiply(const Product&, const MatMulKernels&, const Parallel&);

// One per instruction set that this build has; null where the build lacks it.
const MatMulKernels* plain_matmul();
const MatMulKernels* avx2_matmul();
const MatMulKernels* avxvnni_matmul();
const MatMulKernels* avx512_matmul();

// The fastest that this processor runs. `limit` as in best_kernels.
const MatMulKernels* best_matmul(const char* limit = nullptr);

}  // namespace edgekv
