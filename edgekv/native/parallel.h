#pragma once

#include <cstddef>

namespace edgekv {

// Runs body(argument, i) for i in 0 .. count - 1, in any order, on whatever threads there are.
struct Parallel {
  void* context;
  void (*run)(void* context, void (*body)(void*, size_t), size_t count, void* argument);
};

}  // namespace edgekv
