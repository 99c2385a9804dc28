// The (batch-normalized) LSTM on the CPU in float32, forward and backward over a whole sequence (see fused.py).
//
// A time step is computed block by block. For each block of units, the product h W_hh^T, batch statistics, normalization,
// gates, cell and output are computed while the block is in the cache. A block needs all of h (forward) or all of du
// (backward), but no other data of other blocks. The kernel has its own matrix product for two reasons: the product is
// fused with the step, and W_hh is packed only once for a sequence.
//
// Equation numbers are those of Cooijmans et al. 2016. The order of the gates is torch's, i f g o. All rows are
// contiguous.

#include "../native/blocks.h"

extern "C" {

// The arguments of a scan. x and u are (T, B, 4H), c, y and dy (T, B, H), states (B, H), statistics (T, 4H) or (T, H). The
// pointer of an optional argument may be null. The first running[t] of the B sequences run at step t, and the first
// counted[t] count in its statistics; null means all.
//
// The caller gives the input product as x. If the input has only one feature, the caller gives its two factors instead,
// feature (T, B) and weight_ih (4H). This saves memory of the size of x: the product, its statistics and its gradients are
// computed from those of the feature.
struct Lstm {
  int32_t T, B, H, batch, threads;  // batch: whether to compute and write batch statistics, or to read the given ones
  float eps;
  const int32_t *running, *counted;
  const float *weight_hh, *gamma_ih, *gamma_hh, *bias, *gamma_c, *beta_c, *h_0, *c_0;
  float *mean_ih, *var_ih, *mean_hh, *var_hh, *mean_c, *var_c;
  const float *feature, *weight_ih;
  float *packed;  // W_hh^T as bnrnn_lstm_pack packs it
  float *x;       // W_ih x; the forward pass normalizes it, the backward pass overwrites it with its gradient
  float *u;       // output: normalized h W_hh^T; null if there will be no backward pass
  float *c, *y;
  const float* dy;
  float *dh, *dc;  // gradients of the last state; the backward pass overwrites them with those of the initial state
  float *dgamma_ih, *dgamma_hh, *dbias, *dgamma_c, *dbeta_c, *dweight_ih;  // added to
  float* dweight_hh;                                                       // (H, 4H), transposed; added to
};
}

namespace {

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

  // `forward`: whether step t + 1 is computed next, or step t - 1.
  Step(const Lstm& s, int64_t t, bool forward, float* room) : s(s), t(t) {
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
    if (s.feature) set_feature(s.feature + t * s.B, room);
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
      if (u) __builtin_prefetch(u + r, FORWARD, 2);
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

// The input terms of a block's gates as linear functions of the only input feature f: the scaled term is
// slope f + shift, the normalized value is x^ = hat f + hat_shift.
struct Slope {
  Wide slope, shift{}, hat{}, hat_shift{}, rstd{};

  template <bool TAIL>
  Slope(const Step& at, Units<TAIL> units, int64_t column) {
    const Lstm& s = at.s;
    slope = units.load(s.weight_ih + column);
    if (!s.gamma_ih) return;
    const int64_t stored = 4 * s.H * at.t + column;
    rstd = rsqrt(units.load(s.var_ih + stored) + s.eps);
    hat = slope * rstd;
    if (!s.batch) hat_shift = -units.load(s.mean_ih + stored) * rstd;
    slope = units.load(s.gamma_ih + column) * hat;
    shift = units.load(s.gamma_ih + column) * hat_shift;
  }
  // Stores the batch statistics of the input product, which follow from those of the feature.
  template <bool TAIL>
  static void store_statistics(const Step& at, Units<TAIL> units, int64_t column) {
    const Wide weight = units.load(at.s.weight_ih + column);
    units.store(at.s.mean_ih + 4 * at.s.H * at.t + column, weight * at.mean);
    units.store(at.s.var_ih + 4 * at.s.H * at.t + column, weight * weight * at.var);
  }
  // Adds to the gradients. `sum` and `sum_f` are sums over the batch of da and of da f, with da the gradient of the gates.
  template <bool TAIL>
  void add_gradients(const Step& at, Units<TAIL> units, int64_t column, Wide sum, Wide sum_f) const {
    const Lstm& s = at.s;
    Wide dweight = sum_f;
    if (s.gamma_ih) {
      units.add(s.dgamma_ih + column, hat * sum_f + hat_shift * sum);
      dweight *= units.load(s.gamma_ih + column) * rstd;
      // The gradient through the statistics cancels all but the factor 1 - variance of x^ = eps / (var + eps).
      if (s.batch) dweight *= s.eps * rstd * rstd;
    }
    units.add(s.dweight_ih + column, dweight);
  }
};

// Forward step of the block of units that begins at j, after its product. `product` has m rows of 4 LANES floats; the
// gates in a row are `gap` floats apart.
template <bool TAIL>
void forward_block(const Step& at, Units<TAIL> units, int j, float* product, int gap) {
  const Lstm& s = at.s;
  const int64_t H = s.H, row = at.row, t4 = 4 * H * at.t, t1 = H * at.t, width = 4 * LANES;
  Wide mean[4]{}, rstd[4]{}, mean_x[4]{}, rstd_x[4]{}, gamma[4], gamma_x[4], bias[4], slope[4]{};
  if (s.gamma_hh)
    statistics<4>(units, s.batch, product, at.m, width, gap, s.mean_hh + t4 + j, s.var_hh + t4 + j, H, s.eps, mean, rstd);
  if (s.gamma_ih && !at.feature)
    statistics<4>(units, s.batch, at.x + j, at.m, row, H, s.mean_ih + t4 + j, s.var_ih + t4 + j, H, s.eps, mean_x,
                  rstd_x);
  for (int k = 0; k < 4; ++k) {
    gamma[k] = units.load_or(s.gamma_hh, k * H + j, 1.0f);
    gamma_x[k] = units.load_or(s.gamma_ih, k * H + j, 1.0f);
    bias[k] = units.load_or(s.bias, k * H + j, 0.0f);
    if (!at.feature) continue;
    if (s.gamma_ih && s.batch) Slope::store_statistics(at, units, k * H + j);
    const Slope of_x(at, units, k * H + j);
    slope[k] = of_x.slope;
    bias[k] += of_x.shift;
  }
  for (int b = 0; b < at.m; ++b) {
    const int64_t r = b * row + j, cell = b * H + j;
    at.prefetch<true>(b, j);
    Wide a[4];
    for (int k = 0; k < 4; ++k) {  // eq. 6
      Wide v = units.load(product + b * width + k * gap), in;
      if (s.gamma_hh) v = (v - mean[k]) * rstd[k];
      if (at.u) units.store(at.u + r + k * H, v);
      if (at.feature) {
        in = at.feature[b] * slope[k];
      } else {
        in = units.load(at.x + r + k * H);
        if (s.gamma_ih) {
          in = (in - mean_x[k]) * rstd_x[k];
          units.store(at.x + r + k * H, in);
          in *= gamma_x[k];
        }
      }
      a[k] = gamma[k] * v + in + bias[k];
    }
    if (b >= at.n) continue;
    units.store(at.c + cell, sigmoid(a[1]) * units.load(at.c_prev + cell) + sigmoid(a[0]) * tanh(a[2]));  // eq. 7
    units.store(product + b * width, sigmoid(a[3]));
  }
  for (int64_t b = at.n; b < s.B; ++b) {  // finished sequences
    units.store(at.c + b * H + j, units.load(at.c_prev + b * H + j));
    units.store(at.y + b * H + j, units.load(at.h_prev + b * H + j));
  }
  Wide m{}, r = Wide{} + 1.0f;
  if (s.gamma_c)
    statistics<1>(units, s.batch, at.c + j, at.m, H, 0, s.mean_c + t1 + j, s.var_c + t1 + j, 0, s.eps, &m, &r);
  const Wide scale = r * units.load_or(s.gamma_c, j, 1.0f), shift = units.load_or(s.beta_c, j, 0.0f);
  for (int b = 0; b < at.n; ++b)  // eq. 8
    units.store(at.y + b * H + j,
                units.load(product + b * width) * tanh((units.load(at.c + b * H + j) - m) * scale + shift));
}

// Backward step of the block of units that begins at j: computes du, dx and dc from dh, dy and dc. Writes du (B, 4H).
// scratch is (B, 5 LANES).
template <bool TAIL>
void backward_block(const Step& at, Units<TAIL> units, int j, float* du, float* scratch) {
  const Lstm& s = at.s;
  const int64_t H = s.H, row = at.row, t4 = 4 * H * at.t, t1 = H * at.t;
  const float* dy = s.dy + (int64_t)s.B * H * at.t;
  const float inverse = s.batch ? 1.0f / (float)at.m : 0.0f;  // no gradient flows through population statistics
  Wide gamma[4], gamma_x[4], bias[4], slope[4]{};
  for (int k = 0; k < 4; ++k) {
    gamma[k] = units.load_or(s.gamma_hh, k * H + j, 1.0f);
    gamma_x[k] = units.load_or(s.gamma_ih, k * H + j, 1.0f);
    bias[k] = units.load_or(s.bias, k * H + j, 0.0f);
    if (!at.feature) continue;
    const Slope of_x(at, units, k * H + j);
    slope[k] = of_x.slope;
    bias[k] += of_x.shift;
  }
  const Wide g_c = units.load_or(s.gamma_c, j, 1.0f), shift = units.load_or(s.beta_c, j, 0.0f);
  const Wide m_c = s.gamma_c ? units.load(s.mean_c + t1 + j) : Wide{};
  const Wide r_c = s.gamma_c ? rsqrt(units.load(s.var_c + t1 + j) + s.eps) : Wide{} + 1.0f;
  Wide sum_dz{}, sum_dzc{};
  for (int b = 0; b < at.n; ++b) {  // through eq. 8
    const int64_t r = b * row + j, cell = b * H + j;
    at.prefetch<false>(b, j);
    Wide a[4];
    for (int k = 0; k < 4; ++k) {
      const Wide in = at.feature ? at.feature[b] * slope[k] : gamma_x[k] * units.load(at.x + r + k * H);
      a[k] = gamma[k] * units.load(at.u + r + k * H) + in + bias[k];
    }
    const Wide c_hat = (units.load(at.c + cell) - m_c) * r_c, z = tanh(g_c * c_hat + shift), o = sigmoid(a[3]);
    const Wide grad = units.load(s.dh + cell) + units.load(dy + cell), dz = grad * o * (1.0f - z * z);
    sum_dz += dz;
    sum_dzc += dz * c_hat;
    float* p = scratch + b * 5 * LANES;
    store(p, sigmoid(a[0]));
    store(p + LANES, sigmoid(a[1]));
    store(p + 2 * LANES, tanh(a[2]));
    store(p + 3 * LANES, grad * z * o * (1.0f - o));
    store(p + 4 * LANES, dz);
  }
  if (s.gamma_c) units.add(s.dgamma_c + j, sum_dzc);
  if (s.beta_c) units.add(s.dbeta_c + j, sum_dz);
  const Wide mean_dz = s.gamma_c ? sum_dz * inverse : Wide{}, mean_dzc = s.gamma_c ? sum_dzc * inverse : Wide{};
  Wide sum_a[4]{}, sum_au[4]{}, sum_ax[4]{};
  for (int b = 0; b < at.n; ++b) {  // through eqs. 7 and 6
    const int64_t r = b * row + j, cell = b * H + j;
    float* p = scratch + b * 5 * LANES;
    const Wide i = load(p), f = load(p + LANES), g = load(p + 2 * LANES), c_hat = (units.load(at.c + cell) - m_c) * r_c;
    const Wide d = units.load(s.dc + cell) + g_c * r_c * (load(p + 4 * LANES) - mean_dz - c_hat * mean_dzc);
    const Wide grads[4] = {d * g * i * (1.0f - i), d * units.load(at.c_prev + cell) * f * (1.0f - f),
                           d * i * (1.0f - g * g), load(p + 3 * LANES)};
    units.store(s.dc + cell, d * f);
    for (int k = 0; k < 4; ++k) {
      sum_a[k] += grads[k];
      if (s.gamma_hh) sum_au[k] += grads[k] * units.load(at.u + r + k * H);
      if (at.feature)
        sum_ax[k] += grads[k] * at.feature[b];
      else if (s.gamma_ih)
        sum_ax[k] += grads[k] * units.load(at.x + r + k * H);
      store(p + k * LANES, grads[k]);  // overwrites i, f, g and the fourth value, which are no longer needed
    }
  }
  for (int64_t b = at.n; b < at.m; ++b) {  // finished sequences that count: gradients flow only through the statistics
    const int64_t cell = b * H + j;
    const Wide c_hat = (units.load(at.c + cell) - m_c) * r_c;
    if (s.gamma_c) units.store(s.dc + cell, units.load(s.dc + cell) - g_c * r_c * (mean_dz + c_hat * mean_dzc));
    for (int k = 0; k < 4; ++k) store(scratch + (b * 5 + k) * LANES, Wide{});
  }
  for (int k = 0; k < 4; ++k) {  // through the normalization of the two products
    const int64_t column = k * H + j;
    if (s.bias) units.add(s.dbias + column, sum_a[k]);
    if (s.gamma_hh) units.add(s.dgamma_hh + column, sum_au[k]);
    const Wide mean = sum_a[k] * inverse, mean_u = sum_au[k] * inverse, mean_x = sum_ax[k] * inverse;
    const Wide scale = s.gamma_hh ? gamma[k] * rsqrt(units.load(s.var_hh + t4 + column) + s.eps) : Wide{};
    for (int b = 0; b < at.m; ++b) {
      const Wide da = load(scratch + ((int64_t)b * 5 + k) * LANES), u = units.load(at.u + b * row + column);
      units.store(du + b * row + column, s.gamma_hh ? scale * (da - mean - u * mean_u) : da);
    }
    for (int64_t b = at.m; b < s.B; ++b) units.store(du + b * row + column, Wide{});
    if (at.feature) {
      Slope(at, units, column).add_gradients(at, units, column, sum_a[k], sum_ax[k]);
      continue;
    }
    if (s.gamma_ih) units.add(s.dgamma_ih + column, sum_ax[k]);
    const Wide scale_x = s.gamma_ih ? gamma_x[k] * rsqrt(units.load(s.var_ih + t4 + column) + s.eps) : Wide{};
    for (int b = 0; b < at.m; ++b) {
      const Wide da = load(scratch + ((int64_t)b * 5 + k) * LANES);
      float* x = at.x + b * row + column;
      units.store(x, s.gamma_ih ? scale_x * (da - mean - units.load(x) * mean_x) : da);
    }
    for (int64_t b = at.m; b < s.B; ++b) units.store(at.x + b * row + column, Wide{});
  }
}

// Packs W_hh^T so that the columns of the four gates of a block are adjacent.
void pack_by_blocks(int H, const float* weight_hh, float* packed, int threads) {
  const Strips weight(4 * H, H, packed);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int n = 0; n < 4 * H; n += STRIP)
    weight.pack_columns(n, [&](int column) {
      const int j = column / (4 * LANES) * LANES, units = std::min(LANES, H - j), in_block = column - 4 * j;
      return weight_hh + (int64_t)H * (in_block / units * H + j + in_block % units);
    });
}

}  // namespace

extern "C" {

// Number of floats of the packed W_hh (4H, H).
int64_t bnrnn_lstm_packed_size(int H) { return Strips::size(4 * H, H); }

void bnrnn_lstm_pack(int H, const float* weight_hh, float* packed, int threads) {
  pack_by_blocks(H, weight_hh, packed, threads);
}

void bnrnn_lstm_forward(const Lstm* sequence) {
  const Lstm& s = *sequence;
  const int H = s.H, num_blocks = (H + LANES - 1) / LANES;
  // If h does not fit into the cache, several blocks of units are computed together: each part of h is then read once for
  // all of them.
  const int group = (int64_t)s.B * H * sizeof(float) > NEAR / 2 ? 4 : 1, groups = (num_blocks + group - 1) / group;
  const Strips weight(4 * H, H, s.packed);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    const int64_t size = (int64_t)s.B * 4 * LANES;
    Floats product(new float[group * size]), room(new float[s.B]);
    for (int64_t t = 0; t < s.T; ++t) {
      const Step at(s, t, true, room.get());
#pragma omp for schedule(static)
      for (int g = 0; g < groups; ++g) {
        const int from = g * group * LANES, to = std::min(H, from + group * LANES);
        weight.times_all<false>(4 * from, 4 * to, at.m, at.h_prev, H, product.get(), 4 * LANES, false, size);
        over_blocks(from, to, [&](auto units, int j) {
          forward_block(at, units, j, product.get() + (j - from) / LANES * size, units.count);
        });
      }
    }
  }
}

void bnrnn_lstm_backward(const Lstm* sequence) {
  const Lstm& s = *sequence;
  const int H = s.H, G = 4 * H, num_blocks = (H + LANES - 1) / LANES, num_strips = (H + STRIP - 1) / STRIP;
  Floats packed(new float[Strips::size(H, G)]), shared(new float[Strips::size(G, DEPTH)]);
  const Strips weight(H, G, packed.get());
  // dW_hh is the sum of h^T du over the steps. It is computed in chunks of steps whose du is still in the cache.
  const int64_t chunk = std::max(1, DEPTH / std::max(1, s.B)), size = (int64_t)s.B * H;
  Floats du(new float[chunk * size * 4]);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    Floats scratch(new float[(int64_t)s.B * 5 * LANES]), room(new float[s.B]);
#pragma omp for schedule(static)
    for (int n = 0; n < H; n += STRIP) weight.pack_rows(n, s.weight_hh, H);
    int64_t in_chunk = 0;  // number of steps in the chunk so far; they are filled in from the end of the chunk
    for (int64_t t = s.T - 1; t >= 0; --t) {
      const Step at(s, t, false, room.get());
      const float* dy = s.dy + size * t;
      float* du_t = du.get() + (chunk - ++in_chunk) * size * 4;
#pragma omp for schedule(static)
      for (int block = 0; block < num_blocks; ++block) {
        const int from = block * LANES, to = std::min(H, from + LANES);
        over_blocks(from, to, [&](auto units, int j) { backward_block(at, units, j, du_t, scratch.get()); });
        for (int64_t b = at.n; b < s.B; ++b)  // the gradient of a finished sequence passes to the previous step
          for (int j = from; j < to; ++j) s.dh[b * H + j] += dy[b * H + j];
      }
#pragma omp for schedule(static)
      for (int part = 0; part < s.threads; ++part) {
        const int n = begin_of(part, s.threads, num_strips) * STRIP;
        const int end = std::min(H, begin_of(part + 1, s.threads, num_strips) * STRIP);
        weight.times_all<false>(n, end, at.n, du_t, G, s.dh + n, H, false);
        if (at.m > at.n)
          weight.times_all<false>(n, end, at.m - at.n, du_t + at.n * at.row, G, s.dh + (int64_t)at.n * H + n, H, true);
      }
      if (in_chunk == chunk || t <= 1) {  // step 0 is a chunk of its own, because h_0 is stored separately
        product(H, G, (int)in_chunk * s.B, at.h_prev, 1, H, {du_t, G, false}, s.dweight_hh, true, shared.get(), s.threads);
        in_chunk = 0;
      }
    }
  }
}

}  // extern "C"
