// Matrix products for the layers before and after the recurrences.

#include "products.h"

extern "C" {

// C (M, N) = A B with A (M, K), or A^T B with A (K, M) if `transposed`. If `add`, the product is added to C. The rows of B,
// or its columns if `columns`, are contiguous and `step` floats apart.
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

// Number of floating-point operations in a round of bnrnn_peak.
int bnrnn_peak_operations() { return 2 * ROWS * TILE * LANES; }

}  // extern "C"
