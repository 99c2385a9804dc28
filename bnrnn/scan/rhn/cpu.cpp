// Recurrent highway networks on the CPU in float32, forward and backward over a whole sequence (see fused.py).
//
// As in lstm/cpu.cpp, a highway layer is computed block by block. For each block of units, the product, the sum with the
// input, statistics, gates and state are computed while the block is in the cache. The order of the gates is h t (c).
// All rows are contiguous.

#include "../native/blocks.h"

extern "C" {

// The arguments of a scan. Each of the D layers has Q gates of H units; the first K layers normalize the state that enters
// them. x is (T, B, QH), a (T, D, B, QH), states (T, D, B, H), normal (T, K, B, H), statistics (T, QH), (T, K, H) and
// (T, D, QH). The pointer of an optional argument may be null. The first running[t] of the B sequences run at step t; null
// means all.
struct Rhn {
  int32_t T, B, H, Q, D, K, batch, threads;  // batch: whether to compute and write batch statistics, or to read them
  float eps;
  const int32_t* running;
  const float *weight, *bias, *gamma_x, *gamma_s, *beta_s, *gamma_z, *s_0;
  float *mean_x, *var_x, *mean_s, *var_s, *mean_z, *var_z;
  float *x;  // W x; the forward pass normalizes it, the backward pass overwrites it with its gradient
  float *a;  // output: the sums a_d, after normalization if any; the backward pass overwrites them with their gradients
  float *states, *normal;  // outputs: s_d, and the normalized states that enter the first K layers
  const float* dy;
  float* ds;  // gradient of the last state; the backward pass overwrites it with that of the initial state
  float *dbias, *dgamma_x, *dgamma_s, *dbeta_s, *dgamma_z;  // added to
};
}

namespace {

// One layer of one time step: its indices, and pointers to its part of the arrays.
struct Layer {
  const Rhn& s;
  int64_t t, d, row;  // row: floats in a row of x and a
  int n;              // number of sequences that run
  float *x, *a, *state, *normal;
  const float* before;  // the state that enters

  Layer(const Rhn& s, int64_t t, int64_t d) : s(s), t(t), d(d), row((int64_t)s.Q * s.H) {
    n = s.running ? s.running[t] : s.B;
    const int64_t size = (int64_t)s.B * s.H, place = t * s.D + d;
    x = s.x + size * s.Q * t;
    a = s.a + size * s.Q * place;
    state = s.states + size * place;
    before = place ? state - size : s.s_0;
    normal = d < s.K ? s.normal + size * (t * s.K + d) : nullptr;
  }
};

// Normalizes the first n rows of the entering state. Writes the normalized values to `normal`, and those with scale and
// shift to v.
template <bool TAIL>
void enter_block(const Layer& at, Units<TAIL> units, int j, float* v) {
  const Rhn& s = at.s;
  const int64_t H = s.H, stored = (at.t * s.K + at.d) * H + j, own = at.d * H + j;
  Wide mean, rstd;
  statistics<1>(units, s.batch, at.before + j, at.n, H, 0, s.mean_s + stored, s.var_s + stored, 0, s.eps, &mean, &rstd);
  const Wide gamma = units.load(s.gamma_s + own), beta = units.load_or(s.beta_s, own, 0.0f);
  for (int64_t b = 0; b < at.n; ++b) {
    const Wide hat = (units.load(at.before + b * H + j) - mean) * rstd;
    units.store(at.normal + b * H + j, hat);
    units.store(v + b * H + j, gamma * hat + beta);
  }
}

// Forward pass of the block of units that begins at j, after its product, whose rows are `width` floats long and whose
// gates are `gap` floats apart.
template <int Q, bool TAIL>
void forward_block(const Layer& at, Units<TAIL> units, int j, float* product, int64_t width, int64_t gap) {
  const Rhn& s = at.s;
  const int64_t H = s.H, of_x = at.t * at.row + j, of_z = (at.t * s.D + at.d) * at.row + j, own = at.d * at.row + j;
  Wide mean[Q]{}, rstd[Q]{}, gamma[Q], bias[Q];
  if (at.d == 0) {
    if (s.gamma_x)
      statistics<Q>(units, s.batch, at.x + j, at.n, at.row, H, s.mean_x + of_x, s.var_x + of_x, H, s.eps, mean, rstd);
    for (int64_t b = 0; b < at.n; ++b)
      for (int k = 0; k < Q; ++k) {
        float *x = at.x + b * at.row + k * H + j, *p = product + b * width + k * gap;
        Wide v = units.load(x);
        if (s.gamma_x) {
          v = (v - mean[k]) * rstd[k];
          units.store(x, v);
          v *= units.load(s.gamma_x + k * H + j);
        }
        units.store(p, units.load(p) + v);
      }
  }
  if (s.gamma_z)
    statistics<Q>(units, s.batch, product, at.n, width, gap, s.mean_z + of_z, s.var_z + of_z, H, s.eps, mean, rstd);
  for (int k = 0; k < Q; ++k) {
    gamma[k] = units.load_or(s.gamma_z, own + k * H, 1.0f);
    bias[k] = units.load_or(s.bias, own + k * H, 0.0f);
  }
  for (int64_t b = 0; b < at.n; ++b) {
    Wide z[Q];
    for (int k = 0; k < Q; ++k) {
      Wide v = units.load(product + b * width + k * gap);
      if (s.gamma_z) v = (v - mean[k]) * rstd[k];
      units.store(at.a + b * at.row + k * H + j, v);
      z[k] = gamma[k] * v + bias[k];
    }
    const Wide transform = sigmoid(z[1]), carry = Q == 3 ? sigmoid(z[Q - 1]) : 1.0f - transform;
    units.store(at.state + b * H + j, tanh(z[0]) * transform + units.load(at.before + b * H + j) * carry);
  }
  for (int64_t b = at.n; b < s.B; ++b)  // finished sequences
    units.store(at.state + b * H + j, units.load(at.before + b * H + j));
}

// Backward pass of the block of units that begins at j. Overwrites the sums and x with their gradients, and ds with the
// part of the gradient that flows through the carry gate. scratch is (B, Q LANES).
template <int Q, bool TAIL>
void backward_block(const Layer& at, Units<TAIL> units, int j, float* scratch) {
  const Rhn& s = at.s;
  const int64_t H = s.H, of_x = at.t * at.row + j, of_z = (at.t * s.D + at.d) * at.row + j, own = at.d * at.row + j;
  const float* dy = at.d == s.D - 1 ? s.dy + (int64_t)s.B * H * at.t : nullptr;
  const float inverse = s.batch ? 1.0f / (float)at.n : 0.0f;  // no gradient flows through population statistics
  Wide gamma[Q], bias[Q], sum[Q]{}, sum_a[Q]{};
  for (int k = 0; k < Q; ++k) {
    gamma[k] = units.load_or(s.gamma_z, own + k * H, 1.0f);
    bias[k] = units.load_or(s.bias, own + k * H, 0.0f);
  }
  for (int64_t b = 0; b < at.n; ++b) {
    const int64_t cell = b * H + j;
    Wide z[Q], a[Q], dz[Q];
    for (int k = 0; k < Q; ++k) {
      a[k] = units.load(at.a + b * at.row + k * H + j);
      z[k] = gamma[k] * a[k] + bias[k];
    }
    const Wide h = tanh(z[0]), transform = sigmoid(z[1]), before = units.load(at.before + cell);
    const Wide carry = Q == 3 ? sigmoid(z[Q - 1]) : 1.0f - transform;
    const Wide d = units.load(s.ds + cell) + units.load_or(dy, cell, 0.0f);
    dz[0] = d * transform * (1.0f - h * h);
    dz[1] = d * (Q == 3 ? h : h - before) * transform * (1.0f - transform);
    if (Q == 3) dz[Q - 1] = d * before * carry * (1.0f - carry);
    units.store(s.ds + cell, d * carry);
    for (int k = 0; k < Q; ++k) {
      sum[k] += dz[k];
      sum_a[k] += dz[k] * a[k];
      store(scratch + (b * Q + k) * LANES, dz[k]);
    }
  }
  for (int64_t b = at.n; dy && b < s.B; ++b) units.add(s.ds + b * H + j, units.load(dy + b * H + j));
  for (int k = 0; k < Q; ++k) {
    const int64_t column = k * H + j;
    if (s.bias) units.add(s.dbias + own + k * H, sum[k]);
    if (s.gamma_z) units.add(s.dgamma_z + own + k * H, sum_a[k]);
    const Wide scale = s.gamma_z ? gamma[k] * rsqrt(units.load(s.var_z + of_z + k * H) + s.eps) : Wide{} + 1.0f;
    const Wide mean = sum[k] * inverse, mean_a = sum_a[k] * inverse;
    Wide sum_d{}, sum_x{};
    for (int64_t b = 0; b < at.n; ++b) {
      float* a = at.a + b * at.row + column;
      Wide da = load(scratch + (b * Q + k) * LANES);
      if (s.gamma_z) da = scale * (da - mean - units.load(a) * mean_a);
      units.store(a, da);
      if (at.d == 0 && s.gamma_x) {
        sum_d += da;
        sum_x += da * units.load(at.x + b * at.row + column);
      }
    }
    for (int64_t b = at.n; b < s.B; ++b) units.store(at.a + b * at.row + column, Wide{});
    if (at.d) continue;
    Wide scale_x{};
    if (s.gamma_x) {
      units.add(s.dgamma_x + column, sum_x);
      scale_x = units.load(s.gamma_x + column) * rsqrt(units.load(s.var_x + of_x + k * H) + s.eps);
      sum_d *= inverse;
      sum_x *= inverse;
    }
    for (int64_t b = 0; b < s.B; ++b) {
      float* x = at.x + b * at.row + column;
      Wide dx = units.load(at.a + b * at.row + column);
      if (s.gamma_x) dx = scale_x * (dx - sum_d - units.load(x) * sum_x);
      units.store(x, b < at.n ? dx : Wide{});
    }
  }
}

// Backpropagates dv through the normalization of the entering state and adds the result to ds.
template <bool TAIL>
void leave_block(const Layer& at, Units<TAIL> units, int j, const float* dv) {
  const Rhn& s = at.s;
  const int64_t H = s.H, stored = (at.t * s.K + at.d) * H + j, own = at.d * H + j;
  const float inverse = s.batch ? 1.0f / (float)at.n : 0.0f;
  Wide sum{}, sum_hat{};
  for (int64_t b = 0; b < at.n; ++b) {
    const Wide d = units.load(dv + b * H + j);
    sum += d;
    sum_hat += d * units.load(at.normal + b * H + j);
  }
  units.add(s.dgamma_s + own, sum_hat);
  if (s.beta_s) units.add(s.dbeta_s + own, sum);
  const Wide scale = units.load(s.gamma_s + own) * rsqrt(units.load(s.var_s + stored) + s.eps);
  sum *= inverse;
  sum_hat *= inverse;
  for (int64_t b = 0; b < at.n; ++b)
    units.add(s.ds + b * H + j, scale * (units.load(dv + b * H + j) - sum - units.load(at.normal + b * H + j) * sum_hat));
}

// Calls function(std::integral_constant<int, Q>) for the number of gates, 2 or 3.
template <typename Function>
void with_gates(const Rhn& s, Function function) {
  if (s.Q == 3)
    function(std::integral_constant<int, 3>());
  else
    function(std::integral_constant<int, 2>());
}

// The packed weights of D layers, which the threads share.
struct Weights {
  int64_t size;
  Floats data;
  Weights(int D, int N, int K) : size(Strips::size(N, K)), data(new float[D * size]) {}
  float* of(int64_t d) const { return data.get() + d * size; }
};

}  // namespace

extern "C" {

void bnrnn_rhn_forward(const Rhn* sequence) {
  const Rhn& s = *sequence;
  const int H = s.H, Q = s.Q, blocks = (H + STRIP - 1) / STRIP, width = Q * STRIP;
  const Weights weights(s.D, blocks * width, H);
  Floats entering(new float[(int64_t)s.B * H]);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    Floats product(new float[(int64_t)s.B * width]);
    // The gates of a block are adjacent and padded to whole strips: column i of a block is unit i % w of gate i / w.
#pragma omp for schedule(static) collapse(2)
    for (int d = 0; d < s.D; ++d)
      for (int block = 0; block < blocks; ++block) {
        const int j = block * STRIP, w = std::min(STRIP, H - j);
        const Strips weight(Q * w, H, weights.of(d) + (int64_t)block * width * H);
        for (int n = 0; n < Q * w; n += STRIP)
          weight.pack_columns(n, [&](int i) { return s.weight + (((int64_t)d * Q + i / w) * H + j + i % w) * H; });
      }
    for (int64_t t = 0; t < s.T; ++t)
      for (int64_t d = 0; d < s.D; ++d) {
        const Layer at(s, t, d);
        if (at.normal) {
#pragma omp for schedule(static)
          for (int block = 0; block < blocks; ++block)
            over_blocks(block * STRIP, std::min(H, (block + 1) * STRIP),
                        [&](auto units, int j) { enter_block(at, units, j, entering.get()); });
        }
        const float* v = at.normal ? entering.get() : at.before;
#pragma omp for schedule(static)
        for (int block = 0; block < blocks; ++block) {
          const int from = block * STRIP, to = std::min(H, from + STRIP), w = to - from;
          const Strips weight(Q * w, H, weights.of(d) + (int64_t)block * width * H, s.D * blocks);
          weight.times_all<false>(0, Q * w, at.n, v, H, product.get(), width, false);
          with_gates(s, [&](auto gates) {
            over_blocks(from, to, [&](auto units, int j) {
              forward_block<gates>(at, units, j, product.get() + j - from, width, w);
            });
          });
        }
      }
  }
}

void bnrnn_rhn_backward(const Rhn* sequence) {
  const Rhn& s = *sequence;
  const int H = s.H, Q = s.Q, blocks = (H + LANES - 1) / LANES, num_strips = (H + STRIP - 1) / STRIP;
  const Weights weights(s.D, H, Q * H);
  Floats leaving(new float[(int64_t)s.B * H]);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    Floats scratch(new float[(int64_t)s.B * Q * LANES]);
#pragma omp for schedule(static) collapse(2)
    for (int d = 0; d < s.D; ++d)
      for (int n = 0; n < H; n += STRIP)
        Strips(H, Q * H, weights.of(d)).pack_rows(n, s.weight + (int64_t)d * Q * H * H, H);
    for (int64_t t = s.T - 1; t >= 0; --t)
      for (int64_t d = s.D - 1; d >= 0; --d) {
        const Layer at(s, t, d);
#pragma omp for schedule(static)
        for (int block = 0; block < blocks; ++block)
          with_gates(s, [&](auto gates) {
            over_blocks(block * LANES, std::min(H, (block + 1) * LANES),
                        [&](auto units, int j) { backward_block<gates>(at, units, j, scratch.get()); });
          });
        float* to = at.normal ? leaving.get() : s.ds;
#pragma omp for schedule(static)
        for (int part = 0; part < s.threads; ++part) {
          const int n = begin_of(part, s.threads, num_strips) * STRIP;
          const int end = std::min(H, begin_of(part + 1, s.threads, num_strips) * STRIP);
          Strips(H, Q * H, weights.of(d), s.D).times_all<false>(n, end, at.n, at.a, at.row, to + n, H, !at.normal);
        }
        if (at.normal) {
#pragma omp for schedule(static)
          for (int block = 0; block < blocks; ++block)
            over_blocks(block * LANES, std::min(H, (block + 1) * LANES),
                        [&](auto units, int j) { leave_block(at, units, j, leaving.get()); });
        }
      }
  }
}

}  // extern "C"
