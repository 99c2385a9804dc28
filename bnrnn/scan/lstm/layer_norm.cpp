// The layer-normalized LSTM on the CPU in float32 (Ba et al. 2016, eqs. 20-22), forward and backward (see fused.py).
//
// Statistics are those of a row: of the units of one sequence. So a time step is the product h W_hh^T of all rows, and then
// one row after another, whose gates are in the cache. Threads divide the columns of the product and then the rows.

#include "row_norm.h"

namespace {

// Rows that are computed together: the parameters are then loaded, and the sums stored, once for all of them.
const int MAX_ROWS = 8;
int rows_together(int H) { return std::max(1, std::min(MAX_ROWS, 6144 / (round_up(H) * SLOTS))); }

// What a pass keeps of each row: statistics of the gates and of the cell, and the key of the random factors.
struct Row {
  float mean[4] = {}, rstd[4] = {1, 1, 1, 1}, mean_x[4] = {}, rstd_x[4] = {1, 1, 1, 1}, phi[4] = {1, 1, 1, 1};
  float mean_c[1] = {0}, rstd_c = 1;
  Noise::Row key;
  Wide sum_c[2]{}, sum_u[4]{}, sum_uu[4]{}, sum_x[4]{}, sum_xx[4]{};  // of gradients, and of their products with values
};

// Forward step of M rows from b on, after their product with 4H columns.
template <bool NOISE>
void forward_rows(const Step& at, const RowNorm& layer, int64_t b, int M, float* product, float* scratch) {
  const Lstm& s = at.s;
  const int H = s.H, G = 4 * H, kept_row = round_up(H) * SLOTS;
  Row rows[MAX_ROWS];
  float* const x = at.x ? at.x + b * G : nullptr;
  float* const u = at.u ? at.u + b * G : nullptr;
  float *const c = at.c + b * H, *const y = at.y + b * H;
  const float *const old_c = at.c_prev + b * H, *const old_h = at.h_prev + b * H;
  for (int m = 0; m < M; ++m) {
    Row& row = rows[m];
    const int64_t place = (at.t * s.B + b + m) * s.groups;
    if (NOISE) row.key = at.keys[b + m];
    if (s.gamma_hh)
      statistics_of_gates(s, product + (b + m) * G, s.mean_hh + place, s.var_hh + place, row.mean, row.rstd);
    if (at.feature)
      layer.set_factor(at.feature[b + m], row.phi);
    else if (s.gamma_ih)
      statistics_of_gates(s, x + m * G, s.mean_ih + place, s.var_ih + place, row.mean_x, row.rstd_x);
  }
  over_blocks(0, H, [&](auto units, int j) {
    const float* const p = layer.table.get() + j / LANES * PARTS * LANES;
    for (int m = 0; m < M; ++m) {
      const Row& row = rows[m];
      float* const kept = scratch + m * kept_row + j / LANES * SLOTS * LANES;
      at.prefetch<true>(b + m, j);
      Wide a[4];
      for (int k = 0; k < 4; ++k) {  // eq. 20
        const int column = m * G + k * H + j;
        Wide v = (units.load(product + b * G + column) - row.mean[k]) * row.rstd[k], in = Wide{} + row.phi[k];
        if (u) units.store(u + column, v);
        if (x) {
          in = (units.load(x + column) - row.mean_x[k]) * row.rstd_x[k];
          if (s.gamma_ih) units.store(x + column, in);
        }
        a[k] = load(p + (HH + k) * LANES) * v + load(p + (IH + k) * LANES) * in + load(p + (BIAS + k) * LANES);
      }
      Wide g = tanh(a[2]);
      if constexpr (NOISE) {
        Wide kept_c, kept_h, passed;
        at.noise.factors(row.key, j, kept_c, kept_h, passed);
        g *= passed;
        store(kept + LANES, kept_h);
        store(kept + 2 * LANES, kept_c);
      }
      units.store(c + m * H + j, sigmoid(a[1]) * units.load(old_c + m * H + j) + sigmoid(a[0]) * g);  // eq. 21
      store(kept, sigmoid(a[3]));
    }
  });
  for (int m = 0; m < M && s.gamma_c; ++m) {
    float var[1];
    moments_of_row(c + m * H, H, 1, rows[m].mean_c, var);
    rows[m].rstd_c = rsqrt_of(var[0] + s.eps);
    s.mean_c[at.t * s.B + b + m] = rows[m].mean_c[0];
    s.var_c[at.t * s.B + b + m] = var[0];
  }
  over_blocks(0, H, [&](auto units, int j) {  // eq. 22
    const float* const p = layer.table.get() + j / LANES * PARTS * LANES;
    const Wide gamma = load(p + CELL * LANES), shift = load(p + CELL_SHIFT * LANES);
    for (int m = 0; m < M; ++m) {
      const float* const kept = scratch + m * kept_row + j / LANES * SLOTS * LANES;
      const Wide cell = units.load(c + m * H + j);
      Wide h = load(kept) * tanh((cell - rows[m].mean_c[0]) * rows[m].rstd_c * gamma + shift);
      if constexpr (NOISE) {
        const Wide kept_h = load(kept + LANES), kept_c = load(kept + 2 * LANES);
        units.store(c + m * H + j, kept_c * units.load(old_c + m * H + j) + (1.0f - kept_c) * cell);
        h = kept_h * units.load(old_h + m * H + j) + (1.0f - kept_h) * h;
      }
      units.store(y + m * H + j, h);
    }
  });
}

// Backward step of M rows from b on, through eq. 22. Keeps the gates, the gradients of the output gate and of the
// normalized cell, and the normalized cell. With zoneout it writes the direct gradient of the previous h into dh.
template <bool NOISE>
void through_output(const Step& at, const RowNorm& layer, int64_t b, int M, Row* rows, float* scratch, float* sums) {
  const Lstm& s = at.s;
  const int H = s.H, G = 4 * H, kept_row = round_up(H) * SLOTS;
  const float* const dy = s.dy + (int64_t)s.B * H * at.t;
  over_blocks(0, H, [&](auto units, int j) {
    const float* const p = layer.table.get() + j / LANES * PARTS * LANES;
    float* const sum = sums + j / LANES * PARTS * LANES;
    const Wide gamma = load(p + CELL * LANES), shift = load(p + CELL_SHIFT * LANES);
    Wide sum_z = load(sum + CELL_SHIFT * LANES), sum_zc = load(sum + CELL * LANES);
    for (int m = 0; m < M; ++m) {
      Row& row = rows[m];
      const int64_t cell = (b + m) * H + j;
      float* const kept = scratch + m * kept_row + j / LANES * SLOTS * LANES;
      at.prefetch<false>(b + m, j);
      Wide a[4];
      for (int k = 0; k < 4; ++k) {
        const int64_t column = (b + m) * G + k * H + j;
        const Wide in = at.x ? units.load(at.x + column) : Wide{} + row.phi[k];
        a[k] = load(p + (HH + k) * LANES) * units.load(at.u + column) + load(p + (IH + k) * LANES) * in +
               load(p + (BIAS + k) * LANES);
      }
      const Wide i = sigmoid(a[0]), f = sigmoid(a[1]), g = tanh(a[2]), o = sigmoid(a[3]);
      Wide grad = units.load(s.dh + cell) + units.load(dy + cell), c;
      if constexpr (NOISE) {
        Wide kept_c, kept_h, passed;
        at.noise.factors(row.key, j, kept_c, kept_h, passed);
        units.store(s.dh + cell, kept_h * grad);
        grad *= 1.0f - kept_h;
        c = f * units.load(at.c_prev + cell) + i * (passed * g);
        store(kept + 6 * LANES, kept_c);
        store(kept + 7 * LANES, passed);
      } else {
        c = units.load(at.c + cell);
      }
      const Wide c_hat = (c - row.mean_c[0]) * row.rstd_c, z = tanh(gamma * c_hat + shift), dz = grad * o * (1.0f - z * z);
      sum_z += dz;
      sum_zc += dz * c_hat;
      row.sum_c[0] += gamma * dz;
      row.sum_c[1] += gamma * dz * c_hat;
      store(kept, i);
      store(kept + LANES, f);
      store(kept + 2 * LANES, g);
      store(kept + 3 * LANES, grad * z * o * (1.0f - o));
      store(kept + 4 * LANES, gamma * dz);
      store(kept + 5 * LANES, c_hat);
    }
    store(sum + CELL_SHIFT * LANES, sum_z);
    store(sum + CELL * LANES, sum_zc);
  });
}

// The same through eqs. 21 and 20, up to the normalization. Keeps the gradients of the gates, and computes dc.
template <bool NOISE>
void through_gates(const Step& at, const RowNorm& layer, int64_t b, int M, Row* rows, float* scratch, float* sums) {
  const Lstm& s = at.s;
  const int H = s.H, G = 4 * H, kept_row = round_up(H) * SLOTS;
  over_blocks(0, H, [&](auto units, int j) {
    const float* const p = layer.table.get() + j / LANES * PARTS * LANES;
    float* const sum = sums + j / LANES * PARTS * LANES;
    Wide sum_a[4]{}, sum_au[4]{}, sum_ax[4]{};
    for (int m = 0; m < M; ++m) {
      Row& row = rows[m];
      const int64_t cell = (b + m) * H + j;
      float* const kept = scratch + m * kept_row + j / LANES * SLOTS * LANES;
      const Wide i = load(kept), f = load(kept + LANES), g = load(kept + 2 * LANES), c_hat = load(kept + 5 * LANES);
      Wide d = units.load(s.dc + cell), through{};
      if constexpr (NOISE) {
        through = load(kept + 6 * LANES) * d;
        d -= through;
      }
      d += row.rstd_c * (load(kept + 4 * LANES) - row.mean[0] - c_hat * row.mean[1]);
      const Wide d_g = NOISE ? d * load(kept + 7 * LANES) : d;
      const Wide grads[4] = {d_g * g * i * (1.0f - i), d * units.load(at.c_prev + cell) * f * (1.0f - f),
                             d_g * i * (1.0f - g * g), load(kept + 3 * LANES)};
      units.store(s.dc + cell, d * f + through);
      Wide of_u[4], of_uu[4], of_x[4], of_xx[4];
      for (int k = 0; k < 4; ++k) {
        const int64_t column = (b + m) * G + k * H + j;
        const Wide da = grads[k], v = units.load(at.u + column);
        const Wide in = at.x ? units.load(at.x + column) : Wide{} + row.phi[k];
        of_u[k] = load(p + (HH + k) * LANES) * da, of_uu[k] = of_u[k] * v;
        of_x[k] = load(p + (IH + k) * LANES) * da, of_xx[k] = of_x[k] * in;
        sum_a[k] += da, sum_au[k] += da * v, sum_ax[k] += da * in;
        store(kept + k * LANES, da);  // overwrites i, f, g and the fourth value, which are no longer needed
      }
      add_gates(row.sum_u, of_u, s.groups), add_gates(row.sum_uu, of_uu, s.groups);
      add_gates(row.sum_x, of_x, s.groups), add_gates(row.sum_xx, of_xx, s.groups);
    }
    for (int k = 0; k < 4; ++k) {
      store(sum + (BIAS + k) * LANES, load(sum + (BIAS + k) * LANES) + sum_a[k]);
      store(sum + (HH + k) * LANES, load(sum + (HH + k) * LANES) + sum_au[k]);
      store(sum + (IH + k) * LANES, load(sum + (IH + k) * LANES) + sum_ax[k]);
    }
  });
}

// Backward step of M rows from b on: computes du (4H), dx and dc from dh, dy and dc, and adds to the sums by blocks.
template <bool NOISE>
void backward_rows(const Step& at, const RowNorm& layer, int64_t b, int M, float* du, float* scratch, float* sums,
                   float (&squared)[4]) {
  const Lstm& s = at.s;
  const int H = s.H, G = 4 * H;
  Row rows[MAX_ROWS];
  for (int m = 0; m < M; ++m) {
    Row& row = rows[m];
    const int64_t place = at.t * s.B + b + m;
    for (int k = 0; k < 4; ++k) {
      const int64_t stored = place * s.groups + (s.groups == 1 ? 0 : k);
      if (s.gamma_hh) row.rstd[k] = rsqrt_of(s.var_hh[stored] + s.eps);
      if (s.gamma_ih && at.x) row.rstd_x[k] = rsqrt_of(s.var_ih[stored] + s.eps);
    }
    if (at.feature) layer.set_factor(at.feature[b + m], row.phi);
    if (s.gamma_c) row.mean_c[0] = s.mean_c[place], row.rstd_c = rsqrt_of(s.var_c[place] + s.eps);
    if (NOISE) row.key = at.keys[b + m];
  }
  through_output<NOISE>(at, layer, b, M, rows, scratch, sums);
  for (int m = 0; m < M && s.gamma_c; ++m)
    for (int k = 0; k < 2; ++k) rows[m].mean[k] = total(rows[m].sum_c[k]) / (float)H;
  through_gates<NOISE>(at, layer, b, M, rows, scratch, sums);
  for (int m = 0; m < M; ++m) {  // through the normalization of the two products
    Row& row = rows[m];
    float mean_u[4] = {}, mean_uu[4] = {}, mean_x[4] = {}, mean_xx[4] = {};
    if (s.gamma_hh) means(row.sum_u, H, s.groups, mean_u), means(row.sum_uu, H, s.groups, mean_uu);
    if (s.gamma_ih) means(row.sum_x, H, s.groups, mean_x), means(row.sum_xx, H, s.groups, mean_xx);
    for (int k = 0; k < 4; ++k) squared[k] += row.phi[k] * row.phi[k] * mean_xx[k];
    over_blocks(0, H, [&](auto units, int j) {
      const float* const p = layer.table.get() + j / LANES * PARTS * LANES;
      const float* const kept = scratch + (int64_t)m * round_up(H) * SLOTS + j / LANES * SLOTS * LANES;
      for (int k = 0; k < 4; ++k) {
        const int64_t column = (b + m) * G + k * H + j;
        const Wide da = load(kept + k * LANES), u = units.load(at.u + column);
        units.store(du + column, row.rstd[k] * (load(p + (HH + k) * LANES) * da - mean_u[k] - u * mean_uu[k]));
        if (!at.x) continue;
        const Wide of_x = load(p + (IH + k) * LANES) * da, x = units.load(at.x + column);
        units.store(at.x + column, row.rstd_x[k] * (of_x - mean_x[k] - x * mean_xx[k]));
      }
    });
  }
}

template <bool NOISE>
void layer_forward(const Lstm& s) {
  const int H = s.H, G = 4 * H, columns = blocks_together(s) * STRIP, num_columns = (G + columns - 1) / columns;
  const RowNorm layer(s);
  const Strips weight(G, H, s.packed);
  const int together = rows_together(H);
  const int64_t size = (int64_t)together * round_up(H) * SLOTS;
  Floats product(new float[(int64_t)s.B * G]), scratch(new float[s.threads * size]);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    const Room room(s);
    for (int64_t t = 0; t < s.T; ++t) {
      const Step at(s, t, true, room);
#pragma omp for schedule(static)
      for (int n = 0; n < num_columns; ++n) {
        const int from = n * columns, to = std::min(G, from + columns);
        weight.times_all<false>(from, to, at.n, at.h_prev, H, product.get() + from, G, false);
      }
#pragma omp for schedule(static)
      for (int part = 0; part < s.threads; ++part) {
        const int end = begin_of(part + 1, s.threads, at.n);
        for (int b = begin_of(part, s.threads, at.n); b < end; b += together)
          forward_rows<NOISE>(at, layer, b, std::min(together, end - b), product.get(), scratch.get() + part * size);
      }
#pragma omp for schedule(static)
      for (int64_t b = at.n; b < s.B; ++b) {  // finished sequences
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
  const int together = rows_together(H);
  const int64_t kept = (int64_t)together * round_up(H) * SLOTS;
  // The sums of each part of the rows. Those of a step are summed apart, which loses fewer digits.
  Floats scratch(new float[s.threads * kept]), of_step(new float[s.threads * layer.size]());
  Floats sums(new float[s.threads * layer.size]());
  std::unique_ptr<float[][4]> squared(new float[s.threads][4]());
  backward_steps(s, [&](const Step& at, float* du) {
#pragma omp for schedule(static)
    for (int part = 0; part < s.threads; ++part) {
      float *const now = of_step.get() + part * layer.size, *const all = sums.get() + part * layer.size;
      const int end = begin_of(part + 1, s.threads, at.n);
      for (int b = begin_of(part, s.threads, at.n); b < end; b += together)
        backward_rows<NOISE>(at, layer, b, std::min(together, end - b), du, scratch.get() + part * kept, now,
                             squared[part]);
      for (int64_t i = 0; i < layer.size; ++i) all[i] += now[i], now[i] = 0.0f;
    }
#pragma omp for schedule(static)
    for (int64_t b = at.n; b < s.B; ++b) {  // the gradient of a finished sequence passes to the previous step
      std::memset(du + b * G, 0, G * sizeof(float));
      if (at.x) std::memset(at.x + b * G, 0, G * sizeof(float));
      for (int64_t j = b * H; j < (b + 1) * H; ++j) s.dh[j] += s.dy[(int64_t)s.B * H * at.t + j];
    }
  });
  for (int part = 0; part < s.threads; ++part) layer.add_gradients(sums.get() + part * layer.size, squared[part]);
}

}  // namespace

extern "C" {

void bnrnn_lstm_layer_forward(const Lstm* s) { s->noisy ? layer_forward<true>(*s) : layer_forward<false>(*s); }

void bnrnn_lstm_layer_backward(const Lstm* s) { s->noisy ? layer_backward<true>(*s) : layer_backward<false>(*s); }

}  // extern "C"
