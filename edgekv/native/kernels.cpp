// Which attention kernels this processor runs.
#include "kernels.h"

#include <cstring>

#include "cpu.h"

namespace edgekv {
namespace {

struct Choice {
  const char* name;
  bool (*runs)();
  const Kernels* (*kernels)(CacheType);
};

constexpr Choice kChoices[] = {
    {"avx512", has_avx512, avx512_kernels}, {"avx2", has_avx2, avx2_kernels}, {"neon", has_dotprod, neon_kernels}};

}  // namespace

const Kernels* best_kernels(CacheType type, const char* limit) {
  bool allowed = limit == nullptr;
  for (const Choice& choice : kChoices) {
    allowed = allowed || std::strcmp(limit, choice.name) == 0;
    if (!allowed || !choice.runs()) continue;
    if (const Kernels* kernels = choice.kernels(type)) return kernels;
  }
  return plain_kernels(type);
}

}  // namespace edgekv
