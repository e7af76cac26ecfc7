// The product's kernels of 256 bits, but for the products of one block, which each instruction set has its own of.
// Included by each within its unnamed namespace, so that each compiles its own.

// Codes of one block for H halves of a panel: dots += codes * x, over `steps` words of four inputs.
template <int R, int H, int Bits>
void dot_block(__m256i (&dots)[H][R], const uint8_t* codes, const int8_t* x, int steps);

#include "ahead.inl"

constexpr int kLanes = 8;  // outputs in a vector, half a panel

template <class T>
T word(const void* x) {
  T value;
  memcpy(&value, x, sizeof value);
  return value;
}

__m256i load(const uint8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }

// Scales or minima.
__m256 floats_of(const uint8_t* floats, int64_t place, bool half) {
  if (!half) return _mm256_loadu_ps(reinterpret_cast<const float*>(floats) + place);
  // A float16's exponent and fraction, moved to a float32's and put right by a product; subnormal numbers come out too.
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(floats + 2 * place));
  const __m256i wide = _mm256_cvtepu16_epi32(bits);
  const __m256i size = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x7fff)), 13);
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x8000)), 16);
  const __m256 number = _mm256_mul_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(5.192296858534828e33f));  // 2^112
  return _mm256_or_ps(number, _mm256_castsi256_ps(sign));
}

// Eight bytes as integers.
__m256i bytes_of(const uint8_t* x) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
}

// H halves of a panel, from one on.
template <int R, int H, int Bits>
void multiply_halves(const Packing& packing, const uint8_t* panel, int half, const InputTile& tile,
                     const Addends& added, float* out, int64_t stride) {
  const uint8_t* zeros = panel + packing.scale_bytes();
  const uint8_t* minima = panel + packing.minima_place();
  const uint8_t* codes = panel + packing.codes_place();
  constexpr int kInputBytes = kPanel * Bits / 8;
  const int block = packing.block();
  const int64_t blocks = packing.blocks(), group_blocks = packing.group / block;
  const bool ahead = R > kFewRows && tile.first && half == 0;
  for (const uint8_t* line = panel; R <= kFewRows && half == 0 && line < codes; line += kLine) prefetch<R>(line);
  for (const uint8_t* line = panel; ahead && line < codes; line += kLine) prefetch_far<kLine>(line);
  codes += half * 4 * kLanes;
  __m256 sums[H][R], scales[H];
  __m256i zero_points[H];
  EDGEKV_UNROLL
  for (int h = 0; h < H; h++) {
    const __m256 bias = added.bias ? _mm256_loadu_ps(added.bias + (half + h) * kLanes) : _mm256_setzero_ps();
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) sums[h][r] = bias;
  }
  int64_t left = 0, place = half * kLanes;
  for (int64_t i = 0; i < blocks; i++, codes += block * kInputBytes) {
    if (left == 0) {
      left = group_blocks;
      EDGEKV_UNROLL
      for (int h = 0; h < H; h++) {
        scales[h] = floats_of(panel, place + h * kLanes, packing.half);
        if (packing.zeros) zero_points[h] = bytes_of(zeros + place + h * kLanes);
      }
      place += kPanel;
    }
    left--;
    __m256i dots[H][R];
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      const __m256i offset = _mm256_set1_epi32(tile.offsets[i * R + r]);
      EDGEKV_UNROLL
      for (int h = 0; h < H; h++) dots[h][r] = packing.zeros ? _mm256_madd_epi16(zero_points[h], offset) : offset;
    }
    for (int k = 0; ahead && k < block; k += 16) prefetch_far<16 * kInputBytes>(codes + k * kInputBytes);
    dot_block<R, H, Bits>(dots, codes, tile.codes + i * block * R, block / 4);
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      const __m256 input_scale = _mm256_set1_ps(tile.scales[i * R + r]);
      EDGEKV_UNROLL
      for (int h = 0; h < H; h++) {
        sums[h][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[h][r]), _mm256_mul_ps(scales[h], input_scale), sums[h][r]);
      }
    }
    if (!packing.minima) continue;
    EDGEKV_UNROLL
    for (int h = 0; h < H; h++) {
      const __m256 minimum = floats_of(minima, place - kPanel + h * kLanes, packing.half);
      EDGEKV_UNROLL
      for (int r = 0; r < R; r++) {
        sums[h][r] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(tile.totals[i * R + r]), sums[h][r]);
      }
    }
  }
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) {
    if (R > 1 && r >= tile.used) break;
    EDGEKV_UNROLL
    for (int h = 0; h < H; h++) {
      const int64_t at = r * stride + (half + h) * kLanes;
      if (added.residual) sums[h][r] = _mm256_add_ps(sums[h][r], _mm256_loadu_ps(added.residual + at));
      _mm256_storeu_ps(out + at, sums[h][r]);
    }
  }
}

template <int R>
void multiply_rows(const Packing& packing, const uint8_t* panel, const InputTile& tile, const Addends& added,
                    float* out, int64_t stride) {
  constexpr int kHalves = R <= kWholePanelRows ? 2 : 1;
  const auto multiply_some = packing.bits == 4   ? multiply_halves<R, kHalves, 4>
                             : packing.bits == 5 ? multiply_halves<R, kHalves, 5>
                             : packing.bits == 6 ? multiply_halves<R, kHalves, 6>
                                                 : multiply_halves<R, kHalves, 8>;
  for (int half = 0; half < 2; half += kHalves) multiply_some(packing, panel, half, tile, added, out, stride);
}

void multiply_panel(const Packing& packing, const uint8_t* panel, const InputTile& tile, const Addends& added,
                    float* out, int64_t stride) {
  if constexpr (kMostRows == 8) {
    if (tile.rows == 8) return multiply_rows<8>(packing, panel, tile, added, out, stride);
    if (tile.rows == 6) return multiply_rows<6>(packing, panel, tile, added, out, stride);
  }
  switch (tile.rows) {
    case 4: return multiply_rows<4>(packing, panel, tile, added, out, stride);
    case 2: return multiply_rows<2>(packing, panel, tile, added, out, stride);
    default: return multiply_rows<1>(packing, panel, tile, added, out, stride);
  }
}

int32_t largest(__m256i x) {
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1));
  return _mm_cvtsi128_si32(y);
}

int32_t total(__m256i x) {
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1));
  return _mm_cvtsi128_si32(y);
}

// Eight numbers from -128 to 127 as bytes.
void store_bytes(__m256i x, int8_t* out) {
  const __m256i words = _mm256_packs_epi32(x, x), bytes = _mm256_packs_epi16(words, words);
  const int32_t halves[2] = {_mm256_cvtsi256_si32(bytes), _mm_cvtsi128_si32(_mm256_extracti128_si256(bytes, 1))};
  memcpy(out, halves, sizeof halves);
}

void encode_block(const float* x, int count, int factor, int row, int rows, int8_t* codes, float* scale,
                  int32_t* offset) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i limits = _mm256_setzero_si256(), sum = _mm256_setzero_si256();
  for (int i = 0; i < count; i += kLanes) {  // as integers, so that what is not a number is larger than any
    limits = _mm256_max_epi32(limits, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
  }
  const int32_t bits = largest(limits);
  const float limit = word<float>(&bits);
  const __m256 inverse = _mm256_set1_ps(limit != 0 ? 127.0f / limit : 0.0f);
  for (int i = 0; i < count; i += kLanes) {
    const __m256i any = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
    const __m256i rounded = _mm256_max_epi32(any, _mm256_set1_epi32(-128));  // INT32_MIN where there is no number
    int8_t bytes[kLanes];
    store_bytes(rounded, bytes);
    sum = _mm256_add_epi32(sum, rounded);
    for (int step = 0; step < 2; step++) memcpy(codes + ((i / 4 + step) * rows + row) * 4, bytes + 4 * step, 4);
  }
  scale[row] = limit / 127.0f;
  offset[row] = -factor * total(sum);
}

__m256 exp2(__m256 x) {
  const __m256 bounded = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-126.0f)), _mm256_set1_ps(126.0f));
  const __m256 n = _mm256_round_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 f = _mm256_sub_ps(bounded, n);
  __m256 y = _mm256_set1_ps(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(c));
  }
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

// As in matmul_avx512.cpp.
__m256 activate(Gate gate, __m256 x) {
  __m256 t = x;
  if (gate == Gate::kGelu) {
    const __m256 cube = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(0.044715f), x), _mm256_mul_ps(x, x), x);
    t = _mm256_mul_ps(_mm256_set1_ps(1.5957691f), cube);
  }
  const __m256 power = exp2(_mm256_mul_ps(t, _mm256_set1_ps(-1.4426950f)));
  return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), power));
}

void combine(Gate gate, const float* x, const float* up, float* out) {
  for (int i = 0; i < kPanel; i += kLanes) {
    const __m256 gated = activate(gate, _mm256_loadu_ps(x + i));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(gated, _mm256_loadu_ps(up + i)));
  }
}

#include "encode.inl"
