// A product with weights that are codes into a table of 16 numbers, y = x W': what bitsandbytes calls NF4 and FP4.
//
// w = table[code] * absmax, with one absmax for every `block` inputs of an output. The sums are of float32 numbers, as
// exact as those of a product with the unpacked matrix; the codes are unpacked in registers, so that they are read once
// and never written.
//
// Codes lie as bitsandbytes stores them: output after output, two in a byte, the even input in the high nibble.
#pragma once

#include <cstddef>
#include <cstdint>

#include "parallel.h"

namespace edgekv {

struct TableProduct {
  int64_t outputs;  // N
  int64_t inputs;   // K
  int64_t block;    // divides K
  const uint8_t* codes;  // [N, K / 2]
  const float* absmax;   // [N, K / block]
  const float* table;    // [16]
  int64_t rows;          // T
  const float* x;        // [T, K]
  float* out;            // [T, N]
};

struct TableKernels {
  const char* name;
  int lanes;  // L: inputs are given as L even ones, then the L odd ones between them; 2 L divides `block`
  int tile_rows;  // rows that share what was unpacked, at most
  // Outputs first .. last - 1 of `rows` rows, whose inputs [rows, K] are in that order; out is that of the first of
  // them.
  void (*multiply)(const TableProduct&, const float* x, int rows, int64_t first, int64_t last, float* out);
};

// Why the problem is not one that can be computed; null if it is.
const char* fault(const TableProduct&);

// Computes the product.
void multiply(const TableProduct&, const TableKernels&, const Parallel&);

// One per instruction set that this build has; null where the build lacks it.
const TableKernels* plain_table();
const TableKernels* avx2_table();
const TableKernels* avx512_table();

// The fastest that this processor runs. `limit` as in best_kernels.
const TableKernels* best_table(const char* limit = nullptr);

}  // namespace edgekv
