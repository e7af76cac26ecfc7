// Members of every `simd` struct: scores and weighted sums over a cache of floats, on the struct's own float vectors.
// `Number` is float or E4m3; `widen` loads a vector of either.

template <int R, class Number>
EDGEKV_APART static void score_floats(const uint8_t* queries, const Number* keys, int dim, float* out, int stride) {
  constexpr int N = kBlock / kWidth;
  F sums[R][N];
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) {
    EDGEKV_UNROLL
    for (int n = 0; n < N; n++) sums[r][n] = set(0.0f);
  }
  for (int d = 0; d < dim; d++) {
    F k[N];
    EDGEKV_UNROLL
    for (int n = 0; n < N; n++) k[n] = widen(keys + d * kBlock + n * kWidth);
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      float q;
      memcpy(&q, queries + sizeof(float) * (int64_t{r} * dim + d), sizeof q);
      EDGEKV_UNROLL
      for (int n = 0; n < N; n++) sums[r][n] = fma(set(q), k[n], sums[r][n]);
    }
  }
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) {
    EDGEKV_UNROLL
    for (int n = 0; n < N; n++) store(out + int64_t{r} * stride + n * kWidth, sums[r][n]);
  }
}

template <class Number>
static void score_any(int rows, const uint8_t* queries, const Number* keys, int dim, float* out, int stride) {
  switch (rows) {
    case 4: return score_floats<4>(queries, keys, dim, out, stride);
    case 3: return score_floats<3>(queries, keys, dim, out, stride);
    case 2: return score_floats<2>(queries, keys, dim, out, stride);
    default: return score_floats<1>(queries, keys, dim, out, stride);
  }
}

// No templates, so that they come before the struct's own `score`, which takes any kind of codes.
static void score(int rows, const uint8_t* queries, const int32_t*, const float* keys, const float*, int dim,
                  float* out, int stride) {
  score_any(rows, queries, keys, dim, out, stride);
}

static void score(int rows, const uint8_t* queries, const int32_t*, const E4m3* keys, const float*, int dim, float* out,
                  int stride) {
  score_any(rows, queries, keys, dim, out, stride);
}

// Slots outside low .. high - 1 are not read at all: a float may hold anything, and 0 * NaN is NaN.
template <int R, int N, class Number>
EDGEKV_APART static void weigh_numbers(const uint8_t* weights, int stride, const Number* values, int low, int high,
                                       int dim, float* out, const float* alpha, const float* beta) {
  F sums[R][N];
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) {
    EDGEKV_UNROLL
    for (int n = 0; n < N; n++) sums[r][n] = set(0.0f);
  }
  for (int s = low; s < high; s++) {
    F v[N];
    EDGEKV_UNROLL
    for (int n = 0; n < N; n++) v[n] = widen(values + int64_t{s} * dim + n * kWidth);
    EDGEKV_UNROLL
    for (int r = 0; r < R; r++) {
      float w;
      memcpy(&w, weights + sizeof(float) * (int64_t{r} * stride + s), sizeof w);
      EDGEKV_UNROLL
      for (int n = 0; n < N; n++) sums[r][n] = fma(set(w), v[n], sums[r][n]);
    }
  }
  EDGEKV_UNROLL
  for (int r = 0; r < R; r++) {
    float* o = out + int64_t{r} * dim;
    EDGEKV_UNROLL
    for (int n = 0; n < N; n++) {
      const F old = load(o + n * kWidth), zero = set(0.0f);
      store(o + n * kWidth, fma(sums[r][n], set(beta[r]), fma(old, set(alpha[r]), zero)));
    }
  }
}

template <int R, class Number>
EDGEKV_APART static void weigh_floats(const uint8_t* weights, int stride, const Number* values, int low, int high,
                                      int dim, float* out, const float* alpha, const float* beta) {
  int d = 0;
  for (; d + 4 * kWidth <= dim; d += 4 * kWidth) {
    weigh_numbers<R, 4>(weights, stride, values + d, low, high, dim, out + d, alpha, beta);
  }
  for (; d < dim; d += kWidth) {
    weigh_numbers<R, 1>(weights, stride, values + d, low, high, dim, out + d, alpha, beta);
  }
}

template <class Number>
static void weigh_any(int rows, const uint8_t* weights, int stride, const Number* values, int low, int high, int dim,
                      float* out, const float* alpha, const float* beta) {
  switch (rows) {
    case 3: return weigh_floats<3>(weights, stride, values, low, high, dim, out, alpha, beta);
    case 2: return weigh_floats<2>(weights, stride, values, low, high, dim, out, alpha, beta);
    default: return weigh_floats<1>(weights, stride, values, low, high, dim, out, alpha, beta);
  }
}

// As with `score`.
static void weigh(int rows, const uint8_t* weights, int stride, const float* values, int low, int high, int dim,
                  float* out, const float* alpha, const float* beta) {
  weigh_any(rows, weights, stride, values, low, high, dim, out, alpha, beta);
}

static void weigh(int rows, const uint8_t* weights, int stride, const E4m3* values, int low, int high, int dim,
                  float* out, const float* alpha, const float* beta) {
  weigh_any(rows, weights, stride, values, low, high, dim, out, alpha, beta);
}
