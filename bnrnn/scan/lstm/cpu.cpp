// The (batch-normalized) LSTM on the CPU in float32, forward and backward over a whole sequence (see fused.py).
//
// A time step is computed block by block. For each block of units, the product h W_hh^T, batch statistics, normalization,
// gates, cell and output are computed while the block is in the cache. A block needs all of h (forward) or all of du
// (backward), but no other data of other blocks. The kernel has its own matrix product for two reasons: the product is
// fused with the step, and W_hh is packed only once for a sequence.
//
// Equation numbers are those of Cooijmans et al. 2016. The order of the gates is torch's, i f g o. All rows are
// contiguous.

#include "step.h"

namespace {

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
// gates in a row are `gap` floats apart. NOISE: whether there is zoneout or recurrent dropout.
template <bool NOISE, bool TAIL>
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
  float* const u = at.u ? at.u + 4 * (int64_t)s.B * j : nullptr;
  for (int b = 0; b < at.m; ++b) {
    const int64_t r = b * row + j, cell = b * H + j;
    at.prefetch<true>(b, j);
    Wide a[4];
    for (int k = 0; k < 4; ++k) {  // eq. 6
      Wide v = units.load(product + b * width + k * gap), in;
      if (s.gamma_hh) v = (v - mean[k]) * rstd[k];
      if (u) units.store(u + (b * 4 + k) * units.count, v);
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
    if constexpr (NOISE) {
      Wide kept_c, kept_h, passed;
      at.noise.factors(at.keys[b], j, kept_c, kept_h, passed);
      const Wide old = units.load(at.c_prev + cell), c = sigmoid(a[1]) * old + sigmoid(a[0]) * (passed * tanh(a[2]));
      units.store(at.c + cell, kept_c * old + (1.0f - kept_c) * c);
      units.store(product + b * width + gap, c);
      units.store(product + b * width + 2 * gap, kept_h);
    } else {
      units.store(at.c + cell, sigmoid(a[1]) * units.load(at.c_prev + cell) + sigmoid(a[0]) * tanh(a[2]));  // eq. 7
    }
    units.store(product + b * width, sigmoid(a[3]));
  }
  for (int64_t b = at.n; b < s.B; ++b) {  // finished sequences
    units.store(at.c + b * H + j, units.load(at.c_prev + b * H + j));
    units.store(at.y + b * H + j, units.load(at.h_prev + b * H + j));
    if (NOISE && b < at.m) units.store(product + b * width + gap, units.load(at.c_prev + b * H + j));
  }
  const float* const cell = NOISE ? product + gap : at.c + j;  // before zoneout
  const int64_t cells = NOISE ? width : H;                     // floats in a row of it
  Wide m{}, r = Wide{} + 1.0f;
  if (s.gamma_c)
    statistics<1>(units, s.batch, cell, at.m, cells, 0, s.mean_c + t1 + j, s.var_c + t1 + j, 0, s.eps, &m, &r);
  const Wide scale = r * units.load_or(s.gamma_c, j, 1.0f), shift = units.load_or(s.beta_c, j, 0.0f);
  for (int b = 0; b < at.n; ++b) {  // eq. 8
    Wide h = units.load(product + b * width) * tanh((units.load(cell + b * cells) - m) * scale + shift);
    if constexpr (NOISE) {
      const Wide kept = units.load(product + b * width + 2 * gap);
      h = kept * units.load(at.h_prev + b * H + j) + (1.0f - kept) * h;
    }
    units.store(at.y + b * H + j, h);
  }
}

// Number of vectors that backward_block stores for each sequence.
constexpr int slots(bool noise) { return noise ? 8 : 5; }

// Backward step of the block of units that begins at j: computes du, dx and dc from dh, dy and dc. Writes du (B, 4H).
// scratch is (B, SLOTS LANES). With zoneout it writes the direct gradient of the previous h into dh.
template <bool NOISE, bool TAIL>
void backward_block(const Step& at, Units<TAIL> units, int j, float* du, float* scratch) {
  const Lstm& s = at.s;
  const int wide = slots(NOISE) * LANES;
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
  const float* const kept_u = at.u + 4 * (int64_t)s.B * j;
  Wide sum_dz{}, sum_dzc{};
  for (int b = 0; b < at.n; ++b) {  // through eq. 8
    const int64_t r = b * row + j, cell = b * H + j;
    at.prefetch<false>(b, j);
    Wide a[4];
    for (int k = 0; k < 4; ++k) {
      const Wide in = at.feature ? at.feature[b] * slope[k] : gamma_x[k] * units.load(at.x + r + k * H);
      a[k] = gamma[k] * units.load(kept_u + (b * 4 + k) * units.count) + in + bias[k];
    }
    float* p = scratch + b * wide;
    Wide c, grad = units.load(s.dh + cell) + units.load(dy + cell);
    if constexpr (NOISE) {
      Wide kept_c, kept_h, passed;
      at.noise.factors(at.keys[b], j, kept_c, kept_h, passed);
      units.store(s.dh + cell, kept_h * grad);
      grad *= 1.0f - kept_h;
      c = sigmoid(a[1]) * units.load(at.c_prev + cell) + sigmoid(a[0]) * (passed * tanh(a[2]));
      store(p + 5 * LANES, c);
      store(p + 6 * LANES, kept_c);
      store(p + 7 * LANES, passed);
    } else {
      c = units.load(at.c + cell);
    }
    const Wide c_hat = (c - m_c) * r_c, z = tanh(g_c * c_hat + shift), o = sigmoid(a[3]);
    const Wide dz = grad * o * (1.0f - z * z);
    sum_dz += dz;
    sum_dzc += dz * c_hat;
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
    float* p = scratch + b * wide;
    const Wide i = load(p), f = load(p + LANES), g = load(p + 2 * LANES);
    const Wide c_hat = ((NOISE ? load(p + 5 * LANES) : units.load(at.c + cell)) - m_c) * r_c;
    Wide d = units.load(s.dc + cell), kept{}, through{};
    if constexpr (NOISE) {
      kept = load(p + 6 * LANES);
      through = kept * d;
      d *= 1.0f - kept;
    }
    d = d + g_c * r_c * (load(p + 4 * LANES) - mean_dz - c_hat * mean_dzc);
    const Wide d_g = NOISE ? d * load(p + 7 * LANES) : d;
    const Wide grads[4] = {d_g * g * i * (1.0f - i), d * units.load(at.c_prev + cell) * f * (1.0f - f),
                           d_g * i * (1.0f - g * g), load(p + 3 * LANES)};
    units.store(s.dc + cell, NOISE ? d * f + through : d * f);
    for (int k = 0; k < 4; ++k) {
      sum_a[k] += grads[k];
      if (s.gamma_hh) sum_au[k] += grads[k] * units.load(kept_u + (b * 4 + k) * units.count);
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
    for (int k = 0; k < 4; ++k) store(scratch + b * wide + k * LANES, Wide{});
  }
  for (int k = 0; k < 4; ++k) {  // through the normalization of the two products
    const int64_t column = k * H + j;
    if (s.bias) units.add(s.dbias + column, sum_a[k]);
    if (s.gamma_hh) units.add(s.dgamma_hh + column, sum_au[k]);
    const Wide mean = sum_a[k] * inverse, mean_u = sum_au[k] * inverse, mean_x = sum_ax[k] * inverse;
    const Wide scale = s.gamma_hh ? gamma[k] * rsqrt(units.load(s.var_hh + t4 + column) + s.eps) : Wide{};
    for (int b = 0; b < at.m; ++b) {
      const Wide da = load(scratch + (int64_t)b * wide + k * LANES), u = units.load(kept_u + (b * 4 + k) * units.count);
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
      const Wide da = load(scratch + (int64_t)b * wide + k * LANES);
      float* x = at.x + b * row + column;
      units.store(x, s.gamma_ih ? scale_x * (da - mean - units.load(x) * mean_x) : da);
    }
    for (int64_t b = at.m; b < s.B; ++b) units.store(at.x + b * row + column, Wide{});
  }
}

// Packs W_hh^T. If `by_blocks`, the columns of the four gates of a block are adjacent.
void pack(int H, const float* weight_hh, float* packed, bool by_blocks, int threads) {
  const Strips weight(4 * H, H, packed);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int n = 0; n < 4 * H; n += STRIP)
    weight.pack_columns(n, [&](int column) {
      const int j = column / (4 * LANES) * LANES, units = std::min(LANES, H - j), in_block = column - 4 * j;
      return weight_hh + (int64_t)H * (by_blocks ? in_block / units * H + j + in_block % units : column);
    });
}

// Runs the steps backward. back(at, du) computes du (B, 4H) and dx of a step, and the gradient of the previous c; all
// threads call it. It also adds dy to dh of finished sequences.
template <typename Back>
void backward_steps(const Lstm& s, Back back) {
  const int H = s.H, G = 4 * H, num_strips = (H + STRIP - 1) / STRIP;
  Floats packed(new float[Strips::size(H, G)]), shared(new float[Strips::size(G, DEPTH)]);
  const Strips weight(H, G, packed.get());
  // dW_hh is the sum of h^T du over the steps. It is computed in chunks of steps whose du is still in the cache.
  const int64_t chunk = std::max(1, DEPTH / std::max(1, s.B)), size = (int64_t)s.B * H;
  Floats du(new float[chunk * size * 4]);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    const Room room(s);
#pragma omp for schedule(static)
    for (int n = 0; n < H; n += STRIP) weight.pack_rows(n, s.weight_hh, H);
    int64_t in_chunk = 0;  // number of steps in the chunk so far; they are filled in from the end of the chunk
    for (int64_t t = s.T - 1; t >= 0; --t) {
      const Step at(s, t, false, room);
      float* du_t = du.get() + (chunk - ++in_chunk) * size * 4;
      back(at, du_t);
      // The part of dh that a thread computes, of M sequences from m on. A large W_hh is divided among the threads, so that
      // each reads only some of it. Otherwise the sequences are, in whole slabs: sums do not depend on the number of threads.
      const auto add_product = [&](int part, int m, int M, bool add) {
        int n = 0, end = H, from = m, to = m + M;
        if (weight.far) {
          n = begin_of(part, s.threads, num_strips) * STRIP;
          end = std::min(H, begin_of(part + 1, s.threads, num_strips) * STRIP);
        } else {
          const int slabs = std::max(1, num_slabs(M));
          from = m + begin_of(begin_of(part, s.threads, slabs), slabs, M);
          to = m + begin_of(begin_of(part + 1, s.threads, slabs), slabs, M);
        }
        weight.times_all<false>(n, end, to - from, du_t + from * (int64_t)G, G, s.dh + from * (int64_t)H + n, H, add);
      };
#pragma omp for schedule(static)
      for (int part = 0; part < s.threads; ++part) {
        add_product(part, 0, at.n, s.noisy);
        if (at.m > at.n) add_product(part, at.n, at.m - at.n, true);
      }
      if (in_chunk == chunk || t <= 1) {  // step 0 is a chunk of its own, because h_0 is stored separately
        product(H, G, (int)in_chunk * s.B, at.h_prev, 1, H, {du_t, G, false}, s.dweight_hh, true, shared.get(), s.threads);
        in_chunk = 0;
      }
    }
  }
}

template <bool NOISE>
void forward(const Lstm& s) {
  const int H = s.H, num_blocks = (H + LANES - 1) / LANES;
  const int group = blocks_together(s), groups = (num_blocks + group - 1) / group;
  const Strips weight(4 * H, H, s.packed);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    const int64_t size = (int64_t)s.B * 4 * LANES;
    Floats product(new float[group * size]);
    const Room room(s);
    for (int64_t t = 0; t < s.T; ++t) {
      const Step at(s, t, true, room);
#pragma omp for schedule(static)
      for (int g = 0; g < groups; ++g) {
        const int from = g * group * LANES, to = std::min(H, from + group * LANES);
        weight.times_all<false>(4 * from, 4 * to, at.m, at.h_prev, H, product.get(), 4 * LANES, false, size);
        over_blocks(from, to, [&](auto units, int j) {
          forward_block<NOISE>(at, units, j, product.get() + (j - from) / LANES * size, units.count);
        });
      }
    }
  }
}

template <bool NOISE>
void backward(const Lstm& s) {
  const int H = s.H, num_blocks = (H + LANES - 1) / LANES;
  const int64_t size = (int64_t)s.B * slots(NOISE) * LANES;
  Floats scratch(new float[s.threads * size]);
  backward_steps(s, [&](const Step& at, float* du) {
    const float* dy = s.dy + (int64_t)s.B * H * at.t;
#pragma omp for schedule(static)
    for (int part = 0; part < s.threads; ++part)
      for (int block = begin_of(part, s.threads, num_blocks); block < begin_of(part + 1, s.threads, num_blocks); ++block) {
        const int from = block * LANES, to = std::min(H, from + LANES);
        over_blocks(from, to,
                    [&](auto units, int j) { backward_block<NOISE>(at, units, j, du, scratch.get() + part * size); });
        for (int64_t b = at.n; b < s.B; ++b)  // the gradient of a finished sequence passes to the previous step
          for (int j = from; j < to; ++j) s.dh[b * H + j] += dy[b * H + j];
      }
  });
}

}  // namespace

extern "C" {

// Number of floats of the packed W_hh (4H, H).
int64_t bnrnn_lstm_packed_size(int H) { return Strips::size(4 * H, H); }

// Packs W_hh for bnrnn_lstm_forward if `by_blocks`, and else for bnrnn_lstm_layer_forward.
void bnrnn_lstm_pack(int H, const float* weight_hh, float* packed, int by_blocks, int threads) {
  pack(H, weight_hh, packed, by_blocks, threads);
}

void bnrnn_lstm_forward(const Lstm* s) { s->noisy ? forward<true>(*s) : forward<false>(*s); }

void bnrnn_lstm_backward(const Lstm* s) { s->noisy ? backward<true>(*s) : backward<false>(*s); }

}  // extern "C"
