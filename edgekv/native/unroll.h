#pragma once

// Unroll the next loop before arrays become registers: GCC otherwise keeps arrays of accumulators on the stack, which
// makes the kernels twice as slow.
#if defined(__clang__)
#define EDGEKV_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define EDGEKV_UNROLL _Pragma("GCC unroll 16")
#else
#define EDGEKV_UNROLL
#endif
