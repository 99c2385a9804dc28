// Layer normalization of the rows of an LSTM: statistics, parameters and sums of their gradients.

#pragma once

#include "step.h"

namespace {

// What the passes over a row read and add to is stored by blocks of units, each of which has PARTS vectors: of gamma_hh,
// gamma_ih and bias for the four gates, of gamma_c and of beta_c. Lanes beyond the last unit contain zeros in parameters,
// and anything in sums.
const int PARTS = 14, HH = 0, IH = 4, BIAS = 8, CELL = 12, CELL_SHIFT = 13;
const int SLOTS = 8;  // vectors that a pass over a row keeps for each block of units

// Calls function(pointer, units, j) for each vector of one part.
template <typename Function>
void over_part(float* blocks, int part, int H, Function function) {
  over_blocks(0, H, [&](auto units, int j) { function(blocks + (j / LANES * PARTS + part) * LANES, units, j); });
}

// The sum of the lanes, by halves: adding them one after another takes as long as normalizing a hundred units.
inline __attribute__((always_inline)) float total(Wide v) {
  float part[LANES];
  store(part, v);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
  return part[0];
}

// The mean over H units of K sums; over all of them together if there is only one group.
template <int K>
void means(const Wide (&sum)[K], int H, int groups, float (&mean)[K]) {
  if (groups == K) {
    for (int k = 0; k < K; ++k) mean[k] = total(sum[k]) / (float)H;
    return;
  }
  Wide all{};
  for (int k = 0; k < K; ++k) all += sum[k];
  mean[0] = total(all) / (float)(K * H);
  for (int k = 1; k < K; ++k) mean[k] = mean[0];
}

// Adds the values of the four gates to their sums; with one group, all of them to the first.
inline __attribute__((always_inline)) void add_gates(Wide (&sum)[4], const Wide (&of)[4], int groups) {
  if (groups == 1)
    sum[0] += (of[0] + of[1]) + (of[2] + of[3]);
  else
    for (int k = 0; k < 4; ++k) sum[k] += of[k];
}

// Mean and biased variance of K blocks of H units of a row, in two passes.
template <int K>
void moments_of_row(const float* v, int H, int groups, float (&mean)[K], float (&var)[K]) {
  Wide sum[K]{}, squares[K]{};
  over_blocks(0, H, [&](auto units, int j) {
    for (int k = 0; k < K; ++k) sum[k] += units.load(v + k * H + j);
  });
  means(sum, H, groups, mean);
  over_blocks(0, H, [&](auto units, int j) {
    for (int k = 0; k < K; ++k) {
      const Wide d = units.only(units.load(v + k * H + j) - mean[k]);
      squares[k] += d * d;
    }
  });
  means(squares, H, groups, var);
}

float rsqrt_of(float x) { return 1.0f / __builtin_sqrtf(x); }

// The parameters by blocks, and what follows from them if the input has only one feature f. Its normalized product is then
// w^ phi with w^ = w - mean(w) and phi = f / sqrt(f^2 var(w) + eps), and the place of gamma_ih is taken by gamma_ih w^.
struct RowNorm {
  const Lstm& s;
  int64_t size;  // floats of all parts
  Floats table, centered;
  float mean_w[4] = {}, var_w[4] = {};

  explicit RowNorm(const Lstm& s)
      : s(s), size((int64_t)round_up(s.H) * PARTS), table(new float[size]), centered(new float[4 * s.H]) {
    const int H = s.H;
    if (s.feature && s.gamma_ih) moments_of_row(s.weight_ih, H, s.groups, mean_w, var_w);
    for (int k = 0; k < 4; ++k) {
      fill(HH + k, s.gamma_hh, k * H, 1.0f);
      fill(IH + k, s.gamma_ih, k * H, 1.0f);
      fill(BIAS + k, s.bias, k * H, 0.0f);
      if (!s.feature) continue;
      for (int j = 0; j < H; ++j) centered[k * H + j] = s.weight_ih[k * H + j] - mean_w[k];
      over_part(table.get(), IH + k, H,
                [&](float* p, auto units, int j) { store(p, load(p) * units.load(centered.get() + k * H + j)); });
    }
    fill(CELL, s.gamma_c, 0, 1.0f);
    fill(CELL_SHIFT, s.beta_c, 0, 0.0f);
  }
  void fill(int part, const float* from, int64_t begin, float otherwise) {
    over_part(table.get(), part, s.H,
              [&](float* p, auto units, int j) { store(p, units.only(units.load_or(from, begin + j, otherwise))); });
  }
  // The factor of each gate's input term, if there is only one feature.
  void set_factor(float f, float (&phi)[4]) const {
    for (int k = 0; k < 4; ++k) phi[k] = s.gamma_ih ? f * rsqrt_of(f * f * var_w[k] + s.eps) : f;
  }
  // Adds the sums of a pass, which stand by blocks, to the gradients of the parameters. `squared` is the sum over rows of
  // phi^3 times the mean of da gamma_ih w^.
  void add_gradients(float* sums, const float (&squared)[4]) const {
    const int H = s.H;
    for (int k = 0; k < 4; ++k) {
      add(sums, BIAS + k, s.dbias, k * H);
      if (s.gamma_hh) add(sums, HH + k, s.dgamma_hh, k * H);
      if (s.gamma_ih && !s.feature) add(sums, IH + k, s.dgamma_ih, k * H);
    }
    if (s.gamma_c) add(sums, CELL, s.dgamma_c, 0);
    add(sums, CELL_SHIFT, s.dbeta_c, 0);
    if (s.feature) add_gradients_of_feature(sums, squared);
  }
  void add(float* sums, int part, float* to, int64_t begin) const {
    if (to) over_part(sums, part, s.H, [&](float* p, auto units, int j) { units.add(to + begin + j, load(p)); });
  }
  void add_gradients_of_feature(float* sums, const float (&squared)[4]) const {
    const int H = s.H;
    if (!s.gamma_ih) {
      for (int k = 0; k < 4; ++k) add(sums, IH + k, s.dweight_ih, k * H);
      return;
    }
    Wide total[4]{};
    float mean[4];
    for (int k = 0; k < 4; ++k)
      over_part(sums, IH + k, H, [&](float* p, auto units, int j) {
        total[k] += load(p) * units.load(s.gamma_ih + k * H + j);
      });
    means(total, H, s.groups, mean);
    for (int k = 0; k < 4; ++k)
      over_part(sums, IH + k, H, [&](float* p, auto units, int j) {
        const int64_t column = k * H + j;
        const Wide w = units.load(centered.get() + column), sum = load(p);
        units.add(s.dgamma_ih + column, w * sum);
        units.add(s.dweight_ih + column, units.load(s.gamma_ih + column) * sum - mean[k] - w * squared[k]);
      });
  }
};

// Statistics of the gates of a row. They are stored for the backward pass.
void statistics_of_gates(const Lstm& s, const float* v, float* means, float* vars, float (&mean)[4], float (&rstd)[4]) {
  float var[4];
  moments_of_row(v, s.H, s.groups, mean, var);
  for (int k = 0; k < 4; ++k) rstd[k] = rsqrt_of(var[k] + s.eps);
  std::memcpy(means, mean, s.groups * sizeof(float));
  std::memcpy(vars, var, s.groups * sizeof(float));
}

}  // namespace
