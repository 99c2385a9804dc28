// Batch normalization of sequences in float32 on the CPU: step by step, or with one mean and variance over all steps.
//
// x and y are (T, B, F). The first running[t] rows of step t count; null means all. If `batch`, the statistics are
// computed and written; otherwise they are read.

#include "../native/blocks.h"

namespace {

const int STRIPE = 256;  // so many columns are summed together: their sums stay in the first-level cache

// K sums over the rows of a stripe of columns. Rows are first summed within each step: this loses fewer digits than a
// single running sum.
template <int K, typename Row>
void sum_rows(int T, int B, const int32_t* running, float (&total)[K][STRIPE], Row row) {
  std::memset(total, 0, sizeof(total));
  for (int64_t t = 0; t < T; ++t) {
    float step[K][STRIPE] = {};
    const int n = running ? running[t] : B;
    for (int64_t b = 0; b < n; ++b) row(t * B + b, step);
    for (int k = 0; k < K; ++k)
      for (int j = 0; j < STRIPE; ++j) total[k][j] += step[k][j];
  }
}

int64_t rows_that_count(int T, int B, const int32_t* running) {
  int64_t count = 0;
  for (int t = 0; t < T; ++t) count += running ? running[t] : B;
  return count;
}

// y = gamma (x - mean) rstd + shift for the first M of B rows; 0 in the others.
template <bool TAIL>
void normalize(Units<TAIL> units, int j, int M, int B, int F, bool batch, float eps, const float* x, const float* gamma,
               const float* shift, float* means, float* vars, float* y) {
  Wide mean, rstd;
  statistics<1>(units, batch, x + j, M, F, 0, means + j, vars + j, 0, eps, &mean, &rstd);
  const Wide scale = rstd * units.load(gamma + j), add = units.load_or(shift, j, 0.0f);
  for (int b = 0; b < B; ++b) {
    const int64_t at = (int64_t)b * F + j;
    units.store(y + at, b < M ? (units.load(x + at) - mean) * scale + add : Wide{});
  }
}

template <bool TAIL>
void normalize_backward(Units<TAIL> units, int j, int M, int B, int F, bool batch, float eps, const float* x,
                        const float* gamma, const float* means, const float* vars, const float* dy, float* dx,
                        float* dgamma, float* dshift) {
  const float inverse = batch ? 1.0f / (float)M : 0.0f;
  const Wide mean = units.load(means + j), rstd = rsqrt(units.load(vars + j) + eps);
  Wide sum{}, sum_x{};
  for (int b = 0; b < M; ++b) {
    const int64_t at = (int64_t)b * F + j;
    const Wide d = units.load(dy + at);
    sum += d;
    sum_x += d * ((units.load(x + at) - mean) * rstd);
  }
  units.add(dgamma + j, sum_x);
  units.add(dshift + j, sum);
  const Wide scale = rstd * units.load(gamma + j);
  sum *= inverse;
  sum_x *= inverse;
  for (int b = 0; b < B; ++b) {
    const int64_t at = (int64_t)b * F + j;
    const Wide d = scale * (units.load(dy + at) - sum - ((units.load(x + at) - mean) * rstd) * sum_x);
    units.store(dx + at, b < M ? d : Wide{});
  }
}

}  // namespace

extern "C" {

// Step-wise normalization; mean and var are (T, F).
void bnrnn_norm_forward(int T, int B, int F, int batch, float eps, const int32_t* running, int, const float* x,
                        const float* gamma, const float* shift, float* mean, float* var, float* y) {
  for (int64_t t = 0; t < T; ++t) {
    const int64_t at = t * B * F;
    const int n = running ? running[t] : B;
    over_blocks(0, F, [&](auto units, int j) {
      normalize(units, j, n, B, F, batch, eps, x + at, gamma, shift, mean + t * F, var + t * F, y + at);
    });
  }
}

// Writes dx (T, B, F), which may be the same memory as dy, and adds to dgamma (F) and dshift (F).
void bnrnn_norm_backward(int T, int B, int F, int batch, float eps, const int32_t* running, int, const float* x,
                         const float* gamma, const float* mean, const float* var, const float* dy, float* dx,
                         float* dgamma, float* dshift) {
  for (int64_t t = 0; t < T; ++t) {
    const int64_t at = t * B * F;
    const int n = running ? running[t] : B;
    over_blocks(0, F, [&](auto units, int j) {
      normalize_backward(units, j, n, B, F, batch, eps, x + at, gamma, mean + t * F, var + t * F, dy + at, dx + at, dgamma,
                         dshift);
    });
  }
}

// Sequence-wise normalization; mean and var are (F).
void bnrnn_norm_over_time_forward(int T, int B, int F, int batch, float eps, const int32_t* running, int threads,
                                  const float* x, const float* gamma, const float* shift, float* mean, float* var,
                                  float* y) {
  const float inverse = 1.0f / (float)rows_that_count(T, B, running);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int from = 0; from < F; from += STRIPE) {
    const int width = std::min(STRIPE, F - from);
    float *const m = mean + from, *const v = var + from;
    if (batch) {
      float sum[1][STRIPE];
      sum_rows(T, B, running, sum, [&](int64_t row, float(&s)[1][STRIPE]) {
        const float* const x_row = x + row * F + from;
        for (int j = 0; j < width; ++j) s[0][j] += x_row[j];
      });
      for (int j = 0; j < width; ++j) m[j] = sum[0][j] * inverse;
      sum_rows(T, B, running, sum, [&](int64_t row, float(&s)[1][STRIPE]) {
        const float* const x_row = x + row * F + from;
        for (int j = 0; j < width; ++j) s[0][j] += (x_row[j] - m[j]) * (x_row[j] - m[j]);
      });
      for (int j = 0; j < width; ++j) v[j] = sum[0][j] * inverse;
    }
    float scale[STRIPE], add[STRIPE];
    for (int j = 0; j < width; ++j) {
      scale[j] = gamma[from + j] / __builtin_sqrtf(v[j] + eps);
      add[j] = shift ? shift[from + j] : 0.0f;
    }
    for (int64_t t = 0; t < T; ++t)
      for (int64_t b = 0; b < B; ++b) {
        const int64_t at = (t * B + b) * F + from;
        if (running && b >= running[t])
          std::memset(y + at, 0, width * sizeof(float));
        else
          for (int j = 0; j < width; ++j) y[at + j] = (x[at + j] - m[j]) * scale[j] + add[j];
      }
  }
}

// The backward pass; outputs as in bnrnn_norm_backward.
void bnrnn_norm_over_time_backward(int T, int B, int F, int batch, float eps, const int32_t* running, int threads,
                                   const float* x, const float* gamma, const float* mean, const float* var,
                                   const float* dy, float* dx, float* dgamma, float* dshift) {
  const float inverse = batch ? 1.0f / (float)rows_that_count(T, B, running) : 0.0f;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int from = 0; from < F; from += STRIPE) {
    const int width = std::min(STRIPE, F - from);
    const float* const m = mean + from;
    float rstd[STRIPE], sum[2][STRIPE];
    for (int j = 0; j < width; ++j) rstd[j] = 1.0f / __builtin_sqrtf(var[from + j] + eps);
    sum_rows(T, B, running, sum, [&](int64_t row, float(&s)[2][STRIPE]) {
      const float *const x_row = x + row * F + from, *const dy_row = dy + row * F + from;
      for (int j = 0; j < width; ++j) {
        s[0][j] += dy_row[j];
        s[1][j] += dy_row[j] * ((x_row[j] - m[j]) * rstd[j]);
      }
    });
    float scale[STRIPE];
    for (int j = 0; j < width; ++j) {
      dshift[from + j] += sum[0][j];
      dgamma[from + j] += sum[1][j];
      sum[0][j] *= inverse;
      sum[1][j] *= inverse;
      scale[j] = rstd[j] * gamma[from + j];
    }
    for (int64_t t = 0; t < T; ++t)
      for (int64_t b = 0; b < B; ++b) {
        const int64_t at = (t * B + b) * F + from;
        if (running && b >= running[t])
          std::memset(dx + at, 0, width * sizeof(float));
        else
          for (int j = 0; j < width; ++j)
            dx[at + j] = scale[j] * (dy[at + j] - sum[0][j] - ((x[at + j] - m[j]) * rstd[j]) * sum[1][j]);
      }
  }
}

}  // extern "C"
