// Attention alone beside a plain read of the same bytes, interleaved in one run.
//
//     bench_attention [slots] [layers] [heads] [kv heads] [head size] [tokens] [threads] [instruction set] [cache]
//                     [pairs]
//
// where the instruction set may be - for the fastest, the cache is int8, k8v4, int4 or fp8, and keys are held less the
// mean of so many pairs of channels (0; half the head size in a model with an int4 or fp8 cache).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "bench_pool.h"

using namespace edgekv;

int main(int argc, char** argv) {
  auto argument = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int slots = argument(1, 7168) / kBlock * kBlock, layers = argument(2, 30), heads = argument(3, 9);
  const int kv_heads = argument(4, 3), dim = argument(5, 64), tokens = argument(6, 1), threads = argument(7, 2);
  const int rounds = tokens > 1 ? 9 : 61;
  const std::string cache_name = argc > 9 ? argv[9] : "int8";
  const CacheType type = cache_name == "k8v4"   ? CacheType::kK8V4
                         : cache_name == "int4" ? CacheType::kInt4
                         : cache_name == "fp8"  ? CacheType::kFp8
                                                : CacheType::kInt8;
  const Kernels& kernels = *best_kernels(type, argc > 8 && *argv[8] != '-' ? argv[8] : nullptr);
  const int factor = type == CacheType::kFp8 ? 0 : kFactorBytes;
  const bool half_keys = type == CacheType::kInt4, half_values = half_keys || type == CacheType::kK8V4;
  const size_t row[2] = {static_cast<size_t>((half_keys ? dim / 2 : dim) + factor),
                         static_cast<size_t>((half_values ? dim / 2 : dim) + factor)};
  const size_t part[2] = {kv_heads * slots * row[0], kv_heads * slots * row[1]}, both = part[0] + part[1];
  std::vector<int8_t> memory(both * layers + 64);
  int8_t* cache = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;  // as the engine has it
  std::mt19937 random(1);
  for (int8_t& x : memory) x = static_cast<int8_t>(random() % 255 - 127);
  for (int head = 0; head < layers * kv_heads && factor; head++) {  // factors of about 1
    for (int which = 0; which < 2; which++) {
      int8_t* rows = cache + head / kv_heads * both + which * part[0] + head % kv_heads * slots * row[which];
      for (int slot = 0; slot < slots; slot++) rows[slots * (row[which] - factor) + 2 * slot + 1] = 63;
    }
  }
  std::vector<float> qkv(static_cast<size_t>(tokens) * (heads + 2 * kv_heads) * dim), scale(kv_heads * dim, 0.02f);
  for (float& x : qkv) x = static_cast<float>(random() % 2001) / 1000.0f - 1;
  std::vector<float> angle(static_cast<size_t>(tokens) * dim / 2, 0.7f), out(static_cast<size_t>(tokens) * heads * dim);
  Pool pool(threads);
  const Parallel parallel{&pool, Pool::run};
  Problem p{};
  p.type = type;
  p.heads = heads, p.kv_heads = kv_heads, p.dim = dim, p.tokens = tokens, p.slots = slots;
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
  p.half = dim / 2;
  p.state = {slots - tokens, 0, 4, slots, 0};
  p.qkv = qkv.data(), p.k_scale = p.v_scale = scale.data(), p.out = out.data();
  p.cos = p.sin = p.cos_pinned = p.sin_pinned = angle.data();
  p.turned = argument(10, 0);
  std::vector<float> centre(kv_heads * dim, 0.1f), turns(size_t{2} * p.turned * slots + 1, 0.7f);
  std::vector<int8_t> codes(size_t{1} * p.turn_items() * slots, 90);
  std::vector<int64_t> pairs(p.turned + 1);
  for (int i = 0; i < p.turned; i++) pairs[i] = i;
  if (p.turned) p.centre = centre.data(), p.pairs = pairs.data(), p.turns = turns.data();
  if (p.turned && half_keys) p.turn_codes = codes.data();
  if (const char* what = fault(p)) return std::printf("%s\n", what), 1;
  // Layer by layer, because on a busy machine no whole token goes undisturbed.
  std::vector<std::vector<double>> attention(layers), plain(layers);
  for (int round = 0; round < rounds; round++) {
    for (int layer = 0; layer < layers; layer++) {
      p.keys = cache + both * layer;
      p.values = cache + both * layer + part[0];
      double start = now();
      cached_attention(p, kernels, parallel);
      attention[layer].push_back(now() - start);
    }
    for (int layer = 0; layer < layers; layer++) {
      Read read{cache + both * layer, both, 16};
      double start = now();
      Pool::run(&pool, read_piece, read.pieces, &read);
      plain[layer].push_back(now() - start);
    }
  }
  const double bytes = static_cast<double>(both * layers);
  std::printf("%s, %s, %d slots, %d layers, %d/%d heads of %d, %d tokens, %d threads\n", kernels.name,
              cache_name.c_str(), slots, layers, heads, kv_heads, dim, tokens, threads);
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
