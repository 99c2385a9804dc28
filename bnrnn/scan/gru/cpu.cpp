// GRU and light GRU on the CPU in float32, forward and backward over a whole sequence (see fused.py).
//
// A time step has two parts, or three with layer normalization: the product h W_hh^T, the normalization of its rows, and
// the gates. Threads divide the columns of the product and the units of the gates, and the rows of the normalization.
// Every sum is therefore computed by one thread, in the same order for any number of threads. The order of the gates is
// (r) z n. All rows are contiguous.

#include "../native/blocks.h"

extern "C" {

// The arguments of a scan with Q gates, 3 or 2. x is (T, B, QH), y and dy (T, B, H), mask and states (B, H). The pointer of
// an optional argument may be null; with gamma_hh, the product is normalized. The first running[t] of the B sequences run
// at step t; null means all.
struct Gru {
  int32_t T, B, H, Q, relu, keep, threads;  // keep: whether there will be a backward pass
  float eps;
  const int32_t* running;
  const float *weight_hh, *gamma_hh, *bias_hh, *mask, *h_0;
  float* x;          // the input product; with keep, the forward pass writes the gates here, the backward pass dx
  float *u, *rstd;   // outputs with keep: if normalized, the product (T, B, QH), which the backward pass overwrites with its
                     // gradient, and 1 / deviation (T, B, Q - 1); else, if Q is 3, the candidate's part of it (T, B, H)
  float* y;
  const float* dy;
  float* dh;  // gradient of the last state; the backward pass overwrites it with that of the initial state
  float *dgamma_hh, *dbias_hh, *dmask;  // added to
  float* dweight_hh;                    // (H, QH), transposed; added to
};
}

namespace gru {
namespace {

// One time step: its index, and pointers to its part of the arrays.
struct Step {
  const Gru& s;
  int n;        // number of sequences that run
  int64_t row;  // floats in a row of x
  float *x, *u, *rstd, *y;
  const float *h_prev, *dy;

  Step(const Gru& s, int64_t t) : s(s), n(s.running ? s.running[t] : s.B), row((int64_t)s.Q * s.H) {
    const int64_t size = (int64_t)s.B * s.H;
    x = s.x + size * s.Q * t;
    u = s.u ? s.u + size * t * (s.gamma_hh ? s.Q : 1) : nullptr;
    rstd = s.rstd ? s.rstd + t * s.B * (s.Q - 1) : nullptr;
    y = s.y + size * t;
    h_prev = t ? y - size : s.h_0;
    dy = s.dy ? s.dy + size * t : nullptr;
  }
};

// Calls function(b, Units, j) for the units from `from` to `to` - 1 of the first `rows` rows.
template <typename Function>
void over_rows(int rows, int from, int to, Function function) {
  for (int64_t b = 0; b < rows; ++b) over_blocks(from, to, [&](auto units, int j) { function(b, units, j); });
}

// Calls function(group, first column, length) for the parts of a row that are normalized together.
template <typename Function>
void over_groups(const Gru& s, Function function) {
  for (int g = 0; g < s.Q - 1; ++g) function(g, g * 2 * s.H, g ? s.H : 2 * s.H);
}

float total(Wide v) {
  float sum = 0.0f;
  for (int k = 0; k < LANES; ++k) sum += v[k];
  return sum;
}

// Normalizes row b of a product (B, QH) in place.
void normalize_row(const Step& at, int64_t b, float* product) {
  over_groups(at.s, [&](int g, int first, int length) {
    float* v = product + b * at.row + first;
    Wide sum{}, squares{};
    over_blocks(0, length, [&](auto units, int j) { sum += units.load(v + j); });
    const float mean = total(sum) / (float)length;
    over_blocks(0, length, [&](auto units, int j) {
      const Wide d = units.load(v + j) - mean;
      if (units.count == LANES) squares += d * d;
      else for (int k = 0; k < units.count; ++k) squares[k] += d[k] * d[k];
    });
    const float rstd = 1.0f / __builtin_sqrtf(total(squares) / (float)length + at.s.eps);
    over_blocks(0, length, [&](auto units, int j) { units.store(v + j, (units.load(v + j) - mean) * rstd); });
    if (at.rstd) at.rstd[b * (at.s.Q - 1) + g] = rstd;
  });
}

// Backpropagates row b of `given`, the gradient of the normalized product, through the normalization, and overwrites the
// normalized product with the result.
void through_row(const Step& at, int64_t b, const float* given) {
  over_groups(at.s, [&](int g, int first, int length) {
    float* u = at.u + b * at.row + first;
    const float* d = given + b * at.row + first;
    Wide sum{}, sum_u{};
    over_blocks(0, length, [&](auto units, int j) {
      sum += units.load(d + j);
      sum_u += units.load(d + j) * units.load(u + j);
    });
    const float mean = total(sum) / (float)length, mean_u = total(sum_u) / (float)length;
    const float rstd = at.rstd[b * (at.s.Q - 1) + g];
    over_blocks(0, length, [&](auto units, int j) {
      units.store(u + j, rstd * (units.load(d + j) - mean - units.load(u + j) * mean_u));
    });
  });
}

// The gates and the new state of some units of sequence b, from the product.
template <int Q, bool TAIL>
void forward_units(const Step& at, int64_t b, Units<TAIL> units, int j, const float* product) {
  const Gru& s = at.s;
  const int64_t H = s.H, cell = b * H + j, wide = b * at.row + j;
  Wide u[Q], x[Q];
  for (int k = 0; k < Q; ++k) {
    const Wide v = units.load(product + wide + k * H);
    if (k == 2 && at.u && !s.gamma_hh) units.store(at.u + cell, v);
    u[k] = units.load_or(s.gamma_hh, k * H + j, 1.0f) * v + units.load_or(s.bias_hh, k * H + j, 0.0f);
    x[k] = units.load(at.x + wide + k * H);
  }
  Wide gate[Q];
  for (int k = 0; k < Q - 1; ++k) gate[k] = sigmoid(x[k] + u[k]);
  const Wide a = x[Q - 1] + (Q == 3 ? gate[0] * u[Q - 1] : u[Q - 1]), zero{};
  gate[Q - 1] = s.relu ? (a > zero ? a : zero) : tanh(a);
  if (s.keep)
    for (int k = 0; k < Q; ++k) units.store(at.x + wide + k * H, gate[k]);
  const Wide n = s.mask ? gate[Q - 1] * units.load(s.mask + cell) : gate[Q - 1], h = units.load(at.h_prev + cell);
  units.store(at.y + cell, n + gate[Q - 2] * (h - n));
}

// Overwrites the gates of some units of sequence b with dx, and dh with the part of the gradient that flows through z.
// Writes the gradient of the product, or of the normalized product, into du, which may be x if there are two gates.
template <int Q, bool TAIL>
void backward_units(const Step& at, int64_t b, Units<TAIL> units, int j, float* du) {
  const Gru& s = at.s;
  const int64_t H = s.H, cell = b * H + j, wide = b * at.row + j;
  const Wide z = units.load(at.x + wide + (Q - 2) * H), n = units.load(at.x + wide + (Q - 1) * H), zero{};
  const Wide dh = units.load(s.dh + cell) + units.load(at.dy + cell), mask = units.load_or(s.mask, cell, 1.0f);
  Wide dn = dh * (1.0f - z), d[Q];
  if (s.mask) units.add(s.dmask + cell, dn * n);
  d[Q - 2] = dh * (units.load(at.h_prev + cell) - mask * n) * z * (1.0f - z);
  dn *= mask;
  dn = s.relu ? (n > zero ? dn : zero) : dn * (1.0f - n * n);
  d[Q - 1] = dn;
  units.store(s.dh + cell, dh * z);
  if constexpr (Q == 3) {
    const Wide r = units.load(at.x + wide), u = units.load(s.gamma_hh ? at.u + wide + 2 * H : at.u + cell);
    const Wide gamma = units.load_or(s.gamma_hh, 2 * H + j, 1.0f), bias = units.load_or(s.bias_hh, 2 * H + j, 0.0f);
    d[0] = dn * (gamma * u + bias) * r * (1.0f - r);
    for (int k = 0; k < Q; ++k) units.store(at.x + wide + k * H, d[k]);
    d[2] = dn * r;
  } else {
    for (int k = 0; k < Q; ++k) units.store(at.x + wide + k * H, d[k]);
  }
  for (int k = 0; k < Q; ++k) {
    const int64_t column = k * H + j;
    if (s.bias_hh) units.add(s.dbias_hh + column, d[k]);
    if (s.gamma_hh) {
      units.add(s.dgamma_hh + column, d[k] * units.load(at.u + wide + k * H));
      d[k] *= units.load(s.gamma_hh + column);
    }
    if (du != at.x) units.store(du + wide + k * H, d[k]);
  }
}

// The gradient of a finished sequence passes to the previous step.
template <bool TAIL>
void pass_units(const Step& at, int64_t b, Units<TAIL> units, int j, float* du) {
  const int64_t cell = b * at.s.H + j;
  units.add(at.s.dh + cell, units.load(at.dy + cell));
  for (int k = 0; k < at.s.Q; ++k) {
    units.store(at.x + b * at.row + k * at.s.H + j, Wide{});
    units.store(du + b * at.row + k * at.s.H + j, Wide{});
  }
}

template <int Q>
void forward(const Gru& s) {
  const int H = s.H, G = Q * H, num_strips = (G + STRIP - 1) / STRIP, num_blocks = (H + LANES - 1) / LANES;
  Floats packed(new float[Strips::size(G, H)]), shared(new float[(int64_t)s.B * G]);
  const Strips weight(G, H, packed.get());
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
#pragma omp for schedule(static)
    for (int n = 0; n < G; n += STRIP)
      weight.pack_columns(n, [&](int column) { return s.weight_hh + (int64_t)column * H; });
    for (int64_t t = 0; t < s.T; ++t) {
      const Step at(s, t);
      float* product = at.u && s.gamma_hh ? at.u : shared.get();
#pragma omp for schedule(static)
      for (int part = 0; part < s.threads; ++part) {
        const int n = begin_of(part, s.threads, num_strips) * STRIP;
        const int end = std::min(G, begin_of(part + 1, s.threads, num_strips) * STRIP);
        weight.times_all<false>(n, end, at.n, at.h_prev, H, product + n, G, false);
      }
      if (s.gamma_hh) {
#pragma omp for schedule(static)
        for (int b = 0; b < at.n; ++b) normalize_row(at, b, product);
      }
#pragma omp for schedule(static)
      for (int part = 0; part < s.threads; ++part) {
        const int from = begin_of(part, s.threads, num_blocks) * LANES;
        const int to = std::min(H, begin_of(part + 1, s.threads, num_blocks) * LANES);
        over_rows(at.n, from, to, [&](int64_t b, auto units, int j) { forward_units<Q>(at, b, units, j, product); });
        for (int64_t b = at.n; b < s.B; ++b)  // finished sequences keep their state
          std::copy(at.h_prev + b * H + from, at.h_prev + b * H + to, at.y + b * H + from);
      }
    }
  }
}

template <int Q>
void backward(const Gru& s) {
  const int H = s.H, G = Q * H, num_blocks = (H + LANES - 1) / LANES, num_strips = (H + STRIP - 1) / STRIP;
  const int64_t size = (int64_t)s.B * G, chunk = std::max(1, DEPTH / std::max(1, s.B));
  Floats packed(new float[Strips::size(H, G)]), shared(new float[Strips::size(G, DEPTH)]), space(new float[chunk * size]);
  const Strips weight(H, G, packed.get());
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
#pragma omp for schedule(static)
    for (int n = 0; n < H; n += STRIP) weight.pack_rows(n, s.weight_hh, H);
    int64_t in_chunk = 0;  // number of steps in the chunk so far; they are filled in from the end of the chunk
    for (int64_t t = s.T - 1; t >= 0; --t) {
      const Step at(s, t);
      ++in_chunk;
      // Where the gradient of the product is: without a reset gate it is dx.
      float* du = s.gamma_hh ? at.u : Q == 2 ? at.x : space.get() + (chunk - in_chunk) * size;
      float* first = s.gamma_hh ? space.get() : du;
#pragma omp for schedule(static)
      for (int part = 0; part < s.threads; ++part) {
        const int from = begin_of(part, s.threads, num_blocks) * LANES;
        const int to = std::min(H, begin_of(part + 1, s.threads, num_blocks) * LANES);
        over_rows(at.n, from, to, [&](int64_t b, auto units, int j) { backward_units<Q>(at, b, units, j, first); });
        for (int64_t b = at.n; b < s.B; ++b)
          over_blocks(from, to, [&](auto units, int j) { pass_units(at, b, units, j, du); });
      }
      if (s.gamma_hh) {
#pragma omp for schedule(static)
        for (int b = 0; b < at.n; ++b) through_row(at, b, first);
      }
#pragma omp for schedule(static)
      for (int part = 0; part < s.threads; ++part) {
        const int n = begin_of(part, s.threads, num_strips) * STRIP;
        const int end = std::min(H, begin_of(part + 1, s.threads, num_strips) * STRIP);
        weight.times_all<false>(n, end, at.n, du, G, s.dh + n, H, true);
      }
      if (in_chunk == chunk || t <= 1) {  // step 0 is a chunk of its own, because h_0 is stored separately
        product(H, G, (int)in_chunk * s.B, at.h_prev, 1, H, {du, G, false}, s.dweight_hh, true, shared.get(), s.threads);
        in_chunk = 0;
      }
    }
  }
}

}  // namespace
}  // namespace gru

extern "C" {

void bnrnn_gru_forward(const Gru* s) { s->Q == 3 ? gru::forward<3>(*s) : gru::forward<2>(*s); }

void bnrnn_gru_backward(const Gru* s) { s->Q == 3 ? gru::backward<3>(*s) : gru::backward<2>(*s); }

}  // extern "C"
