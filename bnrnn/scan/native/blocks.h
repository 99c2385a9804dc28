// Operations on a block of units in a time step: functions of vectors, statistics over the batch, normalization.

#pragma once

#include "products.h"

namespace {

// The units of a block. A block has LANES units. The last block of a layer has only `count` units (TAIL) if the size of
// the layer is not a multiple of LANES: memory beyond them is neither read nor written, and its lanes contain zeros.
template <bool TAIL>
struct Units {
  int count;
#if defined(__AVX512F__) && LANES == 16
  __mmask16 mask;
  explicit Units(int count) : count(count), mask((__mmask16)((1u << count) - 1)) {}
  Wide partial(const float* p) const { return (Wide)_mm512_maskz_loadu_ps(mask, p); }
  void partial(float* p, Wide v) const { _mm512_mask_storeu_ps(p, mask, (__m512)v); }
#elif defined(__AVX2__) && LANES == 8
  WideInt mask;
  explicit Units(int count) : count(count) {
    for (int k = 0; k < LANES; ++k) mask[k] = k < count ? -1 : 0;
  }
  Wide partial(const float* p) const { return (Wide)_mm256_maskload_ps(p, (__m256i)mask); }
  void partial(float* p, Wide v) const { _mm256_maskstore_ps(p, (__m256i)mask, (__m256)v); }
#else
  explicit Units(int count) : count(count) {}
  Wide partial(const float* p) const {
    Wide v{};
    std::memcpy(&v, p, count * sizeof(float));
    return v;
  }
  void partial(float* p, Wide v) const { std::memcpy(p, &v, count * sizeof(float)); }
#endif
  Wide load(const float* p) const {
    if constexpr (TAIL) return partial(p);
    return ::load(p);
  }
  void store(float* p, Wide v) const {
    if constexpr (TAIL) return partial(p, v);
    ::store(p, v);
  }
  void add(float* p, Wide v) const { store(p, load(p) + v); }
  // The vector with zeros in the lanes beyond the last unit.
  Wide only(Wide v) const {
    if constexpr (!TAIL) return v;
    float p[LANES];
    ::store(p, v);
    return partial(p);
  }
  Wide load_or(const float* p, int64_t at, float otherwise) const { return p ? load(p + at) : Wide{} + otherwise; }
};

// Calls function(Units, j) for each block of the units from `from` to `to` - 1; j is its first unit.
template <typename Function>
void over_blocks(int from, int to, Function function) {
  int j = from;
  for (; j + LANES <= to; j += LANES) function(Units<false>(LANES), j);
  if (j < to) function(Units<true>(to - j), j);
}

// exp(x) = power (1 + rest), a power of two times a polynomial (Cephes expf); the relative error is about 1e-7.
inline __attribute__((always_inline)) void exp(Wide x, Wide& power, Wide& rest) {
  x = x > 88.0f ? Wide{} + 88.0f : x;
  x = x < -87.0f ? Wide{} - 87.0f : x;
  const Wide n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  const Wide r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Wide p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  rest = p * r * r + r;
  const WideInt scale = (__builtin_convertvector(n, WideInt) + 127) << 23;
  std::memcpy(&power, &scale, sizeof(Wide));
}
inline __attribute__((always_inline)) Wide sigmoid(Wide x) {
  Wide power, rest;
  exp(-x, power, rest);
  return 1.0f / (power * rest + (power + 1.0f));
}
// (e - 1) / (e + 1) with e = exp(2 x). Computing e - 1 directly, and not from e, keeps the digits of a small result.
inline __attribute__((always_inline)) Wide tanh(Wide x) {
  Wide power, rest;
  exp(2.0f * x, power, rest);
  const Wide less = power * rest + (power - 1.0f);
  return less / (less + 2.0f);
}
inline __attribute__((always_inline)) Wide rsqrt(Wide x) {
  Wide y;
  for (int k = 0; k < LANES; ++k) y[k] = __builtin_sqrtf(x[k]);
  return 1.0f / y;
}

// Mean and biased variance over M rows, in two passes, of K blocks of units whose addresses are `gap` apart.
template <int K, bool TAIL>
void moments(Units<TAIL> units, const float* a, int M, int64_t row, int64_t gap, Wide* mean, Wide* var) {
  for (int k = 0; k < K; ++k) mean[k] = var[k] = Wide{};
  for (int b = 0; b < M; ++b)
    for (int k = 0; k < K; ++k) mean[k] += units.load(a + b * row + k * gap);
  for (int k = 0; k < K; ++k) mean[k] /= (float)M;
  for (int b = 0; b < M; ++b)
    for (int k = 0; k < K; ++k) {
      const Wide d = units.load(a + b * row + k * gap) - mean[k];
      var[k] += d * d;
    }
  for (int k = 0; k < K; ++k) var[k] /= (float)M;
}

// The statistics that normalize K blocks of units. If `batch`, they are computed from the batch and stored; else loaded.
template <int K, bool TAIL>
void statistics(Units<TAIL> units, bool batch, const float* a, int M, int64_t row, int64_t gap, float* means,
                float* vars, int64_t stored_gap, float eps, Wide* mean, Wide* rstd) {
  Wide var[K]{};
  if (batch) moments<K>(units, a, M, row, gap, mean, var);
  for (int k = 0; k < K; ++k) {
    if (batch) {
      units.store(means + k * stored_gap, mean[k]);
      units.store(vars + k * stored_gap, var[k]);
    } else {
      mean[k] = units.load(means + k * stored_gap);
      var[k] = units.load(vars + k * stored_gap);
    }
    rstd[k] = rsqrt(var[k] + eps);
  }
}

}  // namespace
