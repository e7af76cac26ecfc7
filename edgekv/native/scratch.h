// Memory for partial results, kept between calls.
#pragma once

#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

namespace edgekv {

// A session runs its nodes one after another, so one piece serves all its layers; sessions on several threads each take
// their own. Allocates only when more is asked for than ever before.
class Scratch {
 public:
  explicit Scratch(size_t floats) {
    std::lock_guard<std::mutex> lock(mutex());
    auto& pool = idle();
    if (!pool.empty()) {
      memory_ = std::move(pool.back());
      pool.pop_back();
    }
    if (memory_.size() < floats) memory_.resize(floats);
  }
  ~Scratch() {
    std::lock_guard<std::mutex> lock(mutex());
    idle().push_back(std::move(memory_));
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* data() { return memory_.data(); }

 private:
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::vector<std::vector<float>>& idle() {
    static std::vector<std::vector<float>> instance;
    return instance;
  }
  std::vector<float> memory_;
};

}  // namespace edgekv
