// Recurrent highway networks on the CPU in float32, forward and backward over a whole sequence (see rhn_fused.py).
//
// As in lstm_cpu.cpp a highway layer goes by blocks of units: product, sum with the input, statistics, gates and state of
// a block while it is in the cache. Gates stand in the order h t (c). All rows are contiguous.

#include "cpu_blocks.h"

extern "C" {

// One sequence: Q gates of H units in each of D layers, of which the first K normalize the state that enters them. x is
// (T, B, QH), a (T, D, B, QH), states (T, D, B, H), normal (T, K, B, H), statistics (T, QH), (T, K, H), (T, D, QH); a
// pointer may be null where a term is not there. Of the B sequences the first running[t] run at step t; null: all.
struct Rhn {
  int32_t T, B, H, Q, D, K, batch, threads;  // batch: statistics are those of the batch, and are written; else read
  float eps;
  const int32_t* running;
  const float *weight, *bias, *gamma_x, *gamma_s, *beta_s, *gamma_z, *s_0;
  float *mean_x, *var_x, *mean_s, *var_s, *mean_z, *var_z;
  float *x;  // W x; normalized on return; after the backward pass its gradient
  float *a;  // written: sums, normalized if they are; after the backward pass their gradients
  float *states, *normal;  // written
  const float* dy;
  float* ds;  // gradient of the last state; after the backward pass of the first
  float *dbias, *dgamma_x, *dgamma_s, *dbeta_s, *dgamma_z;  // added to
};
}

namespace {

// A layer's place in the sequence, and its part of the sequence's arrays.
struct Layer {
  const Rhn& s;
  int64_t t, d, row;  // row: of x and a
  int n;              // sequences that run
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

// The first n rows of the entering state, normalized, into `normal`, and with scale and shift into v.
template <int N>
void enter_block(const Layer& at, int j, float* v) {
  typedef Block<N> X;
  const Rhn& s = at.s;
  const int64_t H = s.H, stored = (at.t * s.K + at.d) * H + j, own = at.d * H + j;
  typename X::V mean, rstd;
  X::template statistics<1>(s.batch, at.before + j, at.n, H, 0, s.mean_s + stored, s.var_s + stored, 0, s.eps, &mean,
                            &rstd);
  const typename X::V gamma = X::load(s.gamma_s + own), beta = X::load_or(s.beta_s, own, 0.0f);
  for (int64_t b = 0; b < at.n; ++b) {
    const typename X::V hat = (X::load(at.before + b * H + j) - mean) * rstd;
    X::store(at.normal + b * H + j, hat);
    X::store(v + b * H + j, gamma * hat + beta);
  }
}

// Everything after the product of units j ... j + N, whose rows are `width` long and whose gates are `gap` apart.
template <int N, int Q>
void forward_block(const Layer& at, int j, float* product, int64_t width, int64_t gap) {
  typedef Block<N> X;
  typedef typename X::V V;
  const Rhn& s = at.s;
  const int64_t H = s.H, of_x = at.t * at.row + j, of_z = (at.t * s.D + at.d) * at.row + j, own = at.d * at.row + j;
  V mean[Q]{}, rstd[Q]{}, gamma[Q], bias[Q];
  if (at.d == 0) {
    if (s.gamma_x)
      X::template statistics<Q>(s.batch, at.x + j, at.n, at.row, H, s.mean_x + of_x, s.var_x + of_x, H, s.eps, mean,
                                rstd);
    for (int64_t b = 0; b < at.n; ++b)
      for (int k = 0; k < Q; ++k) {
        float *x = at.x + b * at.row + k * H + j, *p = product + b * width + k * gap;
        V v = X::load(x);
        if (s.gamma_x) {
          v = (v - mean[k]) * rstd[k];
          X::store(x, v);
          v *= X::load(s.gamma_x + k * H + j);
        }
        X::store(p, X::load(p) + v);
      }
  }
  if (s.gamma_z)
    X::template statistics<Q>(s.batch, product, at.n, width, gap, s.mean_z + of_z, s.var_z + of_z, H, s.eps, mean, rstd);
  for (int k = 0; k < Q; ++k) {
    gamma[k] = X::load_or(s.gamma_z, own + k * H, 1.0f);
    bias[k] = X::load_or(s.bias, own + k * H, 0.0f);
  }
  for (int64_t b = 0; b < at.n; ++b) {
    V z[Q];
    for (int k = 0; k < Q; ++k) {
      V v = X::load(product + b * width + k * gap);
      if (s.gamma_z) v = (v - mean[k]) * rstd[k];
      X::store(at.a + b * at.row + k * H + j, v);
      z[k] = gamma[k] * v + bias[k];
    }
    const V transform = X::sigmoid(z[1]), carry = Q == 3 ? X::sigmoid(z[Q - 1]) : 1.0f - transform;
    X::store(at.state + b * H + j, X::tanh(z[0]) * transform + X::load(at.before + b * H + j) * carry);
  }
  for (int64_t b = at.n; b < s.B; ++b)  // sequences that have ended
    X::store(at.state + b * H + j, X::load(at.before + b * H + j));
}

template <int N>
void add_to(float* to, typename Block<N>::V v) {
  Block<N>::store(to, Block<N>::load(to) + v);
}

// Gradients of the sums of units j ... j + N in place of the sums, of x in place of x, and of what is carried in place of
// that of the state. scratch: (B, Q N).
template <int N, int Q>
void backward_block(const Layer& at, int j, float* scratch) {
  typedef Block<N> X;
  typedef typename X::V V;
  const Rhn& s = at.s;
  const int64_t H = s.H, of_x = at.t * at.row + j, of_z = (at.t * s.D + at.d) * at.row + j, own = at.d * at.row + j;
  const float* dy = at.d == s.D - 1 ? s.dy + (int64_t)s.B * H * at.t : nullptr;
  const float inverse = s.batch ? 1.0f / (float)at.n : 0.0f;  // population statistics send no gradient back
  V gamma[Q], bias[Q], sum[Q]{}, sum_a[Q]{};
  for (int k = 0; k < Q; ++k) {
    gamma[k] = X::load_or(s.gamma_z, own + k * H, 1.0f);
    bias[k] = X::load_or(s.bias, own + k * H, 0.0f);
  }
  for (int64_t b = 0; b < at.n; ++b) {
    const int64_t cell = b * H + j;
    V z[Q], a[Q], dz[Q];
    for (int k = 0; k < Q; ++k) {
      a[k] = X::load(at.a + b * at.row + k * H + j);
      z[k] = gamma[k] * a[k] + bias[k];
    }
    const V h = X::tanh(z[0]), transform = X::sigmoid(z[1]), before = X::load(at.before + cell);
    const V carry = Q == 3 ? X::sigmoid(z[Q - 1]) : 1.0f - transform;
    const V d = X::load(s.ds + cell) + X::load_or(dy, cell, 0.0f);
    dz[0] = d * transform * (1.0f - h * h);
    dz[1] = d * (Q == 3 ? h : h - before) * transform * (1.0f - transform);
    if (Q == 3) dz[Q - 1] = d * before * carry * (1.0f - carry);
    X::store(s.ds + cell, d * carry);
    for (int k = 0; k < Q; ++k) {
      sum[k] += dz[k];
      sum_a[k] += dz[k] * a[k];
      X::store(scratch + (b * Q + k) * N, dz[k]);
    }
  }
  for (int64_t b = at.n; dy && b < s.B; ++b) add_to<N>(s.ds + b * H + j, X::load(dy + b * H + j));
  for (int k = 0; k < Q; ++k) {
    const int64_t column = k * H + j;
    if (s.bias) add_to<N>(s.dbias + own + k * H, sum[k]);
    if (s.gamma_z) add_to<N>(s.dgamma_z + own + k * H, sum_a[k]);
    const V scale = s.gamma_z ? gamma[k] * X::rsqrt(X::load(s.var_z + of_z + k * H) + s.eps) : V{} + 1.0f;
    const V mean = sum[k] * inverse, mean_a = sum_a[k] * inverse;
    V sum_d{}, sum_x{};
    for (int64_t b = 0; b < at.n; ++b) {
      float* a = at.a + b * at.row + column;
      V da = X::load(scratch + (b * Q + k) * N);
      if (s.gamma_z) da = scale * (da - mean - X::load(a) * mean_a);
      X::store(a, da);
      if (at.d == 0 && s.gamma_x) {
        sum_d += da;
        sum_x += da * X::load(at.x + b * at.row + column);
      }
    }
    for (int64_t b = at.n; b < s.B; ++b) X::store(at.a + b * at.row + column, V{});
    if (at.d) continue;
    V scale_x{};
    if (s.gamma_x) {
      add_to<N>(s.dgamma_x + column, sum_x);
      scale_x = X::load(s.gamma_x + column) * X::rsqrt(X::load(s.var_x + of_x + k * H) + s.eps);
      sum_d *= inverse;
      sum_x *= inverse;
    }
    for (int64_t b = 0; b < s.B; ++b) {
      float* x = at.x + b * at.row + column;
      V dx = X::load(at.a + b * at.row + column);
      if (s.gamma_x) dx = scale_x * (dx - sum_d - X::load(x) * sum_x);
      X::store(x, b < at.n ? dx : V{});
    }
  }
}

// Adds to ds what comes back through the normalization of the entering state, given dv.
template <int N>
void leave_block(const Layer& at, int j, const float* dv) {
  typedef Block<N> X;
  typedef typename X::V V;
  const Rhn& s = at.s;
  const int64_t H = s.H, stored = (at.t * s.K + at.d) * H + j, own = at.d * H + j;
  const float inverse = s.batch ? 1.0f / (float)at.n : 0.0f;
  V sum{}, sum_hat{};
  for (int64_t b = 0; b < at.n; ++b) {
    const V d = X::load(dv + b * H + j);
    sum += d;
    sum_hat += d * X::load(at.normal + b * H + j);
  }
  add_to<N>(s.dgamma_s + own, sum_hat);
  if (s.beta_s) add_to<N>(s.dbeta_s + own, sum);
  const V scale = X::load(s.gamma_s + own) * X::rsqrt(X::load(s.var_s + stored) + s.eps);
  sum *= inverse;
  sum_hat *= inverse;
  for (int64_t b = 0; b < at.n; ++b)
    add_to<N>(s.ds + b * H + j, scale * (X::load(dv + b * H + j) - sum - X::load(at.normal + b * H + j) * sum_hat));
}

#define BLOCKS(from, to, function, ...)                                                    \
  do {                                                                                     \
    int i = from;                                                                          \
    for (; i + LANES <= to; i += LANES) function(LANES, i, __VA_ARGS__);                   \
    for (; i + 4 <= to; i += 4) function(4, i, __VA_ARGS__);                               \
    for (; i < to; ++i) function(1, i, __VA_ARGS__);                                       \
  } while (0)
#define ENTER(N, j, at, v) enter_block<N>(at, j, v)
#define LEAVE(N, j, at, dv) leave_block<N>(at, j, dv)
#define FORWARD(N, j, at, first, product, width, gap)                                      \
  (at.s.Q == 3 ? forward_block<N, 3>(at, j, product + (j - first), width, gap)             \
               : forward_block<N, 2>(at, j, product + (j - first), width, gap))
#define BACKWARD(N, j, at, scratch) \
  (at.s.Q == 3 ? backward_block<N, 3>(at, j, scratch) : backward_block<N, 2>(at, j, scratch))

}  // namespace

extern "C" {

void bnrnn_rhn_forward(const Rhn* sequence) {
  const Rhn& s = *sequence;
  const int H = s.H, Q = s.Q, blocks = (H + LANES - 1) / LANES;
  std::unique_ptr<std::unique_ptr<Packed>[]> weights(new std::unique_ptr<Packed>[s.D]);
  Floats ordered(new float[(int64_t)Q * H * H]);
  for (int d = 0; d < s.D; ++d) {  // R_d^T with the columns of a block's gates side by side
    const float* weight = s.weight + (int64_t)d * Q * H * H;
    for (int j = 0; j < H; j += LANES)
      for (int k = 0, w = std::min(LANES, H - j); k < Q; ++k)
        std::memcpy(&ordered[(int64_t)H * (Q * j + k * w)], weight + (int64_t)H * (k * H + j), sizeof(float) * w * H);
    weights[d].reset(new Packed(Q * H, H, ordered.get(), 1, H, Q));
  }
  Floats entering(new float[(int64_t)s.B * H]);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    Floats product(new float[(int64_t)s.B * Q * LANES]);
    for (int64_t t = 0; t < s.T; ++t)
      for (int64_t d = 0; d < s.D; ++d) {
        const Layer at(s, t, d);
        if (at.normal) {
#pragma omp for schedule(static)
          for (int block = 0; block < blocks; ++block)
            BLOCKS(block * LANES, std::min(H, (block + 1) * LANES), ENTER, at, entering.get());
        }
        const float* v = at.normal ? entering.get() : at.before;
#pragma omp for schedule(static)
        for (int block = 0; block < blocks; ++block) {
          const int j = block * LANES, to = std::min(H, j + LANES), w = to - j;
          const Packed& weight = *weights[d];
          const int width = round_up(Q * w);
          weight.times(Q * j, at.n, v, H, 1, product.get(), width, false);
          BLOCKS(j, to, FORWARD, at, j, product.get(), width, w);
        }
      }
  }
}

void bnrnn_rhn_backward(const Rhn* sequence) {
  const Rhn& s = *sequence;
  const int H = s.H, Q = s.Q, blocks = (H + LANES - 1) / LANES, columns = 4 * LANES;
  std::unique_ptr<std::unique_ptr<Packed>[]> weights(new std::unique_ptr<Packed>[s.D]);
  for (int d = 0; d < s.D; ++d) weights[d].reset(new Packed(H, Q * H, s.weight + (int64_t)d * Q * H * H, H, 1));
  Floats leaving(new float[(int64_t)s.B * H]);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    Floats scratch(new float[(int64_t)s.B * Q * LANES]);
    for (int64_t t = s.T - 1; t >= 0; --t)
      for (int64_t d = s.D - 1; d >= 0; --d) {
        const Layer at(s, t, d);
#pragma omp for schedule(static)
        for (int block = 0; block < blocks; ++block)
          BLOCKS(block * LANES, std::min(H, (block + 1) * LANES), BACKWARD, at, scratch.get());
        float* to = at.normal ? leaving.get() : s.ds;
#pragma omp for schedule(static)
        for (int n = 0; n < H; n += columns)
          weights[d]->times_exactly(n, at.n, at.a, at.row, 1, to + n, H, !at.normal);
        if (at.normal) {
#pragma omp for schedule(static)
          for (int block = 0; block < blocks; ++block)
            BLOCKS(block * LANES, std::min(H, (block + 1) * LANES), LEAVE, at, leaving.get());
        }
      }
  }
}

}  // extern "C"
