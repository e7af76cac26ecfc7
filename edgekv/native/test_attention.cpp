// The operator's body against a loop in float64, for every instruction set that this machine runs.
//
// Random shapes, lengths, rings that have wrapped, pinned prefixes and scales. What is compared: the rows that were
// written (each factor the least that fits, in 16 bits; codes may differ by one where the float64 quotient is a tie),
// every other byte of the cache (must not have changed), and the output, given the rows as stored: at most 1e-3 of the
// row's length away.
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

  int pairs() const { return half < 0 ? dim / 2 : half; }
};

// Everything that a problem points at.
struct Memory {
  std::vector<float> qkv, k_scale, v_scale, cos, sin, cos_pinned, sin_pinned, out;
  std::vector<int8_t> codes[2];      // [K, slots, D] in blocks
  std::vector<uint16_t> factors[2];  // [K, slots]
  std::vector<uint8_t> bytes[2];     // both, as the operator has them
  std::vector<float> floats[2];
  Problem problem{};
};

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

// Each head's codes and the factors behind them, put together for the operator or taken apart again.
void exchange(Memory& m, bool together) {
  const size_t slots = static_cast<size_t>(m.problem.slots), codes = slots * m.problem.dim;
  for (int part = 0; part < 2; part++) {
    m.bytes[part].resize(m.problem.kv_heads * (codes + 2 * slots));
    for (int head = 0; head < m.problem.kv_heads; head++) {
      uint8_t* at = m.bytes[part].data() + head * (codes + 2 * slots);
      void *first = m.codes[part].data() + head * codes, *second = m.factors[part].data() + head * slots;
      std::memcpy(together ? at : first, together ? first : at, codes);
      std::memcpy(together ? at + codes : second, together ? second : at + codes, 2 * slots);
    }
  }
}

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

Memory make(const Case& c, std::mt19937& random) {
  Memory m;
  std::normal_distribution<double> normal;
  const int heads = c.group * c.kv_heads;
  const int64_t slots = c.state.ring ? c.state.ring : (c.state.capacity + kBlock - 1) / kBlock * kBlock;
  const size_t channels = static_cast<size_t>(c.kv_heads) * c.dim, items = channels * slots;
  const double uneven[2] = {0.3, c.uneven};  // keys less: long ones make scores that no model has
  std::vector<double> k_spread(channels), v_spread(channels);
  for (size_t i = 0; i < channels; i++) {
    k_spread[i] = c.k_size * std::exp(0.5 * normal(random));
    v_spread[i] = c.v_size * std::exp(0.5 * normal(random));
    m.k_scale.push_back(static_cast<float>(k_spread[i] * 4 / 127));
    m.v_scale.push_back(static_cast<float>(v_spread[i] * 3 / 127));
  }
  for (int64_t t = 0; t < c.tokens; t++) {
    for (int i = 0; i < heads * c.dim; i++) m.qkv.push_back(static_cast<float>(normal(random) * (c.flat ? 1e-3 : 2)));
    for (int part = 0; part < 2; part++) {
      const double length = std::exp(uneven[part] * normal(random));
      for (double x : part ? v_spread : k_spread) m.qkv.push_back(static_cast<float>(normal(random) * x * length));
    }
  }
  fill_angles(m, c);
  for (int part = 0; part < 2; part++) {
    const auto& spread = part ? v_spread : k_spread;
    for (size_t i = 0; i < items; i++) {
      m.codes[part].push_back(static_cast<int8_t>(std::clamp(normal(random) * 35, -128.0, 127.0)));
      m.floats[part].push_back(static_cast<float>(normal(random) * spread[0]));
    }
    m.factors[part].resize(static_cast<size_t>(c.kv_heads * slots));
    for (uint16_t& x : m.factors[part]) x = upper_half(static_cast<float>(std::exp(uneven[part] * normal(random))));
  }
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
  return m;
}

void connect(Memory& m) {
  Problem& p = m.problem;
  const bool int8 = p.type == CacheType::kInt8;
  p.qkv = m.qkv.data();
  exchange(m, true);
  p.keys = int8 ? static_cast<void*>(m.bytes[0].data()) : m.floats[0].data();
  p.values = int8 ? static_cast<void*>(m.bytes[1].data()) : m.floats[1].data();
  p.k_scale = int8 ? m.k_scale.data() : nullptr;
  p.v_scale = int8 ? m.v_scale.data() : nullptr;
  p.cos = m.cos.data();
  p.sin = m.sin.data();
  p.cos_pinned = m.cos_pinned.data();
  p.sin_pinned = m.sin_pinned.data();
  p.out = m.out.data();
}

// Where a number lies, written down once more from the description in kernels.h.
size_t place(const Problem& p, bool value, int head, int64_t slot, int d) {
  const size_t base = static_cast<size_t>(head * p.slots + slot / 16 * 16) * p.dim;
  const int s = static_cast<int>(slot % 16);
  if (p.type == CacheType::kFloat) return base + (value ? s * p.dim + d : d * 16 + s);
  return base + (value ? (s / 4 * p.dim + d) * 4 + s % 4 : (d / 4 * 16 + s) * 4 + d % 4);
}

// A number as it is stored: of a value, of a key in float, or of a mixed key.
double stored(const Memory& m, bool value, int head, int64_t slot, int d) {
  const size_t at = place(m.problem, value, head, slot, d);
  if (m.problem.type == CacheType::kFloat) return m.floats[value][at];
  const double factor = as_float(m.factors[value][static_cast<size_t>(head * m.problem.slots + slot)]);
  if (value) return m.codes[value][at] * factor * m.v_scale[static_cast<size_t>(head) * m.problem.dim + d];
  return m.codes[value][at] * factor;
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

// A row of keys as it stands for, [D].
std::vector<double> stored_key(const Memory& m, int head, int64_t slot) {
  std::vector<double> key(m.problem.dim);
  for (int d = 0; d < m.problem.dim; d++) key[d] = stored(m, false, head, slot, d);
  if (m.problem.type == CacheType::kFloat) return key;
  key = mixed_row(key);
  for (int d = 0; d < m.problem.dim; d++) {
    key[d] *= double{m.k_scale[static_cast<size_t>(head) * m.problem.dim + d]} / (m.problem.dim & -m.problem.dim);
  }
  return key;
}

// What is stored of a key, but for its rounding.
std::vector<double> to_store(const Problem& p, std::vector<double> key, int head) {
  if (p.type == CacheType::kFloat) return key;
  for (int d = 0; d < p.dim; d++) key[d] /= p.k_scale[head * p.dim + d];
  return mixed_row(key);
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

// The factor of a row is the least that keeps its codes within 127, rounded up to 8 bits of mantissa.
bool check_factor(double found, const double* row, const float* scale, int dim) {
  double largest = 0;
  for (int d = 0; d < dim; d++) largest = std::max(largest, std::fabs(row[d]) / (scale ? scale[d] : 1));
  const double least = std::max(largest / 127, std::ldexp(1, -64));
  if (found >= least * (1 - 1e-5) && found <= least * (1 + 1e-5) * (1 + std::ldexp(1, -7))) return true;
  std::printf("a row's factor is %g where %g was needed\n", found, least);
  return false;
}

// The new rows, in float64; touched bytes are marked.
bool check_rows(const Memory& m, std::vector<bool> touched[2], std::vector<bool> touched_factors[2]) {
  const Problem& p = m.problem;
  for (int64_t t = 0; t < p.tokens; t++) {
    const int64_t cached = p.state.before + t, slot = wanted_slot(p.state, cached);
    for (int head = 0; head < p.kv_heads; head++) {
      const float* key = p.qkv + t * p.qkv_stride() + (p.heads + head) * p.dim;
      const float* value = key + p.kv_heads * p.dim;
      const bool pinned = p.state.evicted && cached < p.state.pinned && !p.state.ring;
      const auto k = to_store(p, rotated(p, key, t, pinned), head);
      const double length = std::sqrt(std::inner_product(k.begin(), k.end(), k.begin(), 0.0));
      const std::vector<double> v(value, value + p.dim);
      double factor[2] = {1, 1};
      for (int part = 0; part < 2 && p.type == CacheType::kInt8; part++) {
        const size_t at = static_cast<size_t>(head * p.slots + slot);
        touched_factors[part][at] = true;
        factor[part] = as_float(m.factors[part][at]);
        const float* scale = part ? p.v_scale + head * p.dim : nullptr;
        if (!check_factor(factor[part], (part ? v : k).data(), scale, p.dim)) return false;
      }
      for (int d = 0; d < p.dim; d++) {
        for (int part = 0; part < 2; part++) {
          touched[part][place(p, part, head, slot, d)] = true;
          const double wanted = part ? value[d] : k[d], found = stored(m, part, head, slot, d);
          double slack = 1e-5 * (part ? std::fabs(wanted) : length);
          if (p.type == CacheType::kInt8) slack += 0.5 * factor[part] * (part ? p.v_scale[head * p.dim + d] : 1);
          if (std::fabs(found - wanted) <= slack) continue;
          std::printf("row %lld head %d channel %d part %d: stored %g, wanted %g\n", static_cast<long long>(cached),
                      head, d, part, found, wanted);
          return false;
        }
      }
    }
  }
  return true;
}

// Keys of all slots, [K][slots][D].
std::vector<std::vector<std::vector<double>>> all_keys(const Memory& m) {
  std::vector<std::vector<std::vector<double>>> keys(m.problem.kv_heads);
  for (int head = 0; head < m.problem.kv_heads; head++) {
    for (int64_t slot = 0; slot < m.problem.slots; slot++) keys[head].push_back(stored_key(m, head, slot));
  }
  return keys;
}

// The largest relative error of an output row.
double output_error(const Memory& m) {
  const Problem& p = m.problem;
  const auto keys = all_keys(m);
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
        for (int d = 0; d < p.dim; d++) wanted[d] += weight * stored(m, true, head, wanted_slot(p.state, j), d);
      }
      const float* found = p.out + (t * p.heads + h) * p.dim;
      for (int d = 0; d < p.dim; d++) {
        wanted[d] /= sum;
        length += wanted[d] * wanted[d];
        distance += (wanted[d] - found[d]) * (wanted[d] - found[d]);
      }
      const double error = std::sqrt(distance / length);
      if (!(error <= worst)) worst = error;
    }
  }
  return worst;
}

template <class T>
bool unchanged(const std::vector<T>& before, const std::vector<T>& after, const std::vector<bool>& touched) {
  for (size_t i = 0; i < before.size(); i++) {
    if (!touched[i] && std::memcmp(&before[i], &after[i], sizeof(T))) return false;
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
  const Memory before = m;
  cached_attention(m.problem, kernels, Parallel{nullptr, run_threads});
  exchange(m, false);
  std::vector<bool> touched[2] = {std::vector<bool>(m.codes[0].size()), std::vector<bool>(m.codes[1].size())};
  std::vector<bool> factors[2] = {std::vector<bool>(m.factors[0].size()), std::vector<bool>(m.factors[1].size())};
  bool good = check_rows(m, touched, factors);
  for (int part = 0; part < 2; part++) {
    good = good && unchanged(before.factors[part], m.factors[part], factors[part]);
    good = good && unchanged(before.codes[part], m.codes[part], c.type == CacheType::kInt8
                                                                    ? touched[part]
                                                                    : std::vector<bool>(touched[part].size()));
    good = good && unchanged(before.floats[part], m.floats[part], c.type == CacheType::kFloat
                                                                      ? touched[part]
                                                                      : std::vector<bool>(touched[part].size()));
  }
  const double error = output_error(m);
  worst_error = std::max(worst_error, error);
  if (good && error <= kTolerance) return true;
  std::printf("FAILED %s %s: group %d, kv heads %d, dim %d, tokens %lld, before %lld, evicted %lld, pinned %lld, "
              "capacity %lld, ring %lld, window %lld, softcap %g, scale %g, pairs %d, k size %g, v size %g, flat %d, "
              "uneven %g, seed %u: error %g%s\n",
              kernels.name, c.type == CacheType::kInt8 ? "int8" : "float", c.group, c.kv_heads, c.dim,
              static_cast<long long>(c.tokens), static_cast<long long>(c.state.before),
              static_cast<long long>(c.state.evicted), static_cast<long long>(c.state.pinned),
              static_cast<long long>(c.state.capacity), static_cast<long long>(c.state.ring),
              static_cast<long long>(c.window), c.softcap, c.scale, c.pairs(), c.k_size, c.v_size, c.flat, c.uneven, seed,
              error, good ? "" : ", and the cache is wrong");
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
  c.type = random() % 4 ? CacheType::kInt8 : CacheType::kFloat;
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
  if (random() % 3 == 0) add_window(c, random);
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
  for (const char* limit : {"avx512", "avx2", "neon", "plain"}) {
    const Kernels& kernels = *best_kernels(CacheType::kInt8, limit);
    if (!std::strcmp(previous, kernels.name)) continue;
    previous = kernels.name;
    worst_error = 0;
    failures += !check_not_finite(kernels, CacheType::kInt8);
    failures += !check_not_finite(*best_kernels(CacheType::kFloat, limit), CacheType::kFloat);
    for (int i = 0; i < rounds; i++) {
      std::mt19937 random(seed + static_cast<unsigned>(i));
      const Case c = random_case(random);
      failures += !check(c, *best_kernels(c.type, limit), seed + static_cast<unsigned>(i));
    }
    std::printf("%-12s %d cases, largest error %.2g\n", kernels.name, rounds, worst_error);
  }
  std::printf(failures ? "%d FAILED\n" : "all good\n", failures);
  return failures != 0;
}
