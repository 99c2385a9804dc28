// The (batch-normalized) LSTM on the CPU in float32, forward and backward over a whole sequence; the matrix products
// around it; and the normalization of a sequence.
//
// A time step goes by blocks of units: product h W_hh^T, batch statistics, normalization, gates, cell and output of a
// block while it is in the cache. A block needs no other block's data, only all of h (forward) or of du (backward).
// Plain C interface, no headers of torch: it compiles in seconds. The products are ours because they are fused with the
// step, and because W_hh is packed once a sequence.
//
// Equation numbers: Cooijmans et al. 2016. Gates stand in torch's order i f g o. All rows are contiguous.

#include "cpu_blocks.h"

extern "C" {

// One sequence. x, u are (T, B, 4H), c, y, dy (T, B, H), states (B, H), statistics (T, 4H) or (T, H); a pointer may be
// null where a term is not there. Of the B sequences the first running[t] run at step t and the first counted[t] count in
// its statistics; null: all.
struct Lstm {
  int32_t T, B, H, batch, threads;  // batch: statistics are those of the batch, and are written; else read
  float eps;
  const int32_t *running, *counted;
  const float *weight_hh, *gamma_ih, *gamma_hh, *bias, *gamma_c, *beta_c, *h_0, *c_0;
  float *mean_ih, *var_ih, *mean_hh, *var_hh, *mean_c, *var_c;
  float *x;  // W_ih x; normalized on return; after the backward pass its gradient
  float *u;  // written: h W_hh^T, normalized; after the backward pass its gradient; null if there will be none
  float *c, *y;
  const float* dy;
  float *dh, *dc;  // gradients of the last state; after the backward pass of the first
  float *dgamma_ih, *dgamma_hh, *dbias, *dgamma_c, *dbeta_c;  // added to
};
}

namespace {

// A step's place in the sequence, and its part of the sequence's arrays.
struct Step {
  const Lstm& s;
  int64_t t;
  int n, m;  // sequences that run, and that count
  float *x, *u, *c, *y;
  const float *c_prev, *h_prev;
  int64_t row;  // of x and u

  Step(const Lstm& s, int64_t t) : s(s), t(t) {
    n = s.running ? s.running[t] : s.B;
    m = s.counted ? s.counted[t] : s.B;
    row = 4 * (int64_t)s.H;
    const int64_t size = (int64_t)s.B * s.H;
    x = s.x + 4 * size * t;
    u = s.u ? s.u + 4 * size * t : nullptr;
    c = s.c + size * t;
    y = s.y + size * t;
    c_prev = t ? c - size : s.c_0;
    h_prev = t ? y - size : s.h_0;
  }
};

// Everything after the product of units j ... j + N. `product` (rows `width` long, gates `gap` apart) is that of m rows.
template <int N>
void forward_block(const Step& at, int j, float* product, int64_t width, int64_t gap) {
  typedef Block<N> X;
  typedef typename X::V V;
  const Lstm& s = at.s;
  const int64_t H = s.H, row = at.row, t4 = 4 * H * at.t, t1 = H * at.t;
  V mean[4]{}, rstd[4]{}, mean_x[4]{}, rstd_x[4]{};
  if (s.gamma_hh)
    X::template statistics<4>(s.batch, product, at.m, width, gap, s.mean_hh + t4 + j, s.var_hh + t4 + j, H, s.eps, mean,
                              rstd);
  if (s.gamma_ih)
    X::template statistics<4>(s.batch, at.x + j, at.m, row, H, s.mean_ih + t4 + j, s.var_ih + t4 + j, H, s.eps, mean_x,
                              rstd_x);
  V gamma[4], gamma_x[4], bias[4];
  for (int k = 0; k < 4; ++k) {
    gamma[k] = X::load_or(s.gamma_hh, k * H + j, 1.0f);
    gamma_x[k] = X::load_or(s.gamma_ih, k * H + j, 1.0f);
    bias[k] = X::load_or(s.bias, k * H + j, 0.0f);
  }
  for (int b = 0; b < at.m; ++b) {
    const int64_t r = b * row + j, cell = b * H + j;
    V a[4];
    for (int k = 0; k < 4; ++k) {  // eq. 6
      V v = X::load(product + b * width + k * gap), w = X::load(at.x + r + k * H);
      if (s.gamma_hh) v = (v - mean[k]) * rstd[k];
      if (s.gamma_ih) {
        w = (w - mean_x[k]) * rstd_x[k];
        X::store(at.x + r + k * H, w);
      }
      if (at.u) X::store(at.u + r + k * H, v);
      a[k] = gamma[k] * v + gamma_x[k] * w + bias[k];
    }
    if (b >= at.n) continue;
    X::store(at.c + cell, X::sigmoid(a[1]) * X::load(at.c_prev + cell) + X::sigmoid(a[0]) * X::tanh(a[2]));  // eq. 7
    X::store(product + b * width, X::sigmoid(a[3]));
  }
  for (int64_t b = at.n; b < s.B; ++b) {  // sequences that have ended
    X::store(at.c + b * H + j, X::load(at.c_prev + b * H + j));
    X::store(at.y + b * H + j, X::load(at.h_prev + b * H + j));
  }
  V m{}, r = V{} + 1.0f;
  if (s.gamma_c)
    X::template statistics<1>(s.batch, at.c + j, at.m, H, 0, s.mean_c + t1 + j, s.var_c + t1 + j, 0, s.eps, &m, &r);
  const V scale = r * X::load_or(s.gamma_c, j, 1.0f), shift = X::load_or(s.beta_c, j, 0.0f);
  for (int b = 0; b < at.n; ++b)  // eq. 8
    X::store(at.y + b * H + j,
             X::load(product + b * width) * X::tanh((X::load(at.c + b * H + j) - m) * scale + shift));
}

template <int N>
void add(float* to, typename Block<N>::V v) {
  Block<N>::store(to, Block<N>::load(to) + v);
}

// du, dx and dc of units j ... j + N from dh, dy and dc. scratch: (B, 5 N).
template <int N>
void backward_block(const Step& at, int j, float* scratch) {
  typedef Block<N> X;
  typedef typename X::V V;
  const Lstm& s = at.s;
  const int64_t H = s.H, row = at.row, t4 = 4 * H * at.t, t1 = H * at.t;
  const float* dy = s.dy + (int64_t)s.B * H * at.t;
  const float inverse = s.batch ? 1.0f / (float)at.m : 0.0f;  // population statistics send no gradient back
  V gamma[4], gamma_x[4], bias[4];
  for (int k = 0; k < 4; ++k) {
    gamma[k] = X::load_or(s.gamma_hh, k * H + j, 1.0f);
    gamma_x[k] = X::load_or(s.gamma_ih, k * H + j, 1.0f);
    bias[k] = X::load_or(s.bias, k * H + j, 0.0f);
  }
  const V g_c = X::load_or(s.gamma_c, j, 1.0f), shift = X::load_or(s.beta_c, j, 0.0f);
  const V m_c = s.gamma_c ? X::load(s.mean_c + t1 + j) : V{};
  const V r_c = s.gamma_c ? X::rsqrt(X::load(s.var_c + t1 + j) + s.eps) : V{} + 1.0f;
  V sum_dz{}, sum_dzc{};
  for (int b = 0; b < at.n; ++b) {  // through eq. 8
    const int64_t r = b * row + j, cell = b * H + j;
    V a[4];
    for (int k = 0; k < 4; ++k)
      a[k] = gamma[k] * X::load(at.u + r + k * H) + gamma_x[k] * X::load(at.x + r + k * H) + bias[k];
    const V c_hat = (X::load(at.c + cell) - m_c) * r_c, tanh = X::tanh(g_c * c_hat + shift), o = X::sigmoid(a[3]);
    const V grad = X::load(s.dh + cell) + X::load(dy + cell), dz = grad * o * (1.0f - tanh * tanh);
    sum_dz += dz;
    sum_dzc += dz * c_hat;
    float* p = scratch + b * 5 * N;
    X::store(p, X::sigmoid(a[0]));
    X::store(p + N, X::sigmoid(a[1]));
    X::store(p + 2 * N, X::tanh(a[2]));
    X::store(p + 3 * N, grad * tanh * o * (1.0f - o));
    X::store(p + 4 * N, dz);
  }
  if (s.gamma_c) add<N>(s.dgamma_c + j, sum_dzc);
  if (s.beta_c) add<N>(s.dbeta_c + j, sum_dz);
  const V mean_dz = s.gamma_c ? sum_dz * inverse : V{}, mean_dzc = s.gamma_c ? sum_dzc * inverse : V{};
  V sum_a[4]{}, sum_au[4]{}, sum_ax[4]{};
  for (int b = 0; b < at.n; ++b) {  // through eqs. 7 and 6
    const int64_t r = b * row + j, cell = b * H + j;
    float* p = scratch + b * 5 * N;
    const V i = X::load(p), f = X::load(p + N), g = X::load(p + 2 * N), c_hat = (X::load(at.c + cell) - m_c) * r_c;
    const V d = X::load(s.dc + cell) + g_c * r_c * (X::load(p + 4 * N) - mean_dz - c_hat * mean_dzc);
    const V grads[4] = {d * g * i * (1.0f - i), d * X::load(at.c_prev + cell) * f * (1.0f - f), d * i * (1.0f - g * g),
                        X::load(p + 3 * N)};
    X::store(s.dc + cell, d * f);
    for (int k = 0; k < 4; ++k) {
      sum_a[k] += grads[k];
      if (s.gamma_hh) sum_au[k] += grads[k] * X::load(at.u + r + k * H);
      if (s.gamma_ih) sum_ax[k] += grads[k] * X::load(at.x + r + k * H);
      X::store(p + k * N, grads[k]);  // in place of i f g and the like
    }
  }
  for (int64_t b = at.n; b < at.m; ++b) {  // sequences that have ended but count: gradients through the statistics alone
    const int64_t cell = b * H + j;
    const V c_hat = (X::load(at.c + cell) - m_c) * r_c;
    if (s.gamma_c) X::store(s.dc + cell, X::load(s.dc + cell) - g_c * r_c * (mean_dz + c_hat * mean_dzc));
    for (int k = 0; k < 4; ++k) X::store(scratch + (b * 5 + k) * N, V{});
  }
  for (int k = 0; k < 4; ++k) {  // through the normalization of the two products
    const int64_t column = k * H + j;
    if (s.bias) add<N>(s.dbias + column, sum_a[k]);
    if (s.gamma_hh) add<N>(s.dgamma_hh + column, sum_au[k]);
    if (s.gamma_ih) add<N>(s.dgamma_ih + column, sum_ax[k]);
    const V mean = sum_a[k] * inverse, mean_u = sum_au[k] * inverse, mean_x = sum_ax[k] * inverse;
    const V scale = s.gamma_hh ? gamma[k] * X::rsqrt(X::load(s.var_hh + t4 + column) + s.eps) : V{};
    const V scale_x = s.gamma_ih ? gamma_x[k] * X::rsqrt(X::load(s.var_ih + t4 + column) + s.eps) : V{};
    for (int b = 0; b < at.m; ++b) {
      const V da = X::load(scratch + ((int64_t)b * 5 + k) * N);
      float *u = at.u + b * row + column, *x = at.x + b * row + column;
      X::store(u, s.gamma_hh ? scale * (da - mean - X::load(u) * mean_u) : da);
      X::store(x, s.gamma_ih ? scale_x * (da - mean - X::load(x) * mean_x) : da);
    }
    for (int64_t b = at.m; b < s.B; ++b) {
      X::store(at.u + b * row + column, V{});
      X::store(at.x + b * row + column, V{});
    }
  }
}

}  // namespace

extern "C" {

void bnrnn_lstm_forward(const Lstm* sequence) {
  const Lstm& s = *sequence;
  const int H = s.H, blocks = (H + LANES - 1) / LANES;
  // W_hh^T with the columns of a block's four gates side by side.
  Floats ordered(new float[4 * (int64_t)H * H]);
  for (int j = 0; j < H; j += LANES)
    for (int k = 0, w = std::min(LANES, H - j); k < 4; ++k)
      std::memcpy(&ordered[(int64_t)H * (4 * j + k * w)], s.weight_hh + (int64_t)H * (k * H + j), sizeof(float) * w * H);
  const Packed weight(4 * H, H, ordered.get(), 1, H);
  ordered.reset();
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    Floats product(new float[(int64_t)s.B * 4 * LANES]);
    for (int64_t t = 0; t < s.T; ++t) {
      const Step at(s, t);
#pragma omp for schedule(static)
      for (int block = 0; block < blocks; ++block) {
        const int j = block * LANES, w = std::min(LANES, H - j), width = round_up(4 * w);
        weight.times(4 * j, at.m, at.h_prev, H, 1, product.get(), width, false);
        int i = 0;
        for (; i + LANES <= w; i += LANES) forward_block<LANES>(at, j + i, product.get() + i, width, w);
        for (; i + 4 <= w; i += 4) forward_block<4>(at, j + i, product.get() + i, width, w);
        for (; i < w; ++i) forward_block<1>(at, j + i, product.get() + i, width, w);
      }
    }
  }
}

void bnrnn_lstm_backward(const Lstm* sequence) {
  const Lstm& s = *sequence;
  const int H = s.H, blocks = (H + LANES - 1) / LANES, columns = 4 * LANES;
  const Packed weight(H, 4 * H, s.weight_hh, H, 1);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    Floats scratch(new float[(int64_t)s.B * 5 * LANES]);
    for (int64_t t = s.T - 1; t >= 0; --t) {
      const Step at(s, t);
      const float* dy = s.dy + (int64_t)s.B * H * t;
#pragma omp for schedule(static)
      for (int block = 0; block < blocks; ++block) {
        const int from = block * LANES, to = std::min(H, from + LANES);
        int j = from;
        for (; j + LANES <= to; j += LANES) backward_block<LANES>(at, j, scratch.get());
        for (; j + 4 <= to; j += 4) backward_block<4>(at, j, scratch.get());
        for (; j < to; ++j) backward_block<1>(at, j, scratch.get());
        for (int64_t b = at.n; b < s.B; ++b)  // what ended hands its gradient on to the step before
          for (j = from; j < to; ++j) s.dh[b * H + j] += dy[b * H + j];
      }
#pragma omp for schedule(static)
      for (int n = 0; n < H; n += columns) {
        weight.times_exactly(n, at.n, at.u, at.row, 1, s.dh + n, H, false);
        if (at.m > at.n)
          weight.times_exactly(n, at.m - at.n, at.u + at.n * at.row, at.row, 1, s.dh + (int64_t)at.n * H + n, H, true);
      }
    }
  }
}

// C (M, N) = A (M, K) B, or A^T B for A (K, M); or added to C. Element (k, n) of B is B[k * row + n * column].
void bnrnn_product(int M, int N, int K, const float* A, int transposed, const float* B, int64_t row, int64_t column,
                   float* C, int add, int threads) {
  const int64_t a_row = transposed ? 1 : K, a_step = transposed ? M : 1;
  for (int k = 0; k < K; k += DEPTH) {
    const int depth = std::min(DEPTH, K - k);
    const Packed right(N, depth, B + k * row, row, column);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int m = 0; m < M; m += HEIGHT)
      for (int n = 0; n < N; n += 4 * LANES)
        right.times_exactly(n, std::min(HEIGHT, M - m), A + m * a_row + k * a_step, a_row, a_step,
                            C + (int64_t)m * N + n, N, add || k > 0);
  }
}

}  // extern "C"
