"""Measures the peak performance of one thread of this processor."""

import time

from bnrnn.scan.native.build import library

ROUNDS, REPEATS = 2_000_000, 15


def peak() -> float:
    """GFLOP/s of float32 multiplications and additions in registers, in one thread: the best of several attempts."""
    kernels = library()

    def seconds() -> float:
        start = time.process_time()
        kernels.bnrnn_peak(ROUNDS)
        return time.process_time() - start

    return ROUNDS * kernels.bnrnn_peak_operations() / min(seconds() for _ in range(REPEATS)) / 1e9
