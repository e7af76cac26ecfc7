// What the benchmark programs share: threads that spin between jobs, as ONNX Runtime's do, a plain read, and a clock.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace edgekv {

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this] { loop(); });
  }
  ~Pool() {
    stop_ = true;
    for (auto& worker : workers_) worker.join();
  }
  static void run(void* self, void (*body)(void*, size_t), size_t count, void* argument) {
    static_cast<Pool*>(self)->run(body, count, argument);
  }

 private:
  void run(void (*body)(void*, size_t), size_t count, void* argument) {
    body_ = body;
    argument_ = argument;
    count_ = count;
    next_ = 0;
    done_ = 0;
    generation_++;
    work();
    while (done_ < static_cast<int>(workers_.size())) {
    }
  }
  void work() {
    for (size_t i = next_++; i < count_; i = next_++) body_(argument_, i);
  }
  void loop() {
    for (int seen = 0; !stop_;) {
      if (generation_ == seen) continue;
      seen = generation_;
      work();
      done_++;
    }
  }
  std::vector<std::thread> workers_;
  void (*body_)(void*, size_t) = nullptr;
  void* argument_ = nullptr;
  size_t count_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<int> done_{0}, generation_{0};
  std::atomic<bool> stop_{false};
};

// A plain read of memory, to compare with.
struct Read {
  const void* data;
  size_t bytes, pieces;
  std::atomic<int64_t> sum{0};
};

inline void read_piece(void* argument, size_t index) {
  Read& read = *static_cast<Read*>(argument);
  const size_t size = read.bytes / read.pieces / 64 * 64;
  const char* p = static_cast<const char*>(read.data) + index * size;
  int64_t a = 0, b = 0, c = 0, d = 0;
  for (size_t i = 0; i < size; i += 64) {  // one word a cache line, and the compiler cannot leave it out
    int64_t x[8];
    __builtin_memcpy(x, p + i, 64);
    a += x[0] ^ x[4];
    b += x[1] ^ x[5];
    c += x[2] ^ x[6];
    d += x[3] ^ x[7];
  }
  read.sum += a + b + c + d;
}

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

}  // namespace edgekv
