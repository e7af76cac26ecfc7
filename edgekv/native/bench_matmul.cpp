// Products alone: multiply-adds a second of the usual shapes, and at one row beside a plain read of the same bytes.
//
//     bench_matmul [threads] [instruction set]
//
// From the environment, each with any value: HUGE weights in large pages, as the engine has them; NEAR one copy of them,
// which a cache holds; FASTEST the least time instead of the median; ONE one row and small matrices alone.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sys/mman.h>

#include "bench_pool.h"
#include "matmul.h"

using namespace edgekv;

namespace {

constexpr size_t kFar = size_t{160} << 20;  // bytes of weights in all, so that no cache holds them
constexpr size_t kLargePage = size_t{2} << 20;

struct Shape {
  int64_t outputs, inputs;
  int bits;
  bool minima = false;
};

constexpr Shape kShapes[] = {
    {960, 576, 4},   {3072, 576, 4}, {576, 1536, 4}, {576, 576, 4},       {49152, 576, 8},     {8960, 1536, 4}, {3072, 576, 5},
    {3072, 576, 6},  {3072, 576, 8}, {3072, 576, 4, true}, {3072, 576, 5, true}, {16, 576, 4},  {16, 1536, 4},
};

bool wanted(const char* name) { return std::getenv(name) != nullptr; }

// As many copies of a matrix as are read in turn.
class Weights {
 public:
  Weights(size_t size, size_t copies) : size_(size), copies_(copies) {
    const size_t bytes = (size * copies + kLargePage) / kLargePage * kLargePage;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kLargePage, bytes));
    if (wanted("HUGE")) madvise(data_, bytes, MADV_HUGEPAGE);
    std::fill_n(data_, size * copies, 0x21);
  }
  ~Weights() { std::free(data_); }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  const uint8_t* copy(size_t i) const { return data_ + i % copies_ * size_; }

 private:
  size_t size_, copies_;
  uint8_t* data_;
};

// Seconds that a call takes: the median of `rounds`, or the least.
template <class Body>
double seconds(size_t rounds, const Body& body) {
  std::vector<double> times;
  for (size_t i = 0; i < rounds; i++) {
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

void bench(const Shape& shape, int64_t rows, const MatMulKernels& kernels, Pool& pool) {
  const Packing packing{shape.outputs, shape.inputs, shape.bits, 32, false, true, shape.minima};
  const size_t size = static_cast<size_t>(packing.bytes());
  const size_t copies = rows == 1 && !wanted("NEAR") ? kFar / size + 1 : 1;
  const size_t rounds = rows == 1 ? std::max<size_t>(copies * 2, 200) : 31;
  const Weights weights(size, copies);
  const std::vector<float> x = inputs(rows * shape.inputs);
  std::vector<float> out(static_cast<size_t>(rows * shape.outputs));
  const Parallel parallel{&pool, Pool::run};
  const double time = seconds(rounds, [&](size_t i) {
    const float *none = nullptr, *in = x.data();
    multiply({packing, weights.copy(i), rows, in, none, none, none, 0, Gate::kNone, out.data()}, kernels, parallel);
  });
  const double work = static_cast<double>(rows * shape.outputs * shape.inputs);
  std::printf("%6d x %-5d %d bits%s %4d rows: %8.1f us, %6.1f G/s", static_cast<int>(shape.outputs),
              static_cast<int>(shape.inputs), shape.bits, shape.minima ? " + m" : "    ", static_cast<int>(rows),
              time * 1e6, work / time / 1e9);
  if (rows == 1) {
    const double plain = seconds(rounds, [&](size_t i) {
      Read read{weights.copy(i), size, 16};
      Pool::run(&pool, read_piece, read.pieces, &read);
    });
    std::printf(", %4.1f GB/s, %.2f of a read", static_cast<double>(size) / time / 1e9, time / plain);
  }
  std::printf("\n");
}

bool chosen(const Shape& shape, int64_t rows) {
  if (wanted("ONE") && (rows > 1 || shape.outputs > 4000)) return false;
  return rows == 1 || shape.outputs < 40000;
}

}  // namespace

int main(int argc, char** argv) {
  Pool pool(argc > 1 ? std::atoi(argv[1]) : 2);
  const MatMulKernels* kernels = best_matmul(argc > 2 ? argv[2] : nullptr);
  if (!kernels) return std::printf("there are no kernels for this processor\n"), 1;
  std::printf("%s\n", kernels->name);
  for (const Shape& shape : kShapes) {
    for (int64_t rows : {1, 16, 128}) {
      if (chosen(shape, rows)) bench(shape, rows, *kernels, pool);
    }
  }
}
