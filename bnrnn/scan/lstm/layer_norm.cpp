// The layer-normalized LSTM on the CPU in float32 (Ba et al. 2016, eqs. 20-22), forward and backward (see fused.py).
//
// Statistics are those of a row: of the units of one sequence. So a time step is the product h W_hh^T of all rows, and then
// one row after another, whose gates are in the cache. Threads divide the columns of the product and then the rows.

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

// Forward step of row b, after its product with 4H columns.
template <bool NOISE>
void forward_row(const Step& at, const RowNorm& layer, int64_t b, const float* product, float* scratch) {
  const Lstm& s = at.s;
  const int H = s.H;
  const int64_t place = at.t * s.B + b;
  float mean[4] = {}, rstd[4] = {1, 1, 1, 1}, mean_x[4] = {}, rstd_x[4] = {1, 1, 1, 1};
  float* const x = at.x ? at.x + b * at.row : nullptr;
  float* const u = at.u ? at.u + b * at.row : nullptr;
  if (s.gamma_hh)
    statistics_of_gates(s, product, s.mean_hh + place * s.groups, s.var_hh + place * s.groups, mean, rstd);
  if (at.feature)
    layer.set_factor(at.feature[b], rstd_x);
  else if (s.gamma_ih)
    statistics_of_gates(s, x, s.mean_ih + place * s.groups, s.var_ih + place * s.groups, mean_x, rstd_x);
  float *const c = at.c + b * H, *const y = at.y + b * H;
  const float* const old_c = at.c_prev + b * H;
  const Noise::Row key = at.noise.row(b);
  over_blocks(0, H, [&](auto units, int j) {
    const float* const p = layer.table.get() + j / LANES * PARTS * LANES;
    float* const kept = scratch + j / LANES * SLOTS * LANES;
    Wide a[4];
    for (int k = 0; k < 4; ++k) {  // eq. 20
      Wide v = (units.load(product + k * H + j) - mean[k]) * rstd[k], in;
      if (u) units.store(u + k * H + j, v);
      if (x) {
        in = (units.load(x + k * H + j) - mean_x[k]) * rstd_x[k];
        if (s.gamma_ih) units.store(x + k * H + j, in);
      } else {
        in = Wide{} + rstd_x[k];
      }
      a[k] = load(p + (HH + k) * LANES) * v + load(p + (IH + k) * LANES) * in + load(p + (BIAS + k) * LANES);
    }
    Wide g = tanh(a[2]), kept_c, kept_h, passed;
    const Wide old = units.load(old_c + j);
    if constexpr (NOISE) {
      at.noise.factors(key, j, kept_c, kept_h, passed);
      g *= passed;
    }
    const Wide cell = sigmoid(a[1]) * old + sigmoid(a[0]) * g;  // eq. 21
    store(kept, sigmoid(a[3]));
    if constexpr (NOISE) {
      store(kept + LANES, kept_h);
      store(kept + 2 * LANES, kept_c);
    }
    units.store(c + j, cell);
  });
  float of_c[1] = {0.0f}, var_c[1], r = 1.0f;
  if (s.gamma_c) {
    moments_of_row(c, H, 1, of_c, var_c);
    s.mean_c[place] = of_c[0];
    s.var_c[place] = var_c[0];
    r = rsqrt_of(var_c[0] + s.eps);
  }
  over_blocks(0, H, [&](auto units, int j) {  // eq. 22
    const float* const p = layer.table.get() + j / LANES * PARTS * LANES;
    const float* const kept = scratch + j / LANES * SLOTS * LANES;
    const Wide cell = units.load(c + j);
    Wide h = load(kept) * tanh((cell - of_c[0]) * (r * load(p + CELL * LANES)) + load(p + CELL_SHIFT * LANES));
    if constexpr (NOISE) {
      const Wide kept_h = load(kept + LANES), kept_c = load(kept + 2 * LANES);
      units.store(c + j, kept_c * units.load(old_c + j) + (1.0f - kept_c) * cell);
      h = kept_h * units.load(at.h_prev + b * H + j) + (1.0f - kept_h) * h;
    }
    units.store(y + j, h);
  });
}

// Backward step of row b: computes du (4H), dx and dc from dh, dy and dc, and adds to the sums by blocks. With zoneout it
// writes the direct gradient of the previous h into dh.
template <bool NOISE>
void backward_row(const Step& at, const RowNorm& layer, int64_t b, float* du, float* scratch, float* sums,
                  float (&squared)[4]) {
  const Lstm& s = at.s;
  const int H = s.H;
  const int64_t place = at.t * s.B + b, cell = b * H;
  float* const x = at.x ? at.x + b * at.row : nullptr;
  const float *const u = at.u + b * at.row, *const dy = s.dy + (int64_t)s.B * H * at.t + cell;
  float rstd[4] = {1, 1, 1, 1}, rstd_x[4] = {1, 1, 1, 1}, phi[4] = {1, 1, 1, 1};
  for (int k = 0; k < 4; ++k) {
    const int64_t stored = place * s.groups + (s.groups == 1 ? 0 : k);
    if (s.gamma_hh) rstd[k] = rsqrt_of(s.var_hh[stored] + s.eps);
    if (s.gamma_ih && x) rstd_x[k] = rsqrt_of(s.var_ih[stored] + s.eps);
  }
  if (at.feature) layer.set_factor(at.feature[b], phi);
  const float m_c = s.gamma_c ? s.mean_c[place] : 0.0f, r_c = s.gamma_c ? rsqrt_of(s.var_c[place] + s.eps) : 1.0f;
  const Noise::Row key = at.noise.row(b);
  Wide sum_e[2]{};                            // of the gradient of the normalized cell, and of its product with the cell
  over_blocks(0, H, [&](auto units, int j) {  // through eq. 22
    const float* const p = layer.table.get() + j / LANES * PARTS * LANES;
    float *const kept = scratch + j / LANES * SLOTS * LANES, *const sum = sums + j / LANES * PARTS * LANES;
    Wide a[4];
    for (int k = 0; k < 4; ++k) {
      const Wide in = x ? units.load(x + k * H + j) : Wide{} + phi[k];
      a[k] = load(p + (HH + k) * LANES) * units.load(u + k * H + j) + load(p + (IH + k) * LANES) * in +
             load(p + (BIAS + k) * LANES);
    }
    const Wide i = sigmoid(a[0]), f = sigmoid(a[1]), g = tanh(a[2]), o = sigmoid(a[3]);
    Wide grad = units.load(s.dh + cell + j) + units.load(dy + j), c;
    if constexpr (NOISE) {
      Wide kept_c, kept_h, passed;
      at.noise.factors(key, j, kept_c, kept_h, passed);
      units.store(s.dh + cell + j, kept_h * grad);
      grad *= 1.0f - kept_h;
      c = f * units.load(at.c_prev + cell + j) + i * (passed * g);
      store(kept + 6 * LANES, kept_c);
      store(kept + 7 * LANES, passed);
    } else {
      c = units.load(at.c + cell + j);
    }
    const Wide c_hat = (c - m_c) * r_c, gamma = load(p + CELL * LANES);
    const Wide z = tanh(gamma * c_hat + load(p + CELL_SHIFT * LANES)), dz = grad * o * (1.0f - z * z);
    store(sum + CELL * LANES, load(sum + CELL * LANES) + dz * c_hat);
    store(sum + CELL_SHIFT * LANES, load(sum + CELL_SHIFT * LANES) + dz);
    sum_e[0] += gamma * dz;
    sum_e[1] += gamma * dz * c_hat;
    store(kept, i);
    store(kept + LANES, f);
    store(kept + 2 * LANES, g);
    store(kept + 3 * LANES, grad * z * o * (1.0f - o));
    store(kept + 4 * LANES, gamma * dz);
    store(kept + 5 * LANES, c_hat);
  });
  float mean_e[2] = {};
  if (s.gamma_c) means(sum_e, H, 2, mean_e);
  Wide sum_u[4]{}, sum_uu[4]{}, sum_x[4]{}, sum_xx[4]{};
  over_blocks(0, H, [&](auto units, int j) {  // through eqs. 21 and 20
    const float* const p = layer.table.get() + j / LANES * PARTS * LANES;
    float *const kept = scratch + j / LANES * SLOTS * LANES, *const sum = sums + j / LANES * PARTS * LANES;
    const Wide i = load(kept), f = load(kept + LANES), g = load(kept + 2 * LANES), c_hat = load(kept + 5 * LANES);
    Wide d = units.load(s.dc + cell + j), through{}, passed = Wide{} + 1.0f;
    if constexpr (NOISE) {
      passed = load(kept + 7 * LANES);
      through = load(kept + 6 * LANES) * d;
      d -= through;
    }
    d += r_c * (load(kept + 4 * LANES) - mean_e[0] - c_hat * mean_e[1]);
    const Wide d_g = NOISE ? d * passed : d;
    const Wide grads[4] = {d_g * g * i * (1.0f - i), d * units.load(at.c_prev + cell + j) * f * (1.0f - f),
                           d_g * i * (1.0f - g * g), load(kept + 3 * LANES)};
    units.store(s.dc + cell + j, d * f + through);
    for (int k = 0; k < 4; ++k) {
      const Wide da = grads[k], v = units.load(u + k * H + j), of_u = load(p + (HH + k) * LANES) * da;
      const Wide in = x ? units.load(x + k * H + j) : Wide{} + phi[k], of_x = load(p + (IH + k) * LANES) * da;
      sum_u[k] += of_u;
      sum_uu[k] += of_u * v;
      if (x) sum_x[k] += of_x;
      sum_xx[k] += of_x * in;
      store(sum + (HH + k) * LANES, load(sum + (HH + k) * LANES) + da * v);
      store(sum + (IH + k) * LANES, load(sum + (IH + k) * LANES) + da * in);
      store(sum + (BIAS + k) * LANES, load(sum + (BIAS + k) * LANES) + da);
      store(kept + k * LANES, da);  // overwrites i, f, g and the fourth value, which are no longer needed
    }
  });
  float mean_u[4] = {}, mean_uu[4] = {}, mean_x[4] = {}, mean_xx[4] = {};
  if (s.gamma_hh) means(sum_u, H, s.groups, mean_u), means(sum_uu, H, s.groups, mean_uu);
  if (s.gamma_ih && x) means(sum_x, H, s.groups, mean_x);
  if (s.gamma_ih) means(sum_xx, H, s.groups, mean_xx);
  for (int k = 0; k < 4; ++k) squared[k] += phi[k] * phi[k] * mean_xx[k];
  over_blocks(0, H, [&](auto units, int j) {  // through the normalization of the two products
    const float* const p = layer.table.get() + j / LANES * PARTS * LANES;
    const float* const kept = scratch + j / LANES * SLOTS * LANES;
    for (int k = 0; k < 4; ++k) {
      const int64_t column = k * H + j;
      const Wide da = load(kept + k * LANES);
      units.store(du + column, rstd[k] * (load(p + (HH + k) * LANES) * da - mean_u[k] - units.load(u + column) * mean_uu[k]));
      if (!x) continue;
      const Wide of_x = load(p + (IH + k) * LANES) * da;
      units.store(x + column, rstd_x[k] * (of_x - mean_x[k] - units.load(x + column) * mean_xx[k]));
    }
  });
}

template <bool NOISE>
void layer_forward(const Lstm& s) {
  const int H = s.H, G = 4 * H, columns = blocks_together(s) * STRIP, num_columns = (G + columns - 1) / columns;
  const RowNorm layer(s);
  const Strips weight(G, H, s.packed);
  const int64_t size = (int64_t)round_up(H) * SLOTS;
  Floats product(new float[(int64_t)s.B * G]), scratch(new float[s.threads * size]);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  for (int64_t t = 0; t < s.T; ++t) {
    const Step at(s, t, true, nullptr);
#pragma omp for schedule(static)
    for (int n = 0; n < num_columns; ++n) {
      const int from = n * columns, to = std::min(G, from + columns);
      weight.times_all<false>(from, to, at.n, at.h_prev, H, product.get() + from, G, false);
    }
#pragma omp for schedule(static)
    for (int part = 0; part < s.threads; ++part)
      for (int64_t b = begin_of(part, s.threads, s.B); b < begin_of(part + 1, s.threads, s.B); ++b) {
        if (b < at.n) {
          forward_row<NOISE>(at, layer, b, product.get() + b * G, scratch.get() + part * size);
        } else {  // a finished sequence
          std::memcpy(at.c + b * H, at.c_prev + b * H, H * sizeof(float));
          std::memcpy(at.y + b * H, at.h_prev + b * H, H * sizeof(float));
        }
      }
  }
}

template <bool NOISE>
void layer_backward(const Lstm& s) {
  const int H = s.H, G = 4 * H;
  const RowNorm layer(s);
  const int64_t kept = (int64_t)round_up(H) * SLOTS;
  // The sums of each part of the rows. Those of a step are summed apart, which loses fewer digits.
  Floats scratch(new float[s.threads * kept]), of_step(new float[s.threads * layer.size]());
  Floats sums(new float[s.threads * layer.size]());
  std::unique_ptr<float[][4]> squared(new float[s.threads][4]());
  backward_steps(s, [&](const Step& at, float* du) {
#pragma omp for schedule(static)
    for (int part = 0; part < s.threads; ++part) {
      float *const now = of_step.get() + part * layer.size, *const all = sums.get() + part * layer.size;
      for (int64_t b = begin_of(part, s.threads, s.B); b < begin_of(part + 1, s.threads, s.B); ++b) {
        if (b < at.n) {
          backward_row<NOISE>(at, layer, b, du + b * G, scratch.get() + part * kept, now, squared[part]);
          continue;
        }
        std::memset(du + b * G, 0, G * sizeof(float));
        if (at.x) std::memset(at.x + b * G, 0, G * sizeof(float));
        for (int64_t j = b * H; j < (b + 1) * H; ++j) s.dh[j] += s.dy[(int64_t)s.B * H * at.t + j];
      }
      for (int64_t i = 0; i < layer.size; ++i) all[i] += now[i], now[i] = 0.0f;
    }
  });
  for (int part = 0; part < s.threads; ++part) layer.add_gradients(sums.get() + part * layer.size, squared[part]);
}

}  // namespace

extern "C" {

void bnrnn_lstm_layer_forward(const Lstm* s) { s->noisy ? layer_forward<true>(*s) : layer_forward<false>(*s); }

void bnrnn_lstm_layer_backward(const Lstm* s) { s->noisy ? layer_backward<true>(*s) : layer_backward<false>(*s); }

}  // extern "C"
