// Vectors of this processor, and matrix products against a packed right factor, in float32.
//
// Vectors are GCC's (and clang's) own, so one source serves every instruction set.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

// LANES floats are a vector. A tile of a product has ROWS rows of TILE vectors, whose sums stay in registers: 24 of 32
// registers, or 12 of 16.
#define ROWS 6
#if defined(__AVX512F__)
#define LANES 16
#define TILE 4
#elif defined(__aarch64__)
#define LANES 4
#define TILE 4
#else
#define LANES 8
#define TILE 2
#endif

namespace {

typedef std::unique_ptr<float[]> Floats;
const int DEPTH = LANES == 8 ? 256 : 512;  // of a panel, which fits the second-level cache; of 8 lanes a strip the first
const int HEIGHT = 240;  // rows of the left factor that meet all panels in turn

template <int N>
struct Vectors;
#define VECTORS(N)                                           \
  template <>                                                \
  struct Vectors<N> {                                        \
    typedef float Float __attribute__((vector_size(4 * N))); \
    typedef int32_t Int __attribute__((vector_size(4 * N))); \
  }
VECTORS(16);
VECTORS(8);
VECTORS(4);
VECTORS(1);

typedef Vectors<LANES>::Float Wide;

Wide load(const float* p) {
  Wide v;
  std::memcpy(&v, p, sizeof(Wide));
  return v;
}
void store(float* p, Wide v) { std::memcpy(p, &v, sizeof(Wide)); }

int round_up(int n) { return (n + LANES - 1) / LANES * LANES; }

// R rows by V vectors of C = A P, or C += A P. Element (r, k) of A is A[r * row + k * step]; P is (depth, V * LANES).
template <int R, int V>
void tile(int depth, const float* A, int64_t row, int64_t step, const float* P, float* C, int64_t ldc, bool add) {
  Wide sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = add ? load(C + r * ldc + v * LANES) : Wide{};
  for (int k = 0; k < depth; ++k) {
    Wide p[V];
    for (int v = 0; v < V; ++v) p[v] = load(P + (int64_t)k * V * LANES + v * LANES);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] += A[r * row + k * step] * p[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(C + r * ldc + v * LANES, sum[r][v]);
}

template <int V>
void tiles(int M, int depth, const float* A, int64_t row, int64_t step, const float* P, float* C, int64_t ldc,
           bool add) {
  int m = 0;
  for (; m + ROWS <= M; m += ROWS) tile<ROWS, V>(depth, A + m * row, row, step, P, C + m * ldc, ldc, add);
  for (; m + 2 <= M; m += 2) tile<2, V>(depth, A + m * row, row, step, P, C + m * ldc, ldc, add);
  for (; m < M; ++m) tile<1, V>(depth, A + m * row, row, step, P, C + m * ldc, ldc, add);
}

// M rows against one panel of at most 4 vectors, which stands in strips of TILE vectors; C has room for whole vectors.
void panel(int M, int depth, int vectors, const float* A, int64_t row, int64_t step, const float* P, float* C,
           int64_t ldc, bool add) {
  for (int v = 0; v < vectors; v += TILE, P += (int64_t)depth * TILE * LANES, C += TILE * LANES) {
    switch (std::min(TILE, vectors - v)) {
      case 1: tiles<1>(M, depth, A, row, step, P, C, ldc, add); break;
      case 2: tiles<2>(M, depth, A, row, step, P, C, ldc, add); break;
      case 3: tiles<3>(M, depth, A, row, step, P, C, ldc, add); break;
      default: tiles<4>(M, depth, A, row, step, P, C, ldc, add);
    }
  }
}

// The right factor in panels of at most 4 vectors' width, each cut into depths of at most DEPTH and these into strips of
// TILE vectors, so that a tile reads its part of the factor from one end to the other.
struct Packed {
  int N, K, vectors;  // vectors: of a panel
  Floats data;

  // Element (k, n) of the factor is W[k * row + n * column].
  Packed(int N, int K, const float* W, int64_t row, int64_t column, int vectors = 4) : N(N), K(K), vectors(vectors) {
    data.reset(new float[(int64_t)round_up(N) * K]);
    const int whole = vectors * LANES;
    for (int n = 0; n < N; n += whole) {
      const int width = std::min(whole, round_up(N - n)), used = std::min(whole, N - n);
      float* p = data.get() + (int64_t)n * K;
      for (int from = 0; from < K; from += DEPTH)
        for (int strip = 0; strip < width; strip += TILE * LANES)
          for (int k = from; k < std::min(K, from + DEPTH); ++k)
            for (int i = strip; i < std::min(width, strip + TILE * LANES); ++i)
              *p++ = i < used ? W[k * row + (n + i) * column] : 0.0f;
    }
  }
  // M rows of A times the panel at column n into C, which has room for whole vectors.
  void times(int n, int M, const float* A, int64_t row, int64_t step, float* C, int64_t ldc, bool add) const {
    const int used = std::min(vectors, round_up(N - n) / LANES);
    for (int k = 0; k < K; k += DEPTH)
      panel(M, std::min(DEPTH, K - k), used, A + k * step, row, step,
            data.get() + (int64_t)n * K + (int64_t)k * used * LANES, C, ldc, add || k > 0);
  }
  // The same where C has no room beyond N columns.
  void times_exactly(int n, int M, const float* A, int64_t row, int64_t step, float* C, int64_t ldc, bool add) const {
    const int used = N - n;
    if (used >= vectors * LANES || used % LANES == 0) return times(n, M, A, row, step, C, ldc, add);
    const int width = round_up(used);
    Floats edge(new float[(int64_t)M * width]);
    for (int m = 0; add && m < M; ++m) std::memcpy(&edge[(int64_t)m * width], C + m * ldc, used * sizeof(float));
    times(n, M, A, row, step, edge.get(), width, add);
    for (int m = 0; m < M; ++m) std::memcpy(C + m * ldc, &edge[(int64_t)m * width], used * sizeof(float));
  }
};

}  // namespace
