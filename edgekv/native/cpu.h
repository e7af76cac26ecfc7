// What this processor, and the system on it, can run.
#pragma once

namespace edgekv {

bool has_avx2();     // with FMA
bool has_avxvnni();  // and AVX2 with FMA
bool has_avx512();   // F, BW, VL, DQ and VNNI
bool has_dotprod();  // of 64-bit ARM

}  // namespace edgekv
