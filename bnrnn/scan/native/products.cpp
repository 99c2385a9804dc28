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

}  // extern "C"
