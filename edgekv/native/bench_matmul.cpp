// Products alone: multiply-adds a second of the usual shapes, and at one row beside a plain read of the same bytes.
//
//     bench_matmul [threads] [instruction set]
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sys/mman.h>

#include "bench_pool.h"
#include "matmul.h"

using namespace edgekv;

namespace {

constexpr size_t kFar = size_t{160} << 20;  // bytes of weights in all, so that no cache holds them

struct Shape {
  int64_t outputs, inputs;
  int bits;
  bool minima = false;
};

void bench(const Shape& shape, int64_t rows, const MatMulKernels& kernels, Pool& pool) {
  const Packing packing{shape.outputs, shape.inputs, shape.bits, 32, false, true, shape.minima};
  const size_t size = static_cast<size_t>(packing.bytes()), copies = rows == 1 && !std::getenv("NEAR") ? kFar / size + 1 : 1;
  uint8_t* weights = static_cast<uint8_t*>(std::aligned_alloc(2 << 20, (size * copies + (2 << 20)) >> 21 << 21));
  if (std::getenv("HUGE")) madvise(weights, (size * copies + (2 << 20)) >> 21 << 21, MADV_HUGEPAGE);
  std::fill_n(weights, size * copies, 0x21);
  std::vector<float> x(static_cast<size_t>(rows * shape.inputs)), out(static_cast<size_t>(rows * shape.outputs));
  std::mt19937 random(1);
  for (float& value : x) value = static_cast<float>(random() % 2001) / 1000.0f - 1;
  const Parallel parallel{&pool, Pool::run};
  std::vector<double> times, reads;
  const size_t rounds = rows == 1 ? std::max<size_t>(copies * 2, 200) : 31;
  for (size_t i = 0; i < rounds; i++) {
    const uint8_t* matrix = weights + i % copies * size;
    const double start = now();
    multiply({packing, matrix, rows, x.data(), nullptr, nullptr, nullptr, 0, Gate::kNone, out.data()}, kernels, parallel);
    times.push_back(now() - start);
  }
  for (size_t i = 0; i < rounds && rows == 1; i++) {
    Read read{weights + i % copies * size, size, 16};
    const double start = now();
    Pool::run(&pool, read_piece, read.pieces, &read);
    reads.push_back(now() - start);
  }
  std::free(weights);
  const double time = std::getenv("FASTEST") ? *std::min_element(times.begin(), times.end()) : median(times), work = static_cast<double>(rows * shape.outputs * shape.inputs);
  std::printf("%6lld x %-5lld %d bits%s %4lld rows: %8.1f us, %6.1f G/s", static_cast<long long>(shape.outputs),
              static_cast<long long>(shape.inputs), shape.bits, shape.minima ? " + m" : "    ", static_cast<long long>(rows), time * 1e6,
              work / time / 1e9);
  if (rows == 1) std::printf(", %4.1f GB/s, %.2f of a read", static_cast<double>(size) / time / 1e9, time / median(reads));
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  Pool pool(argc > 1 ? std::atoi(argv[1]) : 2);
  const MatMulKernels* kernels = best_matmul(argc > 2 ? argv[2] : nullptr);
  if (!kernels) return std::printf("there are no kernels for this processor\n"), 1;
  std::printf("%s\n", kernels->name);
  for (const Shape& shape : {Shape{960, 576, 4}, Shape{3072, 576, 4}, Shape{576, 1536, 4}, Shape{576, 576, 4},
                             Shape{49152, 576, 8}, Shape{8960, 1536, 4}, Shape{3072, 576, 5},
                             Shape{3072, 576, 6}, Shape{3072, 576, 8}, Shape{3072, 576, 4, true}, Shape{3072, 576, 5, true}, Shape{16, 576, 4}, Shape{16, 1536, 4}}) {
    for (int64_t rows : {1, 16, 128}) {
      if (std::getenv("ONE") && (rows > 1 || shape.outputs == 960 || shape.outputs > 4000)) continue;
      if (rows == 1 || shape.outputs < 40000) bench(shape, rows, *kernels, pool);
    }
  }
}
