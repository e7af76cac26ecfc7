// The kernel of table.h, for vectors of V::kLanes numbers. Included once by each file that defines a V.

namespace edgekv {
namespace {

// C outputs of R rows: all of them share the inputs and the unpacked weights.
template <class V, int R, int C>
void multiply_tile(const TableProduct& p, const typename V::Table& table, const float* x, int64_t output, float* out) {
  constexpr int kStep = 2 * V::kLanes;
  const int64_t blocks = p.inputs / p.block;
  const uint8_t* codes = p.codes + output * p.inputs / 2;
  typename V::Floats sums[R][C];
  EDGEKV_UNROLL
  for (int i = 0; i < R * C; i++) sums[i / C][i % C] = V::zero();
  for (int64_t block = 0; block < blocks; block++) {
    typename V::Table weights[C];  // the table times absmax
    EDGEKV_UNROLL
    for (int c = 0; c < C; c++) weights[c] = V::times(table, p.absmax[(output + c) * blocks + block]);
    for (int64_t k = block * p.block; k < (block + 1) * p.block; k += kStep) {
      EDGEKV_UNROLL
      for (int c = 0; c < C; c++) {
        typename V::Floats even, odd;
        V::unpack(weights[c], codes + (c * p.inputs + k) / 2, even, odd);
        EDGEKV_UNROLL
        for (int r = 0; r < R; r++) {
          const float* inputs = x + r * p.inputs + k;
          sums[r][c] = V::add_product(even, V::load(inputs), sums[r][c]);
          sums[r][c] = V::add_product(odd, V::load(inputs + V::kLanes), sums[r][c]);
        }
      }
    }
  }
  EDGEKV_UNROLL
  for (int i = 0; i < R * C; i++) out[i / C * p.outputs + output + i % C] = V::sum(sums[i / C][i % C]);
}

template <class V, int R, int C>
void multiply_outputs(const TableProduct& p, const float* x, int64_t first, int64_t last, float* out) {
  const typename V::Table table = V::read(p.table);
  for (; first + C <= last; first += C) multiply_tile<V, R, C>(p, table, x, first, out);
  for (; first < last; first++) multiply_tile<V, R, 1>(p, table, x, first, out);
}

// Few rows take several outputs at a time, so that there are enough sums that do not wait for one another.
template <class V>
void multiply_rows(const TableProduct& p, const float* x, int rows, int64_t first, int64_t last, float* out) {
  while (rows > 0) {
    const int now = rows >= V::kRows ? V::kRows : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
    if (now == V::kRows) {
      multiply_outputs<V, V::kRows, V::kOutputs>(p, x, first, last, out);
    } else if (now == 4) {
      multiply_outputs<V, 4, V::kOutputs>(p, x, first, last, out);
    } else if (now == 2) {
      multiply_outputs<V, 2, 2>(p, x, first, last, out);
    } else {
      multiply_outputs<V, 1, 4>(p, x, first, last, out);
    }
    rows -= now;
    x += now * p.inputs;
    out += now * p.outputs;
  }
}

}  // namespace
}  // namespace edgekv
