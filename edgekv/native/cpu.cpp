#include "cpu.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(_MSC_VER) && (defined(_M_X64) || defined(_M_IX86))
#include <immintrin.h>
#include <intrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace edgekv {

#if defined(__x86_64__) || defined(__i386__)

bool has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);  // compilers know its name only since GCC 11
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avxvnni() {
#if defined(EDGEKV_EVEX)
  return has_avx512();
#else
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 4);
#endif
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

bool has_dotprod() { return false; }

#elif defined(_MSC_VER) && (defined(_M_X64) || defined(_M_IX86))

namespace {

// The bits of a CPUID register, and whether the system saves the registers in `mask` of XCR0.
struct Cpuid {
  int registers[4];
  Cpuid(int leaf, int sub) { __cpuidex(registers, leaf, sub); }
  bool bit(int reg, int index) const { return registers[reg] >> index & 1; }
};
bool saves(unsigned long long mask) { return Cpuid(1, 0).bit(2, 27) && (_xgetbv(0) & mask) == mask; }

}  // namespace

bool has_avx2() { return saves(0x6) && Cpuid(1, 0).bit(2, 12) && Cpuid(1, 0).bit(2, 29) && Cpuid(7, 0).bit(1, 5); }

bool has_avxvnni() { return has_avx2() && Cpuid(7, 0).registers[0] >= 1 && Cpuid(7, 1).bit(0, 4); }

bool has_avx512() {
  const Cpuid seven(7, 0);
  const bool all = seven.bit(1, 16) && seven.bit(1, 17) && seven.bit(1, 30) && seven.bit(1, 31) && seven.bit(2, 11);
  return all && saves(0xE6);
}

bool has_dotprod() { return false; }

#else

bool has_avx2() { return false; }
bool has_avxvnni() { return false; }
bool has_avx512() { return false; }

bool has_dotprod() {
#if defined(__aarch64__) && defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
  return true;  // every 64-bit ARM of Apple's has it
#endif
}

#endif

}  // namespace edgekv
