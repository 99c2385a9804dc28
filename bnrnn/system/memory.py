"""The heap of the process."""

import ctypes


def keep_heap() -> None:
    """Make the C library keep freed memory instead of returning it to the system, as `bnrnn.train` does.

    A training update allocates and frees hundreds of megabytes. If glibc returns this memory to the system each time,
    page faults on new memory take up to a third of an update, with the layers of this package and of torch alike. Call
    this function once, before the first update. The process then never gives memory back until it ends. Without glibc
    (macOS, musl) the function does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: allocate large blocks from the heap too
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap
