// Products alone: multiply-adds a second of the usual shapes, and at few rows beside a plain read of the same bytes;
// then all products of a model in turn.
//
//     bench_matmul [threads] [instruction set, or -] [rows]...
//
// Weights are read from so many copies that no cache holds them, as in a model. From the environment, each with any
// value: HUGE weights in large pages, as the engine has them; NEAR one copy of them, which a cache holds; FASTEST the
// least time instead of the median. MODELS names the models whose products are measured, such as "135M 1.5B"; without
// it all are.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <sys/mman.h>

#include "bench_pool.h"
#include "matmul.h"

using namespace edgekv;

namespace {

constexpr int64_t kFar = int64_t{160} << 20;  // bytes of weights in all, so that no cache holds them
constexpr size_t kLargePage = size_t{2} << 20;
constexpr int64_t kReadRows = 4;  // from more on the memory is no limit

struct Shape {
  int64_t outputs, inputs;
  int bits;
  bool minima = false;
  Gate gate = Gate::kNone;

  Packing packing() const { return {outputs, inputs, bits, 32, false, true, minima}; }
};

struct Model {
  const char* name;
  int layers;
  std::vector<Shape> shapes;  // of a layer
};

const Model kModels[] = {
    {"135M", 30, {{960, 576, 4, true}, {576, 576, 4, true}, {3072, 576, 4, true, Gate::kSilu}, {576, 1536, 4, true}}},
    {"135M-Q4_0", 30, {{960, 576, 4}, {576, 576, 4}, {3072, 576, 4, false, Gate::kSilu}, {576, 1536, 4}}},
    {"135M-8", 30, {{960, 576, 8}, {576, 576, 8}, {3072, 576, 8, false, Gate::kSilu}, {576, 1536, 8}}},
    {"1.5B", 28, {{1536, 1536, 4}, {256, 1536, 4}, {17920, 1536, 4, false, Gate::kSilu}, {1536, 8960, 4}}},
    {"heads", 1, {{49152, 576, 8}, {151936, 1536, 4}}},
    {"widths", 1, {{3072, 576, 5}, {3072, 576, 6}, {3072, 576, 5, true}, {16, 576, 4}, {16, 1536, 4}}},
};

bool wanted(const char* name) { return std::getenv(name) != nullptr; }

bool chosen(const Model& model) {
  const char* names = std::getenv("MODELS");
  return !names || (" " + std::string(names) + " ").find(" " + std::string(model.name) + " ") != std::string::npos;
}

class Weights {
 public:
  explicit Weights(int64_t size) {
    const size_t bytes = (static_cast<size_t>(size) + kLargePage) / kLargePage * kLargePage;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kLargePage, bytes));
    if (wanted("HUGE")) madvise(data_, bytes, MADV_HUGEPAGE);
    std::fill_n(data_, size, uint8_t{0x21});
  }
  ~Weights() { std::free(data_); }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  const uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
};

// Seconds that a call takes: the median of `rounds`, or the least.
template <class Body>
double seconds(int64_t rounds, const Body& body) {
  std::vector<double> times;
  for (int64_t i = 0; i < rounds; i++) {
    const double start = now();
    body(i);
    times.push_back(now() - start);
  }
  return wanted("FASTEST") ? *std::min_element(times.begin(), times.end()) : median(times);
}

std::vector<float> inputs(int64_t count) {
  std::mt19937 random(1);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x) value = static_cast<float>(random() % 2001) / 1000.0f - 1;
  return x;
}

class Bench {
 public:
  Bench(int64_t rows, const MatMulKernels& kernels, Pool& pool) : rows_(rows), kernels_(kernels), pool_(pool) {}

  void shape(const Shape& shape) {
    const int64_t size = shape.packing().bytes(), copies = wanted("NEAR") ? 1 : kFar / size + 1;
    const int64_t rounds = rows_ == 1 ? std::max<int64_t>(copies * 2, 200) : rows_ < 64 ? 101 : 31;
    const Weights weights(size * copies);
    reserve(shape);
    const auto copy = [&](int64_t i) { return weights.data() + i % copies * size; };
    const double time = seconds(rounds, [&](int64_t i) { run(shape, copy(i)); });
    const double work = static_cast<double>(rows_ * shape.outputs * shape.inputs);
    std::printf("%6d x %-5d %d bits%s %4d rows: %8.1f us, %6.1f G/s, %4.1f GB/s", static_cast<int>(shape.outputs),
                static_cast<int>(shape.inputs), shape.bits, shape.minima ? " + m" : "    ", static_cast<int>(rows_),
                time * 1e6, work / time / 1e9, static_cast<double>(size) / time / 1e9);
    if (rows_ <= kReadRows) {
      std::printf(", %.2f of a read", time / seconds(rounds, [&](int64_t i) { read(copy(i), size); }));
    }
    std::printf("\n");
  }

  // All products of all layers.
  void model(const Model& model) {
    int64_t size = 0, rounds = rows_ < 64 ? 21 : 7;
    for (const Shape& shape : model.shapes) size += shape.packing().bytes();
    for (const Shape& shape : model.shapes) reserve(shape);
    const Weights weights(size * model.layers);
    const double time = seconds(rounds, [&](int64_t) {
      const uint8_t* place = weights.data();
      for (int layer = 0; layer < model.layers; layer++) {
        for (const Shape& shape : model.shapes) {
          run(shape, place);
          place += shape.packing().bytes();
        }
      }
    });
    std::printf("%d layers of %-14s %4d rows: %8.2f ms", model.layers, model.name, static_cast<int>(rows_), time * 1e3);
    if (rows_ <= kReadRows) {
      const double plain = seconds(rounds, [&](int64_t) { read(weights.data(), size * model.layers); });
      std::printf(", %4.1f GB/s, %.2f of a read", static_cast<double>(size * model.layers) / time / 1e9, time / plain);
    }
    std::printf("\n");
  }

 private:
  void reserve(const Shape& shape) {
    if (x_.size() < static_cast<size_t>(rows_ * shape.inputs)) x_ = inputs(rows_ * shape.inputs);
    out_.resize(std::max(out_.size(), static_cast<size_t>(rows_ * shape.outputs)));
  }
  void run(const Shape& shape, const uint8_t* weights) {
    const float* none = nullptr;
    multiply({shape.packing(), weights, rows_, x_.data(), none, none, none, 0, shape.gate, out_.data()}, kernels_,
             Parallel{&pool_, Pool::run});
  }
  void read(const uint8_t* weights, int64_t size) {
    Read read{weights, static_cast<size_t>(size), 16};
    Pool::run(&pool_, read_piece, read.pieces, &read);
  }

  int64_t rows_;
  const MatMulKernels& kernels_;
  Pool& pool_;
  std::vector<float> x_, out_;
};

}  // namespace

int main(int argc, char** argv) {
  Pool pool(argc > 1 ? std::atoi(argv[1]) : 2);
  const MatMulKernels* kernels = best_matmul(argc > 2 && *argv[2] != '-' ? argv[2] : nullptr);
  std::vector<int64_t> rows{1, 16, 128};
  if (argc > 3) rows.clear();
  for (int i = 3; i < argc; i++) rows.push_back(std::atoi(argv[i]));
  std::printf("%s\n", kernels->name);
  for (const Model& model : kModels) {
    for (int64_t count : rows) {
      if (!chosen(model)) continue;
      Bench bench(count, *kernels, pool);
      for (const Shape& shape : model.shapes) bench.shape(shape);
      if (model.layers > 1) bench.model(model);
    }
  }
}
