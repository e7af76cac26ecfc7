// The kernels for AVX-VNNI. Compiled with its flag and called only after cpu.cpp has found it.
#include "kernels.h"

#if defined(__AVX2__) && (defined(__AVXVNNI__) || defined(EDGEKV_EVEX) || defined(EDGEKV_AVXVNNI))
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "dot_256.h"

namespace edgekv {
namespace {

constexpr const char* kInstructionSet = "avx-vnni";

#include "kernels_256.inl"

}  // namespace
}  // namespace edgekv

#define EDGEKV_KERNELS avxvnni_kernels
#include "kernels.inl"

#else
namespace edgekv {
const Kernels* avxvnni_kernels(CacheType) { return nullptr; }
}  // namespace edgekv
#endif
