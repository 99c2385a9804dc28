// The (batch-normalized) LSTM on the CPU in float32, forward and backward: one fused time step of the recurrence, and the
// normalization of its input.
//
// Everything between the matrix products of one step and the next is done in one pass over blocks of units: batch
// statistics, normalization, gates, cell and output. A block needs no other block's data. Plain C interface, no headers
// of torch: it compiles in a second. Vectors are GCC's (and clang's) own, so one source serves every instruction set;
// what 16 does not divide is left to narrower blocks rather than to masks.
//
// Equation numbers: Cooijmans et al. 2016. Gates stand in torch's order i f g o. Rows are contiguous: u, x, da (B, 4H),
// others (B, H), statistics (4H) or (H).

#include <cstdint>
#include <cstring>

namespace {

template <int N>
struct Vectors;
#define VECTORS(N)                                           \
  template <>                                                \
  struct Vectors<N> {                                        \
    typedef float Float __attribute__((vector_size(4 * N))); \
    typedef int32_t Int __attribute__((vector_size(4 * N))); \
  }
VECTORS(16);
VECTORS(4);
VECTORS(1);

// A block of N units.
template <int N>
struct Block {
  typedef typename Vectors<N>::Float V;
  typedef typename Vectors<N>::Int I;

  static V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
  }
  static void store(float* p, V v) { std::memcpy(p, &v, sizeof(V)); }
  static V load_or(const float* p, int64_t at, float otherwise) { return p ? load(p + at) : V{} + otherwise; }

  // exp with a relative error of about 1e-7: range reduction by powers of two, then a polynomial (Cephes expf).
  static V exp(V x) {
    x = x > 88.0f ? V{} + 88.0f : x;
    x = x < -87.0f ? V{} - 87.0f : x;
    const V n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const I scale = (__builtin_convertvector(n, I) + 127) << 23;
    V power;
    std::memcpy(&power, &scale, sizeof(V));
    return p * power;
  }
  static V sigmoid(V x) { return 1.0f / (1.0f + exp(-x)); }
  static V tanh(V x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

  static V rsqrt(V x) {
    V y;
    for (int k = 0; k < N; ++k) y[k] = 1.0f / __builtin_sqrtf(x[k]);
    return y;
  }

  // Mean and 1 / sqrt(biased variance + eps) over the batch of K column blocks H apart; two passes.
  template <int K>
  static void moments(const float* a, int B, int H, float eps, float* mean, float* rstd) {
    const int64_t stride = (int64_t)K * H;
    V m[K]{}, squares[K]{};
    for (int b = 0; b < B; ++b)
      for (int k = 0; k < K; ++k) m[k] += load(a + b * stride + k * H);
    for (int k = 0; k < K; ++k) m[k] /= (float)B;
    for (int b = 0; b < B; ++b)
      for (int k = 0; k < K; ++k) {
        const V d = load(a + b * stride + k * H) - m[k];
        squares[k] += d * d;
      }
    for (int k = 0; k < K; ++k) {
      store(mean + k * H, m[k]);
      store(rstd + k * H, rsqrt(squares[k] / (float)B + eps));
    }
  }

  static void forward(int j, int B, int H, int batch, float eps, float* u, const float* x, const float* c_prev,
                      const float* gamma_hh, float* mean_hh, float* rstd_hh, const float* gamma_c, const float* beta_c,
                      float* mean_c, float* rstd_c, float* c, float* h, float* scratch) {
    if (gamma_hh && batch) moments<4>(u + j, B, H, eps, mean_hh + j, rstd_hh + j);
    V mean[4], rstd[4], gamma[4];
    for (int k = 0; gamma_hh && k < 4; ++k) {
      mean[k] = load(mean_hh + k * H + j);
      rstd[k] = load(rstd_hh + k * H + j);
      gamma[k] = load(gamma_hh + k * H + j);
    }
    for (int b = 0; b < B; ++b) {
      const int64_t row = (int64_t)b * 4 * H + j, at = (int64_t)b * H + j;
      V a[4];
      for (int k = 0; k < 4; ++k) {  // eq. 6
        V v = load(u + row + k * H);
        if (gamma_hh) {
          v = (v - mean[k]) * rstd[k];
          store(u + row + k * H, v);
          v *= gamma[k];
        }
        a[k] = v + load(x + row + k * H);
      }
      store(c + at, sigmoid(a[1]) * load(c_prev + at) + sigmoid(a[0]) * tanh(a[2]));  // eq. 7
      store(scratch + b * N, sigmoid(a[3]));
    }
    if (gamma_c && batch) moments<1>(c + j, B, H, eps, mean_c + j, rstd_c + j);
    const V m = gamma_c ? load(mean_c + j) : V{}, shift = load_or(beta_c, j, 0.0f);
    const V scale = gamma_c ? load(rstd_c + j) * load(gamma_c + j) : V{} + 1.0f;
    for (int b = 0; b < B; ++b) {  // eq. 8
      const int64_t at = (int64_t)b * H + j;
      store(h + at, load(scratch + b * N) * tanh((load(c + at) - m) * scale + shift));
    }
  }

  static void backward(int j, int B, int H, int batch, float* u, const float* x, const float* c_prev, const float* c,
                       const float* gamma_hh, const float* rstd_hh, const float* gamma_c, const float* beta_c,
                       const float* mean_c, const float* rstd_c, const float* dh, float* dc, float* da,
                       float* dgamma_hh, float* dgamma_c, float* dbeta_c, float* scratch) {
    const float inverse = batch ? 1.0f / (float)B : 0.0f;  // population statistics send no gradient back
    V gamma[4];
    for (int k = 0; k < 4; ++k) gamma[k] = load_or(gamma_hh, k * H + j, 1.0f);
    const V g_c = load_or(gamma_c, j, 1.0f), shift = load_or(beta_c, j, 0.0f);
    const V m_c = gamma_c ? load(mean_c + j) : V{}, r_c = gamma_c ? load(rstd_c + j) : V{} + 1.0f;
    V sum_dz{}, sum_dzc{};
    for (int b = 0; b < B; ++b) {  // through eq. 8
      const int64_t row = (int64_t)b * 4 * H + j, at = (int64_t)b * H + j;
      V a[4];
      for (int k = 0; k < 4; ++k) a[k] = gamma[k] * load(u + row + k * H) + load(x + row + k * H);
      const V c_hat = (load(c + at) - m_c) * r_c, t = tanh(g_c * c_hat + shift), o = sigmoid(a[3]);
      const V grad = load(dh + at), dz = grad * o * (1.0f - t * t);
      sum_dz += dz;
      sum_dzc += dz * c_hat;
      float* p = scratch + b * 5 * N;
      store(p, sigmoid(a[0]));
      store(p + N, sigmoid(a[1]));
      store(p + 2 * N, tanh(a[2]));
      store(p + 3 * N, grad * t * o * (1.0f - o));
      store(p + 4 * N, dz);
    }
    store(dgamma_c + j, load(dgamma_c + j) + sum_dzc);
    store(dbeta_c + j, load(dbeta_c + j) + sum_dz);
    const V mean_dz = gamma_c ? sum_dz * inverse : V{}, mean_dzc = gamma_c ? sum_dzc * inverse : V{};
    V sum_a[4]{}, sum_au[4]{};
    for (int b = 0; b < B; ++b) {  // through eqs. 7 and 6
      const int64_t row = (int64_t)b * 4 * H + j, at = (int64_t)b * H + j;
      const float* p = scratch + b * 5 * N;
      const V i = load(p), f = load(p + N), g = load(p + 2 * N), c_hat = (load(c + at) - m_c) * r_c;
      const V d = load(dc + at) + g_c * r_c * (load(p + 4 * N) - mean_dz - c_hat * mean_dzc);
      const V grads[4] = {d * g * i * (1.0f - i), d * load(c_prev + at) * f * (1.0f - f), d * i * (1.0f - g * g),
                          load(p + 3 * N)};
      store(dc + at, d * f);
      for (int k = 0; k < 4; ++k) {
        store(da + row + k * H, grads[k]);
        if (!gamma_hh) {
          store(u + row + k * H, grads[k]);
          continue;
        }
        sum_a[k] += grads[k];
        sum_au[k] += grads[k] * load(u + row + k * H);
      }
    }
    if (!gamma_hh) return;
    V scale[4];
    for (int k = 0; k < 4; ++k) {
      store(dgamma_hh + k * H + j, load(dgamma_hh + k * H + j) + sum_au[k]);
      scale[k] = gamma[k] * load(rstd_hh + k * H + j);
      sum_a[k] *= inverse;
      sum_au[k] *= inverse;
    }
    for (int b = 0; b < B; ++b)  // through the normalization of the recurrent term
      for (int k = 0; k < 4; ++k) {
        const int64_t at = (int64_t)b * 4 * H + k * H + j;
        store(u + at, scale[k] * (load(da + at) - sum_a[k] - load(u + at) * sum_au[k]));
      }
  }

  // y = gamma (x - mean) rstd + shift.
  static void normalize(int j, int B, int F, int batch, float eps, const float* x, const float* gamma,
                        const float* shift, float* mean, float* rstd, float* y) {
    if (batch) moments<1>(x + j, B, F, eps, mean + j, rstd + j);
    const V m = load(mean + j), scale = load(rstd + j) * load(gamma + j), add = load_or(shift, j, 0.0f);
    for (int b = 0; b < B; ++b) {
      const int64_t at = (int64_t)b * F + j;
      store(y + at, (load(x + at) - m) * scale + add);
    }
  }

  static void normalize_backward(int j, int B, int F, int batch, const float* x, const float* gamma, const float* mean,
                                 const float* rstd, const float* dy, float* dx, float* dgamma, float* dshift) {
    const float inverse = batch ? 1.0f / (float)B : 0.0f;
    const V m = load(mean + j), r = load(rstd + j);
    V sum{}, sum_x{};
    for (int b = 0; b < B; ++b) {
      const int64_t at = (int64_t)b * F + j;
      const V d = load(dy + at);
      sum += d;
      sum_x += d * ((load(x + at) - m) * r);
    }
    store(dgamma + j, load(dgamma + j) + sum_x);
    store(dshift + j, load(dshift + j) + sum);
    const V scale = r * load(gamma + j);
    sum *= inverse;
    sum_x *= inverse;
    for (int b = 0; b < B; ++b) {
      const int64_t at = (int64_t)b * F + j;
      store(dx + at, scale * (load(dy + at) - sum - ((load(x + at) - m) * r) * sum_x));
    }
  }
};

}  // namespace

#define OVER_BLOCKS(size, function, ...)                               \
  int j = 0;                                                           \
  for (; j + 16 <= size; j += 16) Block<16>::function(j, __VA_ARGS__); \
  for (; j + 4 <= size; j += 4) Block<4>::function(j, __VA_ARGS__);    \
  for (; j < size; ++j) Block<1>::function(j, __VA_ARGS__)

extern "C" {

// u: h W_hh^T on entry, its normalized form on return (unchanged if gamma_hh is null). mean_*, rstd_*: written if `batch`,
// read if not. scratch: (B, 16).
void bnrnn_lstm_forward(int B, int H, int batch, float eps, float* u, const float* x, const float* c_prev,
                        const float* gamma_hh, float* mean_hh, float* rstd_hh, const float* gamma_c,
                        const float* beta_c, float* mean_c, float* rstd_c, float* c, float* h, float* scratch) {
  OVER_BLOCKS(H, forward, B, H, batch, eps, u, x, c_prev, gamma_hh, mean_hh, rstd_hh, gamma_c, beta_c, mean_c, rstd_c, c,
              h, scratch);
}

// Gradients of one step. On entry dh is the whole gradient of h_t and dc that of c_t from later steps; on return dc is that
// of c_{t-1}, da that of x, and u (the normalized form on entry) that of h W_hh^T. The gradients of gamma and beta are
// added to. scratch: (B, 5 * 16).
void bnrnn_lstm_backward(int B, int H, int batch, float* u, const float* x, const float* c_prev, const float* c,
                         const float* gamma_hh, const float* rstd_hh, const float* gamma_c, const float* beta_c,
                         const float* mean_c, const float* rstd_c, const float* dh, float* dc, float* da,
                         float* dgamma_hh, float* dgamma_c, float* dbeta_c, float* scratch) {
  OVER_BLOCKS(H, backward, B, H, batch, u, x, c_prev, c, gamma_hh, rstd_hh, gamma_c, beta_c, mean_c, rstd_c, dh, dc, da,
              dgamma_hh, dgamma_c, dbeta_c, scratch);
}

// The same batch normalization at each of T steps: x, y (T, B, F); mean, rstd (T, F), written if `batch`, read if not.
void bnrnn_norm_forward(int T, int B, int F, int batch, float eps, const float* x, const float* gamma,
                        const float* shift, float* mean, float* rstd, float* y) {
  for (int64_t t = 0; t < T; ++t) {
    const int64_t at = t * B * F;
    OVER_BLOCKS(F, normalize, B, F, batch, eps, x + at, gamma, shift, mean + t * F, rstd + t * F, y + at);
  }
}

// dx (T, B, F) is written, dgamma (F) and dshift (F) are added to.
void bnrnn_norm_backward(int T, int B, int F, int batch, const float* x, const float* gamma, const float* mean,
                         const float* rstd, const float* dy, float* dx, float* dgamma, float* dshift) {
  for (int64_t t = 0; t < T; ++t) {
    const int64_t at = t * B * F;
    OVER_BLOCKS(F, normalize_backward, B, F, batch, x + at, gamma, mean + t * F, rstd + t * F, dy + at, dx + at, dgamma,
                dshift);
  }
}

}  // extern "C"
