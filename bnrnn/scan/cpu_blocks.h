// What is done to a block of N units in a time step: functions of vectors, statistics over the batch, normalization.

#pragma once

#include "cpu_products.h"

namespace {

// What is done to N units.
template <int N>
struct Block {
  typedef typename Vectors<N>::Float V;
  typedef typename Vectors<N>::Int I;

  static V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
  }
  static void store(float* p, V v) { std::memcpy(p, &v, sizeof(V)); }
  static V load_or(const float* p, int64_t at, float otherwise) { return p ? load(p + at) : V{} + otherwise; }

  // exp(x) = power (1 + rest), with a relative error of about 1e-7: a power of two and a polynomial (Cephes expf).
  static void exp(V x, V& power, V& rest) {
    x = x > 88.0f ? V{} + 88.0f : x;
    x = x < -87.0f ? V{} - 87.0f : x;
    const V n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    rest = p * r * r + r;
    const I scale = (__builtin_convertvector(n, I) + 127) << 23;
    std::memcpy(&power, &scale, sizeof(V));
  }
  static V sigmoid(V x) {
    V power, rest;
    exp(-x, power, rest);
    return 1.0f / (power * rest + (power + 1.0f));
  }
  // (e - 1) / (e + 1) with e = exp(2 x): e - 1 without e keeps the digits of a small result.
  static V tanh(V x) {
    V power, rest;
    exp(2.0f * x, power, rest);
    const V less = power * rest + (power - 1.0f);
    return less / (less + 2.0f);
  }

  static V rsqrt(V x) {
    V y;
    for (int k = 0; k < N; ++k) y[k] = 1.0f / __builtin_sqrtf(x[k]);
    return y;
  }

  // Mean and biased variance over M rows of K columns of blocks, `gap` apart; two passes.
  template <int K>
  static void moments(const float* a, int M, int64_t row, int64_t gap, V* mean, V* var) {
    for (int k = 0; k < K; ++k) mean[k] = var[k] = V{};
    for (int b = 0; b < M; ++b)
      for (int k = 0; k < K; ++k) mean[k] += load(a + b * row + k * gap);
    for (int k = 0; k < K; ++k) mean[k] /= (float)M;
    for (int b = 0; b < M; ++b)
      for (int k = 0; k < K; ++k) {
        const V d = load(a + b * row + k * gap) - mean[k];
        var[k] += d * d;
      }
    for (int k = 0; k < K; ++k) var[k] /= (float)M;
  }

  // The statistics to normalize K columns of blocks with: of the batch, and then stored, or as stored.
  template <int K>
  static void statistics(bool batch, const float* a, int M, int64_t row, int64_t gap, float* means, float* vars,
                         int64_t stored_gap, float eps, V* mean, V* rstd) {
    V var[K]{};
    if (batch) moments<K>(a, M, row, gap, mean, var);
    for (int k = 0; k < K; ++k) {
      if (batch) {
        store(means + k * stored_gap, mean[k]);
        store(vars + k * stored_gap, var[k]);
      } else {
        mean[k] = load(means + k * stored_gap);
        var[k] = load(vars + k * stored_gap);
      }
      rstd[k] = rsqrt(var[k] + eps);
    }
  }

  // y = gamma (x - mean) rstd + shift over M of B rows, 0 in the others.
  static void normalize(int j, int M, int B, int F, bool batch, float eps, const float* x, const float* gamma,
                        const float* shift, float* means, float* vars, float* y) {
    V mean, rstd;
    statistics<1>(batch, x + j, M, F, 0, means + j, vars + j, 0, eps, &mean, &rstd);
    const V scale = rstd * load(gamma + j), add = load_or(shift, j, 0.0f);
    for (int b = 0; b < B; ++b) {
      const int64_t at = (int64_t)b * F + j;
      store(y + at, b < M ? (load(x + at) - mean) * scale + add : V{});
    }
  }

  static void normalize_backward(int j, int M, int B, int F, bool batch, float eps, const float* x, const float* gamma,
                                 const float* means, const float* vars, const float* dy, float* dx, float* dgamma,
                                 float* dshift) {
    const float inverse = batch ? 1.0f / (float)M : 0.0f;
    const V mean = load(means + j), rstd = rsqrt(load(vars + j) + eps);
    V sum{}, sum_x{};
    for (int b = 0; b < M; ++b) {
      const int64_t at = (int64_t)b * F + j;
      const V d = load(dy + at);
      sum += d;
      sum_x += d * ((load(x + at) - mean) * rstd);
    }
    store(dgamma + j, load(dgamma + j) + sum_x);
    store(dshift + j, load(dshift + j) + sum);
    const V scale = rstd * load(gamma + j);
    sum *= inverse;
    sum_x *= inverse;
    for (int b = 0; b < B; ++b) {
      const int64_t at = (int64_t)b * F + j;
      store(dx + at, b < M ? scale * (load(dy + at) - sum - ((load(x + at) - mean) * rstd) * sum_x) : V{});
    }
  }
};

#define OVER_BLOCKS(from, size, function, ...)                                \
  do {                                                                        \
    int j = from;                                                             \
    for (; j + LANES <= size; j += LANES) Block<LANES>::function(j, __VA_ARGS__); \
    for (; j + 4 <= size; j += 4) Block<4>::function(j, __VA_ARGS__);         \
    for (; j < size; ++j) Block<1>::function(j, __VA_ARGS__);                 \
  } while (0)

}  // namespace
