// The arguments of an LSTM's scan, and one of its time steps. cpu.cpp and layer_norm.cpp run them.

#pragma once

#include "../native/blocks.h"
#include "../native/noise.h"

extern "C" {

// The arguments of a scan. x is (T, B, 4H), c, y and dy (T, B, H), states (B, H), statistics (T, 4H) or (T, H); with layer
// normalization they are (T, B, groups) for the products and (T, B) for the cell. The pointer of an optional argument may
// be null. The first running[t] of the B sequences run at step t, and the first counted[t] count in its statistics; null
// means all.
//
// The caller gives the input product as x. If the input has only one feature, the caller gives its two factors instead,
// feature (T, B) and weight_ih (4H). This saves memory of the size of x: the product, its statistics and its gradients are
// computed from those of the feature.
struct Lstm {
  int32_t T, B, H, batch, threads;  // batch: whether to compute and write batch statistics, or to read the given ones
  int32_t groups;  // of units that layer normalization normalizes together: 1 or 4; 0 means batch normalization
  int32_t noisy;   // whether there is zoneout or recurrent dropout
  float eps, zoneout_c, zoneout_h, dropout;
  const int64_t* key;  // of the random factors; null means to use the expected ones
  const int32_t *running, *counted;
  const float *weight_hh, *gamma_ih, *gamma_hh, *bias, *gamma_c, *beta_c, *h_0, *c_0;
  float *mean_ih, *var_ih, *mean_hh, *var_hh, *mean_c, *var_c;
  const float *feature, *weight_ih;
  float* packed;  // W_hh^T as bnrnn_lstm_pack packs it
  float *x;       // W_ih x; the forward pass normalizes it, the backward pass overwrites it with its gradient
  // Output: the normalized h W_hh^T; null if there will be no backward pass. It is (T, B, 4H) with layer normalization;
  // otherwise, each step has its blocks of units one after the other, each (B, 4, units), which the block reads in order.
  float *u;
  float *c, *y;
  const float* dy;
  float *dh, *dc;  // gradients of the last state; the backward pass overwrites them with those of the initial state
  float *dgamma_ih, *dgamma_hh, *dbias, *dgamma_c, *dbeta_c, *dweight_ih;  // added to
  float* dweight_hh;                                                       // (H, 4H), transposed; added to
};
}

namespace {

// Memory of a thread for the values of a step.
struct Room {
  Floats feature;
  std::unique_ptr<Noise::Row[]> keys;
  explicit Room(const Lstm& s) : feature(new float[s.B]), keys(new Noise::Row[s.noisy ? s.B : 0]) {}
};

// One time step: its index, and pointers to its part of the arrays.
struct Step {
  const Lstm& s;
  int64_t t;
  int n, m;  // number of sequences that run, and that count in the statistics
  float *x, *u, *c, *y;
  const float *c_prev, *h_prev;
  int64_t row;                     // floats in a row of x, u and du
  int64_t next = 0;                // floats of c from this step to the one that is computed next; 0: no prefetching
  float mean = 0.0f, var = 0.0f;   // batch statistics of the only input feature
  const float* feature = nullptr;  // the feature of each sequence, minus its mean if batch statistics are used
  Noise noise;
  const Noise::Row* keys;  // of the random factors of each sequence

  // `forward`: whether step t + 1 is computed next, or step t - 1.
  Step(const Lstm& s, int64_t t, bool forward, const Room& room)
      : s(s), t(t), noise(s.key, s.zoneout_c, s.zoneout_h, s.dropout, t), keys(room.keys.get()) {
    n = s.running ? s.running[t] : s.B;
    m = s.counted ? s.counted[t] : s.B;
    row = 4 * (int64_t)s.H;
    const int64_t size = (int64_t)s.B * s.H;
    x = s.x ? s.x + 4 * size * t : nullptr;
    u = s.u ? s.u + 4 * size * t : nullptr;
    c = s.c + size * t;
    y = s.y + size * t;
    c_prev = t ? c - size : s.c_0;
    h_prev = t ? y - size : s.h_0;
    if (s.feature) set_feature(s.feature + t * s.B, room.feature.get());
    for (int b = 0; b < s.B && s.noisy; ++b) room.keys[b] = noise.row(b);
    const int64_t bytes = size * ((x ? 4 : 0) + (u ? 4 : 0) + 2) * (int64_t)sizeof(float);
    if (bytes / s.threads > 2 * NEAR) return;  // more would leave the cache before it is used
    if (forward)
      next = t + 1 < s.T ? size : 0;
    else
      next = t > 1 ? -size : 0;  // the state before step 0 is stored separately
  }
  // Prefetches what the next step reads, or writes if FORWARD, in row b of the block that begins at j. Rows are too far
  // apart for the processor to foresee this. Without `always_inline`, GCC removes the calls, since they have no result.
  template <bool FORWARD>
  inline __attribute__((always_inline)) void prefetch(int64_t b, int j) const {
    if (!next) return;
    const int64_t cell = b * s.H + j + next;
    for (int64_t k = 0, r = b * row + j + 4 * next; k < 4; ++k, r += s.H) {
      if (u && s.groups) __builtin_prefetch(u + r, FORWARD, 2);  // without layer normalization, u is read in order
      if (x) __builtin_prefetch(x + r, 1, 2);
    }
    __builtin_prefetch((FORWARD ? c : c_prev) + cell, FORWARD, 2);
    __builtin_prefetch((FORWARD ? y : s.dy + s.B * (int64_t)s.H * t) + cell, FORWARD, 2);
  }
  void set_feature(const float* value, float* room) {
    feature = value;
    if (!s.gamma_ih || !s.batch) return;
    for (int b = 0; b < m; ++b) mean += value[b];
    mean /= (float)m;
    for (int b = 0; b < m; ++b) {
      room[b] = value[b] - mean;
      var += room[b] * room[b];
    }
    var /= (float)m;
    feature = room;
  }
};

// If h does not fit into the cache, several blocks of units are computed together: each part of h is then read once for
// all of them.
int blocks_together(const Lstm& s) { return (int64_t)s.B * s.H * sizeof(float) > NEAR / 2 ? 4 : 1; }

}  // namespace
