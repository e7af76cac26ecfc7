// The operator's body, free of ONNX Runtime: checks, the split into units of work, and the merging of partial results.
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace edgekv {

// What is wrong with a problem's sizes and state, or null. Nothing may be computed before this has said null.
const char* fault(const Problem&);

// Append the new rows and attend. Allocates only when a larger problem than ever before arrives.
void cached_attention(const Problem&, const Kernels&, const Parallel&);

}  // namespace edgekv
