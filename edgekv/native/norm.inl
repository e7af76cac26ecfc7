// What the RMS norm of a row multiplies it with. Included by each instruction set within its unnamed namespace, so that
// each compiles its own.

// 1 / the root of the mean square and epsilon.
float norm_factor(const float* x, int64_t count, float epsilon) {
  constexpr int kLanes = 16;
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; lane++) sums[lane] += x[i + lane] * x[i + lane];
  }
  for (; i < count; i++) sums[0] += x[i] * x[i];
  for (int lane = 1; lane < kLanes; lane++) sums[0] += sums[lane];
  return 1.0f / sqrtf(sums[0] / static_cast<float>(count) + epsilon);
}
