// The product in plain C++: the twin that the others are measured against, and what runs where nothing faster is built.
// What reads single weights is here, too.
#include <algorithm>
#include <math.h>

#include <cmath>
#include <cstring>

#include "matmul.h"

namespace edgekv {
namespace {

float half_number(const uint8_t* place) {
  uint16_t bits;
  std::memcpy(&bits, place, sizeof bits);
  const int exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
  const float size = exponent ? std::ldexp(static_cast<float>(mantissa | 0x400), exponent - 25)
                              : std::ldexp(static_cast<float>(mantissa), -24);
  return bits & 0x8000 ? -size : size;
}

// Of scales or minima.
float float_of(const Packing& packing, const uint8_t* floats, int64_t index) {
  if (packing.half) return half_number(floats + 2 * index);
  float value;
  std::memcpy(&value, floats + 4 * index, sizeof value);
  return value;
}

// Of an input within its block.
int code_of(const Packing& packing, const uint8_t* block, int64_t input, int output) {
  const int64_t step = input / 4, place = output * 4 + input % 4;
  const int high = packing.high_bits(), mask = (1 << high) - 1;
  if (packing.bits == 8) return block[step * 4 * kPanel + place];
  const int low = block[step / 2 * 4 * kPanel + place] >> step % 2 * 4 & 0xF;
  const uint8_t* lines = block + packing.block() * kPanel / 2;
  return high ? low | (lines[step * high / 8 * 4 * kPanel + place] >> step * high % 8 & mask) << 4 : low;
}

// Weights of one block of inputs, `count` of them, and one output of a panel.
void unpack_block(const Packing& packing, const uint8_t* panel, int64_t first, int64_t count, int output, float* out) {
  const uint8_t* block = panel + packing.codes_place() + first * kPanel * packing.bits / 8;
  const uint8_t *zeros = panel + packing.scale_bytes(), *minima = panel + packing.minima_place();
  const int64_t place = first / packing.group * kPanel + output;
  const float scale = float_of(packing, panel, place), low = packing.minima ? float_of(packing, minima, place) : 0.0f;
  const int zero = packing.minima ? 0 : packing.zeros ? zeros[place] : 1 << (packing.bits - 1);
  for (int64_t i = 0; i < count; i++) out[i] = scale * static_cast<float>(code_of(packing, block, i, output) - zero);
  for (int64_t i = 0; packing.minima && i < count; i++) out[i] += low;
}

float multiply_one(const Packing& packing, const uint8_t* panel, const InputTile& tile, int row, int output) {
  const uint8_t* zeros = panel + packing.scale_bytes();
  const uint8_t *minima = panel + packing.minima_place(), *codes = panel + packing.codes_place();
  float sum = 0;
  for (int64_t block = 0; block < packing.blocks(); block++) {
    const int64_t first = block * packing.block(), group = first / packing.group;
    const int64_t at = block * tile.rows + row, place = group * kPanel + output;
    int32_t dot = tile.offsets[at];
    if (packing.zeros) dot *= zeros[place];
    for (int64_t i = 0; i < packing.block(); i++) {
      const int x = tile.codes[((first + i) / 4 * tile.rows + row) * 4 + i % 4];
      dot += x * code_of(packing, codes + first * kPanel * packing.bits / 8, i, output);
    }
    sum += static_cast<float>(dot) * (float_of(packing, panel, place) * tile.scales[at]);
    if (packing.minima) sum += float_of(packing, minima, place) * tile.totals[at];
  }
  return sum;
}

void multiply_panel(const Packing& packing, const uint8_t* panel, const InputTile& tile, const Addends& added,
                    float* out, int64_t stride) {
  for (int row = 0; row < tile.used; row++) {
    for (int i = 0; i < kPanel; i++) {
      const int64_t at = row * stride + i;
      const float sum = multiply_one(packing, panel, tile, row, i) + (added.bias ? added.bias[i] : 0.0f);
      out[at] = sum + (added.residual ? added.residual[at] : 0.0f);
    }
  }
}

void encode_block(const float* x, int count, int factor, int row, int rows, int8_t* codes, float* scale,
                  int32_t* offset) {
  float limit = 0;
  for (int i = 0; i < count; i++) limit = std::fabs(x[i]) <= limit ? limit : std::fabs(x[i]);
  for (int i = 0; i < count; i++) limit = std::isnan(x[i]) ? x[i] : limit;
  const float inverse = limit != 0 ? 127.0f / limit : 0.0f;
  int32_t sum = 0;
  for (int i = 0; i < count; i++) {
    const float scaled = x[i] * inverse;
    const int code = std::isfinite(scaled) ? static_cast<int>(std::nearbyint(scaled)) : 0;
    codes[(i / 4 * rows + row) * 4 + i % 4] = static_cast<int8_t>(code);
    sum += code;
  }
  scale[row] = limit / 127.0f;
  offset[row] = -factor * sum;
}

#include "encode.inl"

void combine(Gate gate, const float* x, const float* up, float* out) {
  for (int i = 0; i < kPanel; i++) {
    const float t = gate == Gate::kSilu ? x[i] : 1.5957691f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
    out[i] = x[i] / (1 + std::exp(-t)) * up[i];
  }
}

constexpr MatMulKernels kKernels{"plain", {4, 2, 1}, encode, multiply_panel, combine};

}  // namespace

void unpack(const Packing& packing, const uint8_t* weights, int64_t output, float* out) {
  const uint8_t* panel = weights + output / kPanel * packing.panel_bytes();
  for (int64_t first = 0; first < packing.inputs; first += packing.block()) {
    const int64_t count = std::min<int64_t>(packing.block(), packing.inputs - first);
    unpack_block(packing, panel, first, count, static_cast<int>(output % kPanel), out + first);
  }
}

const MatMulKernels* plain_matmul() { return &kKernels; }

}  // namespace edgekv
