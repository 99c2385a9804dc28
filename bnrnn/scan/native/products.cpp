// Matrix products for what surrounds the recurrences.

#include "products.h"

extern "C" {

// C (M, N) = A (M, K) B, or A^T B for A (K, M); or added to C. Rows of B, or if `columns` its columns, are contiguous and
// `step` apart.
void bnrnn_product(int M, int N, int K, const float* A, int transposed, const float* B, int64_t step, int columns,
                   float* C, int add, int threads) {
  Floats shared(new float[Strips::size(N, std::min(K, DEPTH))]);
#pragma omp parallel num_threads(threads) if (threads > 1)
  product(M, N, K, A, transposed ? 1 : K, transposed ? M : 1, {B, step, columns != 0}, C, add, shared.get(), threads);
}

// Multiplies and adds the sums of a tile in registers, `rounds` times. The sums begin at different values and their total
// is returned, so that the compiler can neither merge them nor leave one out.
float bnrnn_peak(int64_t rounds) {
  Wide sum[ROWS][TILE], total{};
  const Wide factor = Wide{} + 0.5f, one = Wide{} + 1.0f;
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < TILE; ++v) sum[r][v] = Wide{} + (float)(r * TILE + v + 3);
  for (int64_t i = 0; i < rounds; ++i)
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < TILE; ++v) sum[r][v] = sum[r][v] * factor + one;
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < TILE; ++v) total += sum[r][v];
  return total[0];
}

// Operations of a round of bnrnn_peak.
int bnrnn_peak_operations() { return 2 * ROWS * TILE * LANES; }

}  // extern "C"
