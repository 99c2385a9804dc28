// Vectors of this processor, and products C = A B of float32 matrices.
//
// Vectors are the vector extension of GCC and clang, so one source serves every instruction set. The right factor B is
// packed into strips of columns. A tile is ROWS rows of A times one strip; its sums stay in registers while it iterates
// over the depth of the product. The left factor A is packed too if it is multiplied with many strips.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

// A vector has LANES floats. A tile has at most ROWS rows by TILE vectors, so its sums take 24 of 32 registers, or 12 of
// 16. Tests define LANES and TILE to compile the code for other processors.
#define ROWS 6
#if defined(LANES)
#elif defined(__AVX512F__)
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
typedef float Wide __attribute__((vector_size(4 * LANES)));
typedef int32_t WideInt __attribute__((vector_size(4 * LANES)));

const int STRIP = TILE * LANES;  // columns of a strip
const int DEPTH = 512;           // a tile iterates over at most so many rows of a strip at a time
const int HEIGHT = 120;          // rows of a packed left factor; DEPTH * HEIGHT floats, 240 KiB, fit the second-level cache
const int LINE = 16;             // floats in a cache line
const int NEAR = 1 << 18;        // a factor of at most so many bytes stays in the second-level cache

Wide load(const float* p) {
  Wide v;
  std::memcpy(&v, p, sizeof(Wide));
  return v;
}
void store(float* p, Wide v) { std::memcpy(p, &v, sizeof(Wide)); }

int round_up(int n, int unit = LANES) { return (n + unit - 1) / unit * unit; }

// The first element of part i if `size` elements are divided into n parts as evenly as possible.
int begin_of(int i, int n, int size) { return (int)((int64_t)size * i / n); }
int num_slabs(int rows) { return (rows + ROWS - 1) / ROWS; }

// Computes R rows by V vectors of C = A P, or of C += A P if `add`. P is (depth, V * LANES). Element (r, k) of A is
// A[r * row + k], or A[k * R + r] if PACKED. Only the first `columns` columns of C are read and written. Meanwhile
// `lines` cache lines from `next` on, which are needed next, are prefetched into the second-level cache.
template <int R, int V, bool PACKED>
void tile(int depth, const float* A, int64_t row, const float* P, float* C, int64_t ldc, int columns, bool add,
          const float* next, int lines) {
  // Each addition waits for the previous one on the same sum. If a tile has few sums, each is therefore split into PARTS
  // independent sums over parts of the depth, which keep the arithmetic units busy.
  constexpr int PARTS = R * V >= 8 ? 1 : R * V >= 4 ? 2 : 4;
  Wide sum[PARTS][R][V] = {};
  if (add)
    for (int r = 0; r < R; ++r) {  // C is needed at the end and may not be in the cache
      __builtin_prefetch(C + r * ldc, 1);
      __builtin_prefetch(C + r * ldc + columns - 1, 1);
    }
  const auto multiply = [&](Wide(&part)[R][V]) {
    Wide p[V];
    for (int v = 0; v < V; ++v) p[v] = load(P + v * LANES);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) part[r][v] += A[PACKED ? r : r * row] * p[v];
    A += PACKED ? R : 1;
    P += V * LANES;
  };
  int k = 0;
  for (; k + PARTS <= depth && lines > 0; k += PARTS, lines -= PARTS)
    for (int part = 0; part < PARTS; ++part, next += LINE) {
      __builtin_prefetch(next, 0, 2);
      multiply(sum[part]);
    }
  for (; k + PARTS <= depth; k += PARTS)
    for (int part = 0; part < PARTS; ++part) multiply(sum[part]);
  for (; k < depth; ++k) multiply(sum[0]);
  for (int r = 0; r < R; ++r) {
    float *c = C + r * ldc, edge[V * LANES];
    float* to = columns == V * LANES ? c : edge;
    if (add && to == edge) std::memcpy(edge, c, columns * sizeof(float));
    for (int v = 0; v < V; ++v) {
      Wide total = sum[0][r][v];
      for (int part = 1; part < PARTS; ++part) total += sum[part][r][v];
      store(to + v * LANES, add ? load(to + v * LANES) + total : total);
    }
    if (to == edge) std::memcpy(c, edge, columns * sizeof(float));
  }
}

// Calls function(std::integral_constant<int, n>()), for an n from 1 to N that is known at run time only.
template <int N, typename Function>
void with_constant(int n, Function function) {
  if constexpr (N > 1) {
    if (n < N) return with_constant<N - 1>(n, function);
  }
  function(std::integral_constant<int, N>());
}

// M rows of A times a strip. The rows are divided into slabs of equal size, at most ROWS rows.
template <int V, bool PACKED>
__attribute__((noinline)) void slabs(int M, int depth, const float* A, int64_t row, const float* P, float* C,
                                     int64_t ldc, int columns, bool add, const float* next) {
  const int n = num_slabs(M), lines = next ? depth * V * LANES / LINE / n + 1 : 0;
  for (int i = 0; i < n; ++i) {
    const int from = begin_of(i, n, M), rows = begin_of(i + 1, n, M) - from;
    with_constant<ROWS>(rows, [&](auto R) {
      tile<R, V, PACKED>(depth, A + from * row, row, P, C + from * ldc, ldc, columns, add, next + i * lines * LINE, lines);
    });
  }
}

// A right factor of K rows and N columns, in strips of TILE vectors. The last strip is narrower and padded with zeros to
// whole vectors. num_together is the number of factors that the caller uses in turn.
struct Strips {
  int N, K, depth;  // depth: a tile iterates over so many rows at a time, at most DEPTH
  float* data;      // round_up(N) * K floats
  bool far;         // whether the factors do not stay in the cache, so that each product must fetch them again

  Strips(int N, int K, float* data, int64_t num_together = 1)
      : N(N), K(K), data(data), far(num_together * size(N, K) * (int64_t)sizeof(float) > NEAR) {
    const int parts = (K + DEPTH - 1) / DEPTH;
    depth = (K + parts - 1) / parts;
  }
  static int64_t size(int N, int K) { return (int64_t)round_up(N) * K; }
  int width(int n) const { return std::min(STRIP, round_up(N - n)); }

  // Packs the strip that begins at column n. Row k of the factor is contiguous at rows + k * step.
  void pack_rows(int n, const float* rows, int64_t step) const {
    const int wide = width(n), used = std::min(wide, N - n);
    float* p = data + (int64_t)n * K;
    for (int k = 0; k < K; ++k, p += wide) {
      const float* from = rows + k * step + n;
      if (used == STRIP)
        std::memcpy(p, from, STRIP * sizeof(float));
      else
        for (int i = 0; i < wide; ++i) p[i] = i < used ? from[i] : 0.0f;
    }
  }
  // The same for a factor whose column n is contiguous at column(n).
  template <typename Column>
  void pack_columns(int n, Column column) const {
    const int wide = width(n), used = std::min(wide, N - n);
    float* p = data + (int64_t)n * K;
    const float* from[STRIP];
    for (int i = 0; i < used; ++i) from[i] = column(n + i);
    for (int k = 0; k < K; ++k, p += wide)
      for (int i = 0; i < wide; ++i) p[i] = i < used ? from[i][k] : 0.0f;
  }
  const float* at(int n, int k) const { return data + (int64_t)n * K + (int64_t)k * width(n); }

  // M rows of A times the part of a strip that begins at column n and row k. The result begins at C. `next` is the
  // address to prefetch; null if that memory is already in the cache.
  template <bool PACKED>
  void times(int n, int k, int M, const float* A, int64_t row, float* C, int64_t ldc, bool add, const float* next) const {
    const int wide = width(n);
    with_constant<TILE>(wide / LANES, [&](auto V) {
      slabs<V, PACKED>(M, std::min(depth, K - k), A, row, at(n, k), C, ldc, std::min(wide, N - n), add, next);
    });
  }
  // M rows of A times the columns n to end - 1, into C. A strip must begin at n. The rows of A are `row` floats apart, or
  // A is packed into slabs if PACKED. If `group` is not 0, C stores the columns in groups of 4 LANES, which are `group`
  // floats apart.
  template <bool PACKED>
  void times_all(int n, int end, int M, const float* A, int64_t row, float* C, int64_t ldc, bool add,
                 int64_t group = 0) const {
    for (int k = 0; k < K; k += depth)
      for (int from = n; from < end; from += STRIP) {
        const float* next = from + STRIP < end ? at(from + STRIP, k) : k + depth < K ? at(n, k + depth) : at(end, 0);
        const int i = from - n, in_group = i % (4 * LANES);
        float* to = group ? C + i / (4 * LANES) * group + in_group : C + i;
        times<PACKED>(from, k, M, A + (PACKED ? 0 : k), row, to, ldc, add || k > 0, far ? next : nullptr);
      }
  }
};

// Packs M rows of A, slab after slab, in the order in which `tile` reads them. Element (m, k) of A is
// A[m * row + k * step].
void pack_left(float* to, int M, int depth, const float* A, int64_t row, int64_t step) {
  const int n = num_slabs(M);
  for (int i = 0; i < n; ++i) {
    const int from = begin_of(i, n, M), rows = begin_of(i + 1, n, M) - from;
    with_constant<ROWS>(rows, [&](auto R) {
      const float* a = A + from * row;
      for (int k = 0; k < depth; ++k, to += R)
        for (int r = 0; r < R; ++r) to[r] = row == 1 ? a[k * step + r] : a[r * row + k * step];
    });
  }
}

// A right factor for `product`. Its rows, or its columns if `columns`, are contiguous and `step` floats apart.
struct Right {
  const float* data;
  int64_t step;
  bool columns;
};

// C (M, N) = A B, or C += A B if `add`. All threads of a parallel region call it, or one thread alone. Element (m, k) of
// A is A[m * row + k * step]; the rows of C have N floats. The threads share `space`, Strips::size(N, DEPTH) floats.
void product(int M, int N, int K, const float* A, int64_t row, int64_t step, Right B, float* C, bool add, float* space,
             int threads) {
  const int num_parts = (K + DEPTH - 1) / DEPTH;
  const int blocks = round_up((M + HEIGHT - 1) / HEIGHT, threads);  // all threads get the same number
  Floats left(new float[HEIGHT * DEPTH]);
  for (int part = 0; part < num_parts; ++part) {
    const int k = begin_of(part, num_parts, K), depth = begin_of(part + 1, num_parts, K) - k;
    const Strips right(N, depth, space);
#pragma omp for schedule(static)
    for (int n = 0; n < N; n += STRIP) {
      if (B.columns)
        right.pack_columns(n, [&](int i) { return B.data + i * B.step + k; });
      else
        right.pack_rows(n, B.data + k * B.step, B.step);
    }
#pragma omp for schedule(static)
    for (int block = 0; block < blocks; ++block) {
      const int m = begin_of(block, blocks, M), rows = begin_of(block + 1, blocks, M) - m;
      if (!rows) continue;
      pack_left(left.get(), rows, depth, A + m * row + k * step, row, step);
      right.times_all<true>(0, N, rows, left.get(), depth, C + (int64_t)m * N, N, add || k > 0);
    }
  }
}

}  // namespace
