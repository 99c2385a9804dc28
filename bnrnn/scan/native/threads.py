"""The number of threads of the compiled kernels, also in a process that was forked from another.

OpenMP keeps its threads between calls. A forked child has none of them, but a record of them, so it would wait for them
for ever. Therefore they are ended before a fork; both processes start new ones at their next call. If the OpenMP
library cannot end them, the child runs on one thread.
"""

import ctypes
import os
from typing import Any

import torch

PAUSE_HARD = 2  # omp_pause_hard in omp.h: ends the threads
_libraries: list[ctypes.CDLL] = []  # in which OpenMP's functions are looked for
_ended = True  # whether the last fork of this process has ended the threads
_single = False  # whether this process must run on one thread


def num_threads() -> int:
    """The number of threads that a kernel may use now."""
    return 1 if _single else torch.get_num_threads()


def remember(library: ctypes.CDLL) -> None:
    """Also look in this library, which may have been linked with another OpenMP than torch."""
    _libraries.append(library)


def _ending() -> list[Any]:
    """The functions that end OpenMP's threads."""
    found = (getattr(library, "omp_pause_resource_all", None) for library in (ctypes.CDLL(None), *_libraries[-1:]))
    return [function for function in found if function is not None]


def _end_threads() -> None:
    global _ended
    functions = _ending()
    _ended = functions != [] and all(end(PAUSE_HARD) == 0 for end in functions)


def _begin_child() -> None:
    global _single
    _single = _single or not _ended


os.register_at_fork(before=_end_threads, after_in_child=_begin_child)
