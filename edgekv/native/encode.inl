// One row of inputs, normed where that is asked for, as bytes: what instruction sets share that round a block at a
// time. Included by each within its unnamed namespace, so that each compiles its own.
#include "norm.inl"

// Through `encode_block(x, count, factor, row, rows, codes, scale, offset)`; the last block is filled up with zeros.
void encode(const float* x, const Product& product, int row, const InputTile& tile) {
  const Packing& packing = product.packing;
  const int block = packing.block(), factor = packing.zeros || packing.minima ? 1 : 1 << (packing.bits - 1);
  const float norm = product.gain ? norm_factor(x, packing.inputs, product.epsilon) : 1.0f;
  for (int64_t i = 0; i < packing.blocks(); i++) {
    const int64_t first = i * block, left = packing.inputs - first;
    const int count = left < block ? static_cast<int>(left > 0 ? left : 0) : block;
    float own[32] = {};
    for (int j = 0; product.gain && j < count; j++) own[j] = x[first + j] * norm * product.gain[first + j];
    for (int j = 0; !product.gain && count < block && j < count; j++) own[j] = x[first + j];
    encode_block(product.gain || count < block ? own : x + first, block, factor, row, tile.rows,
                 tile.codes + first * tile.rows, tile.scales + i * tile.rows, tile.offsets + i * tile.rows);
    if (!packing.minima) continue;
    const int64_t place = i * tile.rows + row;
    tile.totals[place] = static_cast<float>(-tile.offsets[place]) * tile.scales[place];
    tile.offsets[place] = 0;
  }
}
