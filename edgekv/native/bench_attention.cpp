// Attention alone beside a plain read of the same bytes, interleaved in one run.
//
//     bench_attention [slots] [layers] [heads] [kv heads] [head size] [tokens] [threads] [instruction set]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"

using namespace edgekv;

namespace {

// Threads that spin between jobs, as ONNX Runtime's do.
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

struct Read {
  const int8_t* data;
  size_t bytes, pieces;
  std::atomic<int64_t> sum{0};
};

void read_piece(void* argument, size_t index) {
  Read& read = *static_cast<Read*>(argument);
  const size_t size = read.bytes / read.pieces / 64 * 64;
  const int8_t* p = read.data + index * size;
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

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
  return x[x.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  auto argument = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int slots = argument(1, 7168) / kBlock * kBlock, layers = argument(2, 30), heads = argument(3, 9);
  const int kv_heads = argument(4, 3), dim = argument(5, 64), tokens = argument(6, 1), threads = argument(7, 2);
  const int rounds = tokens > 1 ? 9 : 61;
  const Kernels& kernels = *best_kernels(CacheType::kInt8, argc > 8 ? argv[8] : nullptr);
  const size_t part = static_cast<size_t>(kv_heads) * slots * (dim + kFactorBytes);
  std::vector<int8_t> memory(2 * part * layers + 64);
  int8_t* cache = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;  // as the engine has it
  std::mt19937 random(1);
  for (int8_t& x : memory) x = static_cast<int8_t>(random() % 255 - 127);
  for (size_t head = 0; head < size_t{2} * layers * kv_heads; head++) {  // factors of about 1
    int8_t* factors = cache + head * slots * (dim + kFactorBytes) + static_cast<size_t>(slots) * dim;
    for (int slot = 0; slot < slots; slot++) factors[2 * slot + 1] = 63;
  }
  std::vector<float> qkv(static_cast<size_t>(tokens) * (heads + 2 * kv_heads) * dim), scale(kv_heads * dim, 0.02f);
  for (float& x : qkv) x = static_cast<float>(random() % 2001) / 1000.0f - 1;
  std::vector<float> angle(static_cast<size_t>(tokens) * dim / 2, 0.7f), out(static_cast<size_t>(tokens) * heads * dim);
  Pool pool(threads);
  const Parallel parallel{&pool, Pool::run};
  Problem p{};
  p.type = CacheType::kInt8;
  p.heads = heads, p.kv_heads = kv_heads, p.dim = dim, p.tokens = tokens, p.slots = slots;
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
  p.half = dim / 2;
  p.state = {slots - tokens, 0, 4, slots, 0};
  p.qkv = qkv.data(), p.k_scale = p.v_scale = scale.data(), p.out = out.data();
  p.cos = p.sin = p.cos_pinned = p.sin_pinned = angle.data();
  if (const char* what = fault(p)) return std::printf("%s\n", what), 1;
  // Layer by layer, because on a busy machine no whole token goes undisturbed.
  std::vector<std::vector<double>> attention(layers), plain(layers);
  for (int round = 0; round < rounds; round++) {
    for (int layer = 0; layer < layers; layer++) {
      p.keys = cache + 2 * part * layer;
      p.values = cache + 2 * part * layer + part;
      double start = now();
      cached_attention(p, kernels, parallel);
      attention[layer].push_back(now() - start);
    }
    for (int layer = 0; layer < layers; layer++) {
      Read read{cache + 2 * part * layer, 2 * part, 16};
      double start = now();
      Pool::run(&pool, read_piece, read.pieces, &read);
      plain[layer].push_back(now() - start);
    }
  }
  const double bytes = static_cast<double>(2 * part * layers);
  std::printf("%s, %d slots, %d layers, %d/%d heads of %d, %d tokens, %d threads\n", kernels.name, slots, layers, heads,
              kv_heads, dim, tokens, threads);
  for (const char* what : {"fastest", "median"}) {
    auto of = [&](const std::vector<std::vector<double>>& times) {
      double sum = 0;
      for (const auto& x : times) sum += *what == 'f' ? *std::min_element(x.begin(), x.end()) : median(x);
      return sum;
    };
    const double a = of(attention), r = of(plain);
    std::printf("  %s: plain read %.2f ms (%.1f GB/s), attention %.2f ms, ratio %.2f; a token %.3f ms\n", what, r * 1e3,
                bytes / r / 1e9, a * 1e3, a / r, a * 1e3 / tokens);
  }
}
