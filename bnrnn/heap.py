"""The memory of the process."""

import ctypes


def keep_heap() -> None:
    """Let the C library keep freed memory for the whole process, as `bnrnn.train` does.

    A training step allocates hundreds of megabytes and frees them again. Where glibc hands that memory back to the
    system each time, page faults on fresh memory take up to a third of a step, of this package's layers and of torch's
    alike. Call it once, before the first step; the process then keeps the most memory that it ever used. It does
    nothing where there is no glibc (macOS, musl).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks from the heap too
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink it
