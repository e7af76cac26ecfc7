// Which attention kernels this processor runs.
#include "kernels.h"

#include "choice.h"
#include "cpu.h"

namespace edgekv {
namespace {

constexpr Choice<const Kernels* (*)(CacheType)> kChoices[] = {
    {"avx512", has_avx512, avx512_kernels},
    {"avxvnni", has_avxvnni, avxvnni_kernels},
    {"avx2", has_avx2, avx2_kernels},
    {"neon", has_dotprod, neon_kernels},
};

}  // namespace

const Kernels* best_kernels(CacheType type, const char* limit) {
  const auto* kernels = first_choice(kChoices, limit, type);
  return kernels ? kernels : plain_kernels(type);
}

}  // namespace edgekv
