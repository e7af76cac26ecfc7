// The operator's body against a loop in float64, for every instruction set that this machine runs.
//
// Random shapes, lengths, rings that have wrapped, pinned prefixes and scales. What is compared: the rows that were
// written (each factor the least that fits, in 16 bits; numbers within half a step), every other byte of the cache
// (must not have changed), and the output, given the rows as stored: at most 1e-3 of the row's length away.
//
//     test_attention [rounds] [seed]
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"

using namespace edgekv;

namespace {

constexpr double kTolerance = 1e-3;

void run_threads(void*, void (*body)(void*, size_t), size_t count, void* argument) {
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i = next++; i < count; i = next++) body(argument, i);
  };
  std::thread other(work), third(work);
  work();
  other.join();
  third.join();
}

struct Case {
  CacheType type = CacheType::kInt8;
  int group = 3, kv_heads = 2, dim = 64;
  int64_t tokens = 1;
  State state{0, 0, 0, 64, 0};
  int64_t window = 0;
  float softcap = 0, scale = 0;  // scale 0: 1 / sqrt(D)
  int half = -1;                 // pairs that are rotated; -1: all
  double k_size = 1, v_size = 1;  // how large keys and values are
  bool flat = false;              // queries of almost nothing: attention spread over all slots
  double uneven = 0.3;            // how much the lengths of values differ: the deviation of their logarithm
  double fp8_step = 1;            // FP8: scales relative to what is usual of keys and values
  bool same = false;              // all values are one number, the largest that their codes have
  double centre = 0;              // how large a centre values are held without, beside what is left
  double k_centre = 0;            // the same of keys, INT4 only

  int pairs() const { return half < 0 ? dim / 2 : half; }
};

// Everything that a problem points at.
struct Memory {
  std::vector<float> qkv, k_scale, v_scale, k_centre, v_centre, cos, sin, cos_pinned, sin_pinned, out;
  std::vector<uint8_t> cache[2];  // keys and values, as the operator has them
  std::vector<int64_t> pairs;     // of channels whose keys have a centre
  std::vector<int8_t> turn_codes; // of each slot and pair, whatever they are
  Problem problem{};
};

const char* name_of(CacheType type) {
  const char* names[] = {"float", "int8", "k8v4", "fp8", "int4"};
  return names[static_cast<int>(type)];
}

uint16_t upper_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

double as_float(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// What a byte of E4M3 stands for, and the byte of a number (or one of its neighbours).
double from_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return bits & 0x80 ? -size : size;
}

uint8_t to_e4m3(double x) {
  const double size = std::min(std::fabs(x), 448.0);
  const int exponent = size > 0 ? std::max(std::ilogb(size), -6) : -6;
  const int steps = static_cast<int>(std::ldexp(size, 3 - exponent));  // 0 .. 15
  const int bits = (exponent + 6) * 8 + steps;
  return static_cast<uint8_t>(bits | (x < 0 ? 0x80 : 0));
}

// How rows are held, written down once more from the description in kernels.h.
struct Held {
  const Problem& p;
  bool value;

  bool nibbles() const { return p.type == CacheType::kInt4 || (p.type == CacheType::kK8V4 && value); }
  bool coded() const { return p.type != CacheType::kFloat && p.type != CacheType::kFp8; }
  bool mixed() const { return coded() && (!value || nibbles()); }
  bool scaled() const { return p.type != CacheType::kFloat; }
  double limit() const { return nibbles() ? 8 : 127; }
  int64_t number_bytes() const {
    return nibbles() ? p.dim / 2 : p.type == CacheType::kFloat ? p.dim * int64_t{4} : p.dim;
  }
  int64_t head_bytes() const { return p.slots * (number_bytes() + (coded() ? 2 : 0)); }
  const float* scale(int head) const { return (value ? p.v_scale : p.k_scale) + head * p.dim; }

  // The byte at which a number lies or begins.
  size_t at(int head, int64_t slot, int d) const {
    const int64_t block = slot / 16 * number_bytes() * 16, s = slot % 16;
    int64_t place = 0;
    if (nibbles()) {
      const int64_t pair = d / 16 * 8 + d % 8;
      place = value ? (s / 4 * (p.dim / 2) + pair) * 4 + s % 4 : (pair / 4 * 16 + s) * 4 + pair % 4;
    } else if (coded()) {
      place = value ? (s / 4 * p.dim + d) * 4 + s % 4 : (d / 4 * 16 + s) * 4 + d % 4;
    } else {
      place = (value ? s * p.dim + d : d * 16 + s) * (p.type == CacheType::kFloat ? 4 : 1);
    }
    return static_cast<size_t>(head * head_bytes() + block + place);
  }
  size_t factor_at(int head, int64_t slot) const {
    return static_cast<size_t>(head * head_bytes() + p.slots * number_bytes() + 2 * slot);
  }
};

double angle(int64_t position, int d, int dim) { return position * std::pow(10000.0, -2.0 * d / dim); }

void fill_angles(Memory& m, const Case& c) {
  for (int64_t t = 0; t < c.tokens; t++) {
    for (int d = 0; d < c.pairs(); d++) {
      const int64_t cached = c.state.before + t;
      const double absolute = angle(cached + c.state.evicted, d, c.dim), pinned = angle(cached, d, c.dim);
      m.cos.push_back(static_cast<float>(std::cos(absolute)));
      m.sin.push_back(static_cast<float>(std::sin(absolute)));
      m.cos_pinned.push_back(static_cast<float>(std::cos(pinned)));
      m.sin_pinned.push_back(static_cast<float>(std::sin(pinned)));
    }
  }
}

// Rows of other tokens.
void fill_cache(Memory& m, bool value, double spread, const Case& c, double uneven, std::mt19937& random) {
  std::normal_distribution<double> normal;
  const Problem& p = m.problem;
  const Held held{p, value};
  std::vector<uint8_t>& cache = m.cache[value];
  cache.resize(static_cast<size_t>(p.kv_heads * held.head_bytes()));
  for (int head = 0; head < p.kv_heads; head++) {
    for (int64_t slot = 0; slot < p.slots; slot++) {
      for (int d = 0; d < p.dim; d++) {
        uint8_t* at = cache.data() + held.at(head, slot, d);
        const bool same = c.same && value;
        const float number = static_cast<float>(same ? 1 : normal(random) * spread);
        if (held.nibbles()) {
          *at = same ? 0x88 : static_cast<uint8_t>(random());
        } else if (held.coded()) {
          *at = static_cast<uint8_t>(same ? 127 : static_cast<int8_t>(std::clamp(normal(random) * 35, -128.0, 127.0)));
        } else if (p.type == CacheType::kFp8) {
          *at = to_e4m3(same ? 448 : number / held.scale(head)[d]);
        } else {
          std::memcpy(at, &number, sizeof number);
        }
      }
      const double usual = held.nibbles() ? 9 * std::sqrt(p.dim & -p.dim) : 1;  // numbers like those of new rows
      const uint16_t factor = upper_half(static_cast<float>(usual * (c.same ? 1 : std::exp(uneven * normal(random)))));
      if (held.coded()) std::memcpy(cache.data() + held.factor_at(head, slot), &factor, sizeof factor);
    }
  }
}

Memory make(const Case& c, std::mt19937& random) {
  Memory m;
  std::normal_distribution<double> normal;
  const int heads = c.group * c.kv_heads;
  const int64_t slots = c.state.ring ? c.state.ring : (c.state.capacity + kBlock - 1) / kBlock * kBlock;
  const size_t channels = static_cast<size_t>(c.kv_heads) * c.dim;
  const double uneven[2] = {0.3, c.uneven};  // keys less: long ones make scores that no model has
  std::vector<double> k_spread(channels), v_spread(channels);
  for (size_t i = 0; i < channels; i++) {
    k_spread[i] = c.k_size * std::exp(0.5 * normal(random));
    v_spread[i] = c.v_size * std::exp(0.5 * normal(random));
    const bool fp8 = c.type == CacheType::kFp8;
    m.k_scale.push_back(static_cast<float>(k_spread[i] * (fp8 ? c.fp8_step : 4.0 / 127)));
    m.v_scale.push_back(static_cast<float>(v_spread[i] * (fp8 ? c.fp8_step : 3.0 / 127)));
  }
  for (size_t i = 0; c.centre != 0 && i < channels; i++) {
    m.v_centre.push_back(static_cast<float>(normal(random) * c.centre * c.v_size));
  }
  for (size_t i = 0; c.k_centre != 0 && i < channels; i++) {
    m.k_centre.push_back(static_cast<float>(normal(random) * c.k_centre * c.k_size));
  }
  for (int64_t pair = 0; c.k_centre != 0 && pair < c.pairs(); pair++) {
    if (random() % 8) m.pairs.push_back(pair);
  }
  for (size_t i = 0; i < (2 * m.pairs.size() + 3) / 4 * 4 * static_cast<size_t>(slots); i++) {
    m.turn_codes.push_back(static_cast<int8_t>(random() % 255 - 127));
  }
  for (int64_t t = 0; t < c.tokens; t++) {
    for (int i = 0; i < heads * c.dim; i++) m.qkv.push_back(static_cast<float>(normal(random) * (c.flat ? 1e-3 : 2)));
    for (int part = 0; part < 2; part++) {
      const double length = std::exp(uneven[part] * normal(random));
      for (size_t i = 0; i < channels; i++) {
        const double x = part ? v_spread[i] : k_spread[i], centre = part && c.centre != 0 ? m.v_centre[i] : 0;
        m.qkv.push_back(static_cast<float>(part && c.same ? x : normal(random) * x * length + centre));
      }
    }
  }
  fill_angles(m, c);
  m.out.assign(static_cast<size_t>(c.tokens) * heads * c.dim, std::numeric_limits<float>::quiet_NaN());
  Problem& p = m.problem;
  p.type = c.type;
  p.heads = heads;
  p.kv_heads = c.kv_heads;
  p.dim = c.dim;
  // Scores of a few units whatever the keys' size, as a trained model's are.
  p.scale = static_cast<float>((c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.dim))) / c.k_size);
  p.softcap = c.softcap;
  p.window = c.window;
  p.half = c.pairs();
  p.tokens = c.tokens;
  p.slots = slots;
  p.state = c.state;
  p.k_scale = c.type == CacheType::kFloat ? nullptr : m.k_scale.data();
  p.v_scale = c.type == CacheType::kFloat ? nullptr : m.v_scale.data();
  for (int part = 0; part < 2; part++) fill_cache(m, part, (part ? v_spread : k_spread)[0], c, uneven[part], random);
  return m;
}

void connect(Memory& m) {
  Problem& p = m.problem;
  const bool scaled = p.type != CacheType::kFloat;
  p.qkv = m.qkv.data();
  p.keys = m.cache[0].data();
  p.values = m.cache[1].data();
  p.k_scale = scaled ? m.k_scale.data() : nullptr;
  p.v_scale = scaled ? m.v_scale.data() : nullptr;
  p.v_centre = m.v_centre.empty() ? nullptr : m.v_centre.data();
  const bool centred = !m.pairs.empty();  // without pairs nothing is taken out
  p.centre = centred ? m.k_centre.data() : nullptr;
  p.turn_codes = centred ? m.turn_codes.data() : nullptr;
  p.pairs = m.pairs.data();
  p.turned = static_cast<int>(m.pairs.size());
  p.cos = m.cos.data();
  p.sin = m.sin.data();
  p.cos_pinned = m.cos_pinned.data();
  p.sin_pinned = m.sin_pinned.data();
  p.out = m.out.data();
}

double factor_of(const Memory& m, bool value, int head, int64_t slot) {
  const Held held{m.problem, value};
  if (!held.coded()) return 1;
  uint16_t half;
  std::memcpy(&half, m.cache[value].data() + held.factor_at(head, slot), sizeof half);
  return as_float(half);
}

// A number as it is stored, times its row's factor.
double stored(const Memory& m, bool value, int head, int64_t slot, int d) {
  const Held held{m.problem, value};
  const uint8_t* at = m.cache[value].data() + held.at(head, slot, d);
  if (held.nibbles()) {
    const int code = (d / 8 % 2 ? *at >> 4 : *at & 15);
    return ((code < 8 ? code : code - 16) + 0.5) * factor_of(m, value, head, slot);
  }
  if (held.coded()) return static_cast<int8_t>(*at) * factor_of(m, value, head, slot);
  if (m.problem.type == CacheType::kFp8) return from_e4m3(*at);
  float number;
  std::memcpy(&number, at, sizeof number);
  return number;
}

int sign(int i, int j) {
  int both = i & j, sum = 0;
  for (; both; both /= 2) sum += both % 2;
  return sum % 2 ? -1 : 1;
}

// H x for each group of n channels, by definition.
std::vector<double> mixed_row(const std::vector<double>& x) {
  const int dim = static_cast<int>(x.size()), n = dim & -dim;
  std::vector<double> y(dim);
  for (int i = 0; i < dim; i++) {
    for (int j = 0; j < n; j++) y[i] += sign(i % n, j) * x[i / n * n + j];
  }
  return y;
}

// What a row stands for, [D]; of values what is left of them.
std::vector<double> row_of(const Memory& m, bool value, int head, int64_t slot) {
  const Held held{m.problem, value};
  std::vector<double> row(m.problem.dim);
  for (int d = 0; d < m.problem.dim; d++) row[d] = stored(m, value, head, slot, d);
  if (held.mixed()) row = mixed_row(row);
  const int n = held.mixed() ? m.problem.dim & -m.problem.dim : 1;
  for (int d = 0; d < m.problem.dim; d++) row[d] *= (held.scaled() ? held.scale(head)[d] : 1.0) / n;
  return row;
}

// What is stored of a row, but for its rounding.
std::vector<double> to_store(const Held& held, std::vector<double> row, int head) {
  for (size_t d = 0; d < row.size(); d++) row[d] /= held.scaled() ? held.scale(head)[d] : 1.0;
  return held.mixed() ? mixed_row(row) : row;
}

// How far what is stored may be from what should be, apart from sums in another order.
double half_step(const Held& held, double wanted, double factor) {
  if (held.coded()) return 0.5 * factor;
  if (held.p.type == CacheType::kFloat) return 0;
  return std::ldexp(0.5, std::max(std::ilogb(std::fabs(wanted)), -6) - 3);
}

int64_t wanted_slot(const State& s, int64_t cached) {
  if (s.ring) return (cached + s.evicted) % s.ring;
  if (s.evicted == 0 || cached < s.pinned) return cached;
  return s.pinned + (cached + s.evicted - s.pinned) % (s.capacity - s.pinned);
}

std::vector<double> rotated(const Problem& p, const float* x, int64_t token, bool pinned) {
  const int half = p.half;
  const float* cosine = (pinned ? p.cos_pinned : p.cos) + token * half;
  const float* sine = (pinned ? p.sin_pinned : p.sin) + token * half;
  std::vector<double> y(x, x + p.dim);
  for (int d = 0; d < half; d++) {
    y[d] = double{x[d]} * cosine[d] - double{x[d + half]} * sine[d];
    y[d + half] = double{x[d + half]} * cosine[d] + double{x[d]} * sine[d];
  }
  return y;
}

// What a slot's codes of cos and sin make of the keys' centre.
std::vector<double> turned_centre(const Problem& p, int head, int64_t slot) {
  std::vector<double> out(p.dim);
  for (int i = 0; p.centre && i < p.turned; i++) {
    const auto code = [&](int item) {
      return p.turn_codes[slot / 16 * 16 * p.turn_items() + item / 4 * 64 + slot % 16 * 4 + item % 4] / 127.0;
    };
    const int64_t low = p.pairs[i], high = low + p.half;
    const double c1 = p.centre[head * p.dim + low], c2 = p.centre[head * p.dim + high];
    out[low] = c1 * code(2 * i) - c2 * code(2 * i + 1);
    out[high] = c2 * code(2 * i) + c1 * code(2 * i + 1);
  }
  return out;
}

// The factor of a row is the least that keeps its codes within the limit, rounded up to 8 bits of mantissa.
bool check_factor(double found, const std::vector<double>& row, double limit) {
  double largest = 0;
  for (double x : row) largest = std::max(largest, std::fabs(x));
  const double least = std::max(largest / limit, std::ldexp(1, -64));
  if (found >= least * (1 - 1e-5) && found <= least * (1 + 1e-5) * (1 + std::ldexp(1, -7))) return true;
  std::printf("a row's factor is %g where %g was needed\n", found, least);
  return false;
}

// One new row against the one that should be there; marks its bytes.
bool check_row(const Memory& m, bool value, int head, int64_t slot, const std::vector<double>& row,
               std::vector<bool>& touched) {
  const Held held{m.problem, value};
  const double factor = factor_of(m, value, head, slot);
  for (size_t i = 0; held.coded() && i < 2; i++) touched[held.factor_at(head, slot) + i] = true;
  if (held.coded() && !check_factor(factor, row, held.limit())) return false;
  const double length = std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0));
  for (int d = 0; d < m.problem.dim; d++) {
    for (int i = 0; i < (held.scaled() ? 1 : 4); i++) touched[held.at(head, slot, d) + i] = true;
    const double wanted = held.p.type == CacheType::kFp8 ? std::clamp(row[d], -448.0, 448.0) : row[d];
    const double found = stored(m, value, head, slot, d), sums = value && !held.mixed() ? std::fabs(wanted) : length;
    if (std::fabs(found - wanted) <= 1e-5 * sums + half_step(held, wanted, factor)) continue;
    std::printf("slot %lld head %d channel %d part %d: stored %g, wanted %g\n", static_cast<long long>(slot), head, d,
                value, found, wanted);
    return false;
  }
  return true;
}

// The new rows, in float64; touched bytes are marked.
bool check_rows(const Memory& m, std::vector<bool> touched[2]) {
  const Problem& p = m.problem;
  for (int64_t t = 0; t < p.tokens; t++) {
    const int64_t cached = p.state.before + t, slot = wanted_slot(p.state, cached);
    for (int head = 0; head < p.kv_heads; head++) {
      const float* key = p.qkv + t * p.qkv_stride() + (p.heads + head) * p.dim;
      const float* value = key + p.kv_heads * p.dim;
      const bool pinned = p.state.evicted && cached < p.state.pinned && !p.state.ring;
      auto whole = rotated(p, key, t, pinned);
      const auto centre = turned_centre(p, head, slot);
      for (int d = 0; d < p.dim; d++) whole[d] -= centre[d];
      const auto k = to_store({p, false}, whole, head);
      std::vector<double> left(value, value + p.dim);
      for (int d = 0; p.v_centre && d < p.dim; d++) left[d] = value[d] - p.v_centre[head * p.dim + d];
      const auto v = to_store({p, true}, left, head);
      if (!check_row(m, false, head, slot, k, touched[0])) return false;
      if (!check_row(m, true, head, slot, v, touched[1])) return false;
    }
  }
  return true;
}

// Keys or values of all slots, [K][slots][D].
std::vector<std::vector<std::vector<double>>> all_rows(const Memory& m, bool value) {
  std::vector<std::vector<std::vector<double>>> rows(m.problem.kv_heads);
  for (int head = 0; head < m.problem.kv_heads; head++) {
    for (int64_t slot = 0; slot < m.problem.slots; slot++) {
      rows[head].push_back(row_of(m, value, head, slot));
      if (value) continue;
      const auto centre = turned_centre(m.problem, head, slot);
      for (int d = 0; d < m.problem.dim; d++) rows[head].back()[d] += centre[d];
    }
  }
  return rows;
}

// The largest relative error of an output row.
double output_error(const Memory& m) {
  const Problem& p = m.problem;
  const auto keys = all_rows(m, false), values = all_rows(m, true);
  double worst = 0;
  for (int64_t t = 0; t < p.tokens; t++) {
    const int64_t visible = p.state.before + t + 1;
    for (int h = 0; h < p.heads; h++) {
      const int head = h / p.group();
      const float* query = p.qkv + t * p.qkv_stride() + h * p.dim;
      const auto window_q = rotated(p, query, t, false), pinned_q = rotated(p, query, t, true);
      std::vector<double> scores(visible), wanted(p.dim);
      double largest = -INFINITY, sum = 0, length = 0, distance = 0;
      const int64_t oldest = p.window ? std::max<int64_t>(0, visible - p.window) : 0;
      for (int64_t j = oldest; j < visible; j++) {
        const int64_t slot = wanted_slot(p.state, j);
        const auto& q = p.state.evicted && j < p.state.pinned && !p.state.ring ? pinned_q : window_q;
        const auto& key = keys[head][slot];
        for (int d = 0; d < p.dim; d++) scores[j] += q[d] * key[d];
        scores[j] *= p.scale;
        if (p.softcap != 0) scores[j] = p.softcap * std::tanh(scores[j] / p.softcap);
        largest = std::max(largest, scores[j]);
      }
      for (int64_t j = oldest; j < visible; j++) {
        const double weight = std::exp(scores[j] - largest);
        sum += weight;
        const auto& value = values[head][wanted_slot(p.state, j)];
        for (int d = 0; d < p.dim; d++) wanted[d] += weight * value[d];
      }
      const float* found = p.out + (t * p.heads + h) * p.dim;
      for (int d = 0; d < p.dim; d++) {
        wanted[d] /= sum;
        length += wanted[d] * wanted[d];  // of what is left: a large centre excuses nothing
        const double off = wanted[d] + (p.v_centre ? p.v_centre[head * p.dim + d] : 0) - found[d];
        distance += off * off;
      }
      const double error = std::sqrt(distance / length);
      if (!(error <= worst)) worst = error;
    }
  }
  return worst;
}

bool unchanged(const std::vector<uint8_t>& before, const std::vector<uint8_t>& after,
               const std::vector<bool>& touched) {
  for (size_t i = 0; i < before.size(); i++) {
    if (!touched[i] && before[i] != after[i]) return false;
  }
  return true;
}

double worst_error = 0;

bool check(const Case& c, const Kernels& kernels, unsigned seed) {
  std::mt19937 random(seed);
  Memory m = make(c, random);
  connect(m);
  if (const char* what = fault(m.problem)) {
    std::printf("refused: %s\n", what);
    return false;
  }
  const std::vector<uint8_t> before[2] = {m.cache[0], m.cache[1]};
  cached_attention(m.problem, kernels, Parallel{nullptr, run_threads});
  std::vector<bool> touched[2] = {std::vector<bool>(m.cache[0].size()), std::vector<bool>(m.cache[1].size())};
  bool good = check_rows(m, touched);
  for (int part = 0; part < 2; part++) good = good && unchanged(before[part], m.cache[part], touched[part]);
  const double error = output_error(m);
  worst_error = std::max(worst_error, error);
  if (good && error <= kTolerance) return true;
  std::printf("FAILED %s %s: group %d, kv heads %d, dim %d, tokens %lld, before %lld, evicted %lld, pinned %lld, "
              "capacity %lld, ring %lld, window %lld, softcap %g, scale %g, pairs %d, k size %g, v size %g, flat %d, "
              "uneven %g, FP8 step %g, same %d, centre %g, of keys %g, seed %u: error %g%s\n",
              kernels.name, name_of(c.type), c.group, c.kv_heads, c.dim,
              static_cast<long long>(c.tokens), static_cast<long long>(c.state.before),
              static_cast<long long>(c.state.evicted), static_cast<long long>(c.state.pinned),
              static_cast<long long>(c.state.capacity), static_cast<long long>(c.state.ring),
              static_cast<long long>(c.window), c.softcap, c.scale, c.pairs(), c.k_size, c.v_size, c.flat, c.uneven,
              c.fp8_step, c.same, c.centre, c.k_centre, seed, error, good ? "" : ", and the cache is wrong");
  return false;
}

template <class T>
T pick(std::mt19937& random, std::initializer_list<T> choices) {
  return choices.begin()[random() % choices.size()];
}

// A window, over the whole cache or over a ring of the layer's own.
void add_window(Case& c, std::mt19937& random) {
  c.window = 1 + static_cast<int64_t>(random() % (c.state.capacity + 20));
  if (random() % 2) return;
  const int64_t oldest = std::max<int64_t>(0, c.state.before - c.window + 1);
  const int64_t needed = c.state.before + c.tokens - oldest;
  c.state.ring = (needed + static_cast<int64_t>(random() % 100) + kBlock - 1) / kBlock * kBlock;
}

Case random_case(std::mt19937& random) {
  Case c;
  c.type = pick(random, {CacheType::kInt8, CacheType::kInt8, CacheType::kK8V4, CacheType::kInt4, CacheType::kInt4,
                         CacheType::kFp8, CacheType::kFloat});
  c.group = pick(random, {1, 2, 3, 4, 5, 7, 8, 16});
  c.kv_heads = pick(random, {1, 2, 3});
  c.dim = pick(random, {16, 32, 64, 80, 96, 128, 192, 256});
  const int64_t pinned = pick<int64_t>(random, {0, 0, 4, 4, 17, 100});
  c.state.capacity = pinned * 2 + 64 + static_cast<int64_t>(random() % 900);
  c.state.pinned = pinned;
  c.tokens = random() % 2 ? 1 : 1 + static_cast<int64_t>(random() % 60);
  c.state.before = static_cast<int64_t>(random() % (c.state.capacity - c.tokens + 1));
  if (random() % 4 == 0) c.state.before = c.state.capacity - c.tokens;
  if (random() % 2) c.state.evicted = 1 + static_cast<int64_t>(random() % 5000);
  c.k_size = pick(random, {1.0, 1.0, 1e-6, 1e3});
  c.v_size = pick(random, {1.0, 1.0, 1e-6, 1e3});
  c.flat = random() % 4 == 0;
  c.uneven = pick(random, {0.3, 0.3, 1.0, 3.0});
  if (random() % 3 == 0) c.softcap = pick(random, {0.5f, 5.0f, 50.0f});
  if (random() % 4 == 0) c.scale = pick(random, {0.5f, 2.0f}) / std::sqrt(static_cast<float>(c.dim));
  if (random() % 4 == 0) c.half = pick(random, {0, c.dim / 4});
  c.fp8_step = pick(random, {1.0, 1e-2, 1e2, 1e-4});  // codes about 1, 100, the smallest, and beyond the largest
  if (random() % 3 == 0) add_window(c, random);
  if (random() % 3 == 0) c.centre = pick(random, {0.5, 5.0, 50.0});
  if (c.type == CacheType::kInt4 && !c.state.ring && random() % 2) c.k_centre = pick(random, {0.1, 1.0});
  return c;
}

bool check_refusals() {
  std::mt19937 random(1);
  Memory m = make(Case{}, random);
  connect(m);
  bool good = fault(m.problem) == nullptr;
  auto refused = [&](auto change) {
    Problem p = m.problem;
    change(p);
    good = good && fault(p) != nullptr;
  };
  refused([](Problem& p) { p.state.before = -1; });
  refused([](Problem& p) { p.state.before = 64; });
  refused([](Problem& p) { p.state.before = std::numeric_limits<int64_t>::max(); });
  refused([](Problem& p) { p.state.evicted = -1; });
  refused([](Problem& p) { p.state.evicted = std::numeric_limits<int64_t>::max(); });
  refused([](Problem& p) { p.state.pinned = 64; });
  refused([](Problem& p) { p.state.pinned = -1; });
  refused([](Problem& p) { p.state.capacity = 65; });
  refused([](Problem& p) { p.state.capacity = 0; });
  refused([](Problem& p) { p.slots = 63; });
  refused([](Problem& p) { p.dim = 24; });
  refused([](Problem& p) { p.dim = 272; });
  refused([](Problem& p) { p.kv_heads = 4; });
  refused([](Problem& p) { p.kv_heads = 0; });
  refused([](Problem& p) { p.tokens = 0; });
  refused([](Problem& p) { p.tokens = 65; });
  refused([](Problem& p) { p.half = 33; });
  refused([](Problem& p) { p.window = -1; });
  refused([](Problem& p) { p.softcap = -1; });
  refused([](Problem& p) { p.state.ring = 64; });
  refused([](Problem& p) { p.state.ring = 80, p.window = 5; });
  refused([](Problem& p) { p.state.ring = 16, p.window = 17, p.state.before = 32; });
  if (!good) std::printf("FAILED: a problem that does not fit was not refused\n");
  return good;
}

// Sums of as many equal weights and largest codes as there can be in one tile.
bool check_large_sums(const Kernels& kernels, CacheType type) {
  Case c;
  c.type = type;
  c.group = c.kv_heads = 1;
  c.dim = 16;  // one range of all tokens
  c.state = {2047, 0, 0, 2048, 0};
  c.flat = c.same = true;
  return check(c, kernels, 3);
}

// A number that is not finite must come out as such, and only in its own row.
bool check_not_finite(const Kernels& kernels, CacheType type) {
  std::mt19937 random(2);
  Case c;
  c.type = type;
  c.tokens = 3;
  c.state = {40, 9, 4, 64, 0};
  Memory m = make(c, random);
  connect(m);
  const int heads = m.problem.heads;
  m.qkv[5] = std::numeric_limits<float>::infinity();
  m.qkv[static_cast<size_t>(m.problem.qkv_stride() + 64)] = std::numeric_limits<float>::quiet_NaN();
  cached_attention(m.problem, kernels, Parallel{nullptr, run_threads});
  bool good = true;
  for (int row = 0; row < 3 * heads; row++) {
    const bool bad = row == 0 || row == heads + 1;
    for (int d = 0; d < c.dim; d++) good = good && std::isfinite(m.out[row * c.dim + d]) != bad;
  }
  for (float& x : m.qkv) x = std::numeric_limits<float>::quiet_NaN();
  cached_attention(m.problem, kernels, Parallel{nullptr, run_threads});
  if (!good) std::printf("FAILED %s: not-finite queries\n", kernels.name);
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  int failures = !check_refusals();
  const char* previous = "";
  for (const char* limit : {"avx512", "avxvnni", "avx2", "neon", "plain"}) {
    const char* name = best_kernels(CacheType::kInt8, limit)->name;
    if (!std::strcmp(previous, name)) continue;
    previous = name;
    worst_error = 0;
    for (int type = 0; type < kCacheTypes; type++) {
      const Kernels& kernels = *best_kernels(static_cast<CacheType>(type), limit);
      failures += !check_not_finite(kernels, static_cast<CacheType>(type));
      failures += !check_large_sums(kernels, static_cast<CacheType>(type));
    }
    for (int i = 0; i < rounds; i++) {
      std::mt19937 random(seed + static_cast<unsigned>(i));
      const Case c = random_case(random);
      failures += !check(c, *best_kernels(c.type, limit), seed + static_cast<unsigned>(i));
    }
    std::printf("%-12s %d cases, largest error %.2g\n", name, rounds, worst_error);
  }
  std::printf(failures ? "%d FAILED\n" : "all good\n", failures);
  return failures != 0;
}
