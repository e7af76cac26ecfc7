// The packed product against a loop in float64, for every instruction set that this machine runs.
//
// Random shapes, groups, widths, zero points or minima, scales that are float16 numbers or not, rows, biases,
// residuals, norms and gates. Compared are the inputs' bytes, which must be the nearest, and what is made of them,
// which must be exact.
//
//     test_matmul [rounds] [seed]
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "matmul.h"

using namespace edgekv;

namespace {

constexpr double kTolerance = 1e-6;  // of the sizes of all that is added; measured 3.3e-7

constexpr float kEpsilon = 1e-5f;

double worst_error = 0;

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

const Parallel kThreads{nullptr, run_threads};

int64_t pick(std::mt19937& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// A matrix as MatMulNBits has it, codes of 5 and 6 bits, and some of 4, as bytes from a base on.
struct Matrix {
  Packing packing;
  int bits;  // of the codes here
  int base = 0;
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales, minima;

  Matrix(const Packing& p, std::mt19937& random) : packing(p), bits(p.bits > 4 || random() % 4 == 0 ? 8 : 4) {
    std::normal_distribution<float> normal;
    codes.resize(static_cast<size_t>(p.outputs * p.groups() * p.group * bits / 8));
    const int64_t zero_row = bits == 8 ? p.groups() : (p.groups() + 1) / 2;
    if (p.zeros) zeros.resize(static_cast<size_t>(p.outputs * zero_row));
    if (bits > p.bits) base = static_cast<int>(pick(random, 0, 256 - (1 << p.bits)));
    const unsigned spread = (1u << (bits == 8 ? p.bits : 8)) - 1;
    for (uint8_t& x : codes) x = static_cast<uint8_t>(static_cast<unsigned>(base) + (random() & spread));
    for (uint8_t& x : zeros) x = static_cast<uint8_t>(random());
    for (int64_t i = 0; i < p.outputs * p.groups(); i++) {
      const int64_t half = pick(random, 512, 2047);
      const float whole = static_cast<float>(half) / static_cast<float>(int64_t{1} << pick(random, 14, 24));
      scales.push_back(p.half ? (random() % 2 ? -whole : whole) : normal(random) * 0.01f);
      const float size = static_cast<float>(int64_t{1} << pick(random, 12, 20));
      const float low = static_cast<float>(pick(random, -2047, 2047)) / size;
      if (p.minima) minima.push_back(p.half ? low : normal(random) * 0.1f);
    }
  }
  double weight(int64_t output, int64_t input) const {
    const Packing& p = packing;
    const int64_t group = input / p.group;
    int code = 0, zero = 1 << (p.bits - 1);
    const int64_t place = output * p.groups() * p.group + input;
    if (bits == 8) {
      code = codes[static_cast<size_t>(place)] - base;
      if (p.zeros) zero = zeros[static_cast<size_t>(output * p.groups() + group)];
    } else {
      code = codes[static_cast<size_t>(place / 2)] >> place % 2 * 4 & 0xF;
      const size_t at = static_cast<size_t>(output * ((p.groups() + 1) / 2) + group / 2);
      if (p.zeros) zero = zeros[at] >> group % 2 * 4 & 0xF;
    }
    const size_t at = static_cast<size_t>(output * p.groups() + group);
    if (p.minima) return static_cast<double>(scales[at]) * code + static_cast<double>(minima[at]);
    return static_cast<double>(scales[at]) * (code - zero);
  }
  // How large what is added for a weight is: a code's part and the minimum may cancel each other.
  double size(int64_t output, int64_t input) const {
    const double whole = weight(output, input);
    if (!packing.minima) return std::fabs(whole);
    const size_t at = static_cast<size_t>(output * packing.groups() + input / packing.group);
    const double low = static_cast<double>(minima[at]);
    return std::fabs(whole - low) + std::fabs(low);
  }
  Unpacked unpacked() const {
    return {codes.data(), scales.data(), packing.zeros ? zeros.data() : nullptr,
            packing.minima ? minima.data() : nullptr, bits, base};
  }
};

// Bytes that begin at a multiple of 64.
struct Bytes {
  std::vector<uint8_t> memory;
  explicit Bytes(int64_t size) : memory(static_cast<size_t>(size + kLine)) {}
  uint8_t* data() {
    return memory.data() + (kLine - reinterpret_cast<uintptr_t>(memory.data()) % kLine) % kLine;
  }
};

double act(Gate gate, double x) {
  const double t = gate == Gate::kSilu ? x : 2 * std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
  return x / (1 + std::exp(-t));
}

struct Case {
  std::vector<Matrix> matrices;  // one, or two with a gate
  Gate gate = Gate::kNone;
  std::vector<float> x, bias, residual, gain;
  int64_t rows = 1;
};

Case random_case(std::mt19937& random) {
  Case c;
  const int64_t groups[] = {16, 32, 32, 32, 64, 128, 256};
  const int widths[] = {4, 5, 6, 8};
  Packing p{pick(random, 1, 200), pick(random, 1, 700), widths[random() % 4], groups[random() % 7],
            random() % 2 == 0,    random() % 2 == 0};
  p.minima = !p.zeros && random() % 2;
  if (fault(p)) p.bits = 6;
  if (random() % 3 == 0) c.gate = random() % 2 ? Gate::kSilu : Gate::kGelu;
  if (c.gate != Gate::kNone) p.outputs = 16 * pick(random, 1, 9);
  for (int i = 0; i < (c.gate == Gate::kNone ? 1 : 2); i++) c.matrices.emplace_back(p, random);
  c.rows = random() % 3 ? pick(random, 1, 40) : 1;
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < c.rows * p.inputs; i++) c.x.push_back(normal(random) * std::exp(normal(random)));
  if (random() % 4 == 0) std::fill_n(c.x.begin(), std::min<int64_t>(p.inputs, 40), 0.0f);  // a block of nothing
  if (c.gate == Gate::kNone && random() % 2) {
    for (int64_t i = 0; i < p.outputs; i++) c.bias.push_back(normal(random));
  }
  if (c.gate == Gate::kNone && random() % 2) {
    for (int64_t i = 0; i < c.rows * p.outputs; i++) c.residual.push_back(normal(random));
  }
  if (random() % 2) {
    for (int64_t i = 0; i < p.inputs; i++) c.gain.push_back(1 + 0.1f * normal(random));
  }
  return c;
}

// One row of inputs, normed where the case asks for it.
std::vector<double> normed(const Case& c, int64_t row) {
  const int64_t count = c.matrices[0].packing.inputs;
  std::vector<double> x(c.x.begin() + row * count, c.x.begin() + (row + 1) * count);
  if (c.gain.empty()) return x;
  double sum = 0;
  for (double value : x) sum += value * value;
  const double norm = 1 / std::sqrt(sum / static_cast<double>(count) + static_cast<double>(kEpsilon));
  for (size_t i = 0; i < x.size(); i++) x[i] *= norm * static_cast<double>(c.gain[i]);
  return x;
}

const float* there(const std::vector<float>& x) { return x.empty() ? nullptr : x.data(); }

// One row of inputs as the kernels round it; empty where they do not round to the nearest byte of a block's largest.
std::vector<double> rounded(const Case& c, const MatMulKernels& kernels, int64_t row) {
  Product product{};
  product.packing = c.matrices[0].packing;
  product.gain = there(c.gain);
  product.epsilon = kEpsilon;
  const Packing& p = product.packing;
  std::vector<int8_t> codes(static_cast<size_t>(p.padded()));
  std::vector<float> scales(static_cast<size_t>(p.blocks()));
  std::vector<int32_t> offsets(scales.size());
  std::vector<float> totals(scales.size());
  kernels.encode(c.x.data() + row * p.inputs, product, 0,
                 {0, 1, 1, true, codes.data(), scales.data(), offsets.data(), totals.data()});
  std::vector<double> x = normed(c, row);
  for (size_t first = 0; first < x.size(); first += static_cast<size_t>(p.block())) {
    const size_t last = std::min(first + static_cast<size_t>(p.block()), x.size());
    double limit = 0;
    for (size_t i = first; i < last; i++) limit = std::max(limit, std::fabs(x[i]));
    const double scale = scales[first / static_cast<size_t>(p.block())];
    if (std::fabs(scale - limit / 127) > 1e-6 * scale) return {};
    for (size_t i = first; i < last; i++) {
      if (std::fabs(codes[i] * scale - x[i]) > 0.5001 * scale) return {};
      x[i] = codes[i] * scale;
    }
  }
  return x;
}

std::vector<float> compute(const Case& c, const MatMulKernels& kernels) {
  Packing p = c.matrices[0].packing;
  const int64_t count = static_cast<int64_t>(c.matrices.size());
  Bytes weights(p.bytes() * count);
  for (int64_t i = 0; i < count; i++) {
    const Unpacked matrix = c.matrices[static_cast<size_t>(i)].unpacked();
    const int64_t half = p.panels() / 2;  // in two parts, as the loader may
    pack(p, matrix, 0, half, count, weights.data() + i * p.panel_bytes());
    pack(p, matrix, half, p.panels(), count, weights.data() + i * p.panel_bytes());
  }
  std::vector<float> out(static_cast<size_t>(c.rows * p.outputs), std::numeric_limits<float>::quiet_NaN());
  p.outputs *= count;
  multiply({p, weights.data(), c.rows, c.x.data(), there(c.bias), there(c.residual), there(c.gain), kEpsilon, c.gate,
            out.data()},
           kernels, kThreads);
  return out;
}

// One output in float64, and the size of what may be lost in it.
struct Sum {
  double value = 0, size = 0;
};

Sum product(const Matrix& matrix, const std::vector<double>& x, int64_t output) {
  Sum sum;
  for (size_t i = 0; i < x.size(); i++) {
    sum.value += matrix.weight(output, static_cast<int64_t>(i)) * x[i];
    sum.size += matrix.size(output, static_cast<int64_t>(i)) * std::fabs(x[i]);
  }
  return sum;
}

Sum expected(const Case& c, const std::vector<double>& x, int64_t row, int64_t output) {
  Sum sum = product(c.matrices[0], x, output);
  const size_t place = static_cast<size_t>(row * c.matrices[0].packing.outputs + output);
  auto add = [&sum](double term) {
    sum.value += term;
    sum.size += std::fabs(term);
  };
  if (!c.residual.empty()) add(static_cast<double>(c.residual[place]));
  if (!c.bias.empty()) add(static_cast<double>(c.bias[static_cast<size_t>(output)]));
  if (c.gate == Gate::kNone) return sum;
  const Sum up = product(c.matrices[1], x, output);
  const double gated = act(c.gate, sum.value);
  return {gated * up.value, 2 * sum.size * std::fabs(up.value) + up.size * std::fabs(gated) + sum.size * up.size};
}

// Every weight as it is read singly: the nearest float32, where no minimum is added.
bool check_unpacked(const Case& c, unsigned seed) {
  const Matrix& matrix = c.matrices[0];
  const Packing& p = matrix.packing;
  Bytes weights(p.bytes());
  pack(p, matrix.unpacked(), 0, p.panels(), 1, weights.data());
  std::vector<float> row(static_cast<size_t>(p.inputs));
  for (int64_t output = 0; output < p.outputs; output++) {
    unpack(p, weights.data(), output, row.data());
    for (int64_t i = 0; i < p.inputs; i++) {
      const double want = matrix.weight(output, i), got = static_cast<double>(row[static_cast<size_t>(i)]);
      if (p.minima ? std::fabs(got - want) > 1e-6 * matrix.size(output, i) : got != static_cast<float>(want)) {
        std::printf("FAILED seed %u: weight %d of output %d is %g for %g\n", seed, static_cast<int>(i),
                    static_cast<int>(output), got, want);
        return false;
      }
    }
  }
  return true;
}

void print_failure(const Case& c, const MatMulKernels& kernels, unsigned seed) {
  const Packing& p = c.matrices[0].packing;
  std::printf("FAILED %s seed %u: %d x %d, %d bits, group %d, zeros %d, half %d, minima %d, gate %d, %d rows",
              kernels.name, seed, static_cast<int>(p.outputs), static_cast<int>(p.inputs), p.bits,
              static_cast<int>(p.group), p.zeros, p.half, p.minima, static_cast<int>(c.gate), static_cast<int>(c.rows));
}

bool check(const Case& c, const MatMulKernels& kernels, unsigned seed) {
  const std::vector<float> out = compute(c, kernels);
  const Packing& p = c.matrices[0].packing;
  double worst = 0;
  for (int64_t row = 0; row < c.rows; row++) {
    const std::vector<double> x = rounded(c, kernels, row);
    if (x.empty()) {
      print_failure(c, kernels, seed);
      std::printf(": row %d is not rounded as it should be\n", static_cast<int>(row));
      return false;
    }
    for (int64_t i = 0; i < p.outputs; i++) {
      const Sum want = expected(c, x, row, i);
      const double error = std::fabs(static_cast<double>(out[static_cast<size_t>(row * p.outputs + i)]) - want.value);
      worst = std::max(worst, want.size == 0 ? error : error / want.size);
      if (!(error <= kTolerance * want.size)) {
        print_failure(c, kernels, seed);
        std::printf(" in row %d, output %d: %g for %g\n", static_cast<int>(row), static_cast<int>(i),
                    static_cast<double>(out[static_cast<size_t>(row * p.outputs + i)]), want.value);
        return false;
      }
    }
  }
  worst_error = std::max(worst_error, worst);
  return true;
}

// A number that is not finite must come out as such, and only in its own row.
bool check_not_finite(const MatMulKernels& kernels) {
  std::mt19937 random(2);
  bool good = true;
  for (float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), -1e38f * 10}) {
    for (bool minima : {false, true}) {
      Case c;
      c.matrices.emplace_back(Packing{40, 100, 4, 32, !minima, false, minima}, random);
      c.rows = 5;
      for (int i = 0; i < 500; i++) c.x.push_back(static_cast<float>(random() % 7) - 3);
      c.x[200 + 31] = bad;
      c.x[200 + 35] = 0;
      const std::vector<float> out = compute(c, kernels);
      for (size_t i = 0; i < out.size(); i++) good = good && std::isfinite(out[i]) == (i / 40 != 2);
    }
  }
  if (!good) std::printf("FAILED %s: inputs that are not finite\n", kernels.name);
  return good;
}

// Inputs whose sums are as large as can be, on codes that are too.
bool check_extremes(const MatMulKernels& kernels) {
  std::mt19937 random(3);
  bool good = true;
  for (int bits : {4, 5, 6, 8}) {
    for (int sign : {-1, 1}) {
      Case c;
      c.matrices.emplace_back(Packing{16, 64, bits, 32, true, false}, random);
      Matrix& matrix = c.matrices[0];
      const int top = matrix.bits == 4 ? 255 : matrix.base + (1 << bits) - 1;
      std::fill(matrix.codes.begin(), matrix.codes.end(), static_cast<uint8_t>(top));
      std::fill(c.matrices[0].zeros.begin(), c.matrices[0].zeros.end(), sign > 0 ? uint8_t{0} : uint8_t{255});
      c.rows = 2;
      c.x.assign(128, static_cast<float>(sign) * 3);
      good = check(c, kernels, 0) && good;
    }
  }
  return good;
}

bool check_refusals() {
  bool good = !fault({16, 64, 4, 32, true, false});
  for (const Packing& p : {Packing{0, 64, 4, 32, true, false}, Packing{16, 0, 4, 32, true, false},
                           Packing{16, 64, 2, 32, true, false}, Packing{16, 64, 7, 32, true, false},
                           Packing{16, 64, 5, 16, true, false}, Packing{16, 64, 4, 32, true, false, true},
                           Packing{16, 64, 4, 8, true, false},
                           Packing{16, 64, 4, 48, true, false}, Packing{int64_t{1} << 40, 64, 4, 32, true, false}}) {
    good = good && fault(p);
  }
  if (!good) std::printf("FAILED: a packing that does not fit was not refused\n");
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  int failures = !check_refusals();
  for (int i = 0; i < rounds; i++) {
    std::mt19937 random(seed + static_cast<unsigned>(i));
    failures += !check_unpacked(random_case(random), seed + static_cast<unsigned>(i));
  }
  const char* previous = "";
  for (const char* limit : {"avx512", "avxvnni", "avx2", "plain"}) {
    const MatMulKernels& kernels = *best_matmul(limit);
    if (!std::strcmp(previous, kernels.name)) continue;
    previous = kernels.name;
    worst_error = 0;
    failures += !check_not_finite(kernels) + !check_extremes(kernels);
    for (int i = 0; i < rounds; i++) {
      std::mt19937 random(seed + static_cast<unsigned>(i));
      failures += !check(random_case(random), kernels, seed + static_cast<unsigned>(i));
    }
    std::printf("%-12s %d cases, largest error %.2g of the terms' sum\n", kernels.name, rounds, worst_error);
  }
  std::printf(failures ? "%d FAILED\n" : "all good\n", failures);
  return failures != 0;
}
