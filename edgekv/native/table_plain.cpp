// The product with a table in plain C++.
#include "table.h"
#include "unroll.h"

#include "table.inl"

namespace edgekv {
namespace {

struct Plain {
  static constexpr int kLanes = 8, kRows = 4, kOutputs = 1;
  struct Floats {
    float at[kLanes];
  };
  struct Table {
    float at[16];
  };

  static Table read(const float* table) {
    Table copy;
    for (int i = 0; i < 16; i++) copy.at[i] = table[i];
    return copy;
  }
  static Table times(Table table, float factor) {
    for (float& each : table.at) each *= factor;
    return table;
  }
  static Floats zero() { return {}; }
  static Floats load(const float* x) { return {{x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]}}; }
  static void unpack(const Table& table, const uint8_t* codes, Floats& even, Floats& odd) {
    for (int i = 0; i < kLanes; i++) {
      even.at[i] = table.at[codes[i] >> 4];
      odd.at[i] = table.at[codes[i] & 0xF];
    }
  }
  static Floats add_product(Floats x, const Floats& y, const Floats& z) {
    for (int i = 0; i < kLanes; i++) x.at[i] = x.at[i] * y.at[i] + z.at[i];
    return x;
  }
  static float sum(const Floats& x) {
    float total = 0;
    for (float each : x.at) total += each;
    return total;
  }
};

constexpr TableKernels kKernels{"plain", Plain::kLanes, Plain::kRows, multiply_rows<Plain>};

}  // namespace

const TableKernels* plain_table() { return &kKernels; }

}  // namespace edgekv
