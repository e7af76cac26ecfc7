// The product with a table: inputs put in order, and the work divided among the threads.
#include "table.h"

#include <algorithm>

#include "choice.h"
#include "cpu.h"
#include "scratch.h"

namespace edgekv {
namespace {

constexpr int64_t kPieceWeights = int64_t{1} << 16;  // of one piece of work, at least: some ten microseconds
constexpr int64_t kPieces = 16;                      // a product is divided into no more
constexpr int64_t kInputRows = 16;                   // rows whose inputs one thread puts in order at a time

struct Job {
  const TableProduct& product;
  const TableKernels& kernels;
  float* inputs;  // [T, K], in the order that the kernels want
  int64_t piece;  // outputs of a piece of work
};

void order_inputs(const Job& job, int64_t row) {
  const int64_t columns = job.product.inputs, lanes = job.kernels.lanes;
  const float* from = job.product.x + row * columns;
  float* to = job.inputs + row * columns;
  for (int64_t k = 0; k < columns; k += 2 * lanes) {
    for (int64_t i = 0; i < lanes; i++) {
      to[k + i] = from[k + 2 * i];
      to[k + lanes + i] = from[k + 2 * i + 1];
    }
  }
}

void order_piece(void* argument, size_t index) {
  const Job& job = *static_cast<const Job*>(argument);
  const int64_t first = static_cast<int64_t>(index) * kInputRows;
  for (int64_t row = first; row < std::min(first + kInputRows, job.product.rows); row++) order_inputs(job, row);
}

void multiply_piece(void* argument, size_t index) {
  const Job& job = *static_cast<const Job*>(argument);
  const TableProduct& p = job.product;
  const int64_t first = static_cast<int64_t>(index) * job.piece, last = std::min(first + job.piece, p.outputs);
  for (int64_t row = 0; row < p.rows; row += job.kernels.tile_rows) {
    const int rows = static_cast<int>(std::min<int64_t>(job.kernels.tile_rows, p.rows - row));
    job.kernels.multiply(p, job.inputs + row * p.inputs, rows, first, last, p.out + row * p.outputs);
  }
}

void run(const Parallel& parallel, void (*body)(void*, size_t), int64_t count, Job& job) {
  if (count == 1) return body(&job, 0);
  parallel.run(parallel.context, body, static_cast<size_t>(count), &job);
}

constexpr Choice<const TableKernels* (*)()> kChoices[] = {
    {"avx512", has_avx512, avx512_table},
    {"avx2", has_avx2, avx2_table},
};

}  // namespace

const TableKernels* best_table(const char* limit) {
  const auto* kernels = first_choice(kChoices, limit);
  return kernels ? kernels : plain_table();
}

const char* fault(const TableProduct& p) {
  if (p.outputs < 1 || p.inputs < 1) return "a matrix has no rows or no columns";
  if (p.outputs > int64_t{1} << 31 || p.inputs > int64_t{1} << 31) return "a matrix is too large";
  if (p.block < 32 || p.block % 32 || p.inputs % p.block) {
    return "the block is no multiple of 32 that divides the inputs";
  }
  return nullptr;
}

void multiply(const TableProduct& product, const TableKernels& kernels, const Parallel& parallel) {
  Scratch scratch(static_cast<size_t>(product.rows * product.inputs));
  const int64_t least = std::max((kPieceWeights + product.inputs - 1) / product.inputs, int64_t{4});
  const int64_t even = (product.outputs + kPieces - 1) / kPieces;
  Job job{product, kernels, scratch.data(), (std::max(least, even) + 3) / 4 * 4};
  run(parallel, order_piece, (product.rows + kInputRows - 1) / kInputRows, job);
  run(parallel, multiply_piece, (product.outputs + job.piece - 1) / job.piece, job);
}

}  // namespace edgekv
