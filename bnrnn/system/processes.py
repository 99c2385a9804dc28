"""Processes that end with the process that started them."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def end_with(parent: int, number: int = signal.SIGTERM) -> None:
    """Ask Linux to send a signal to this process when its parent ends, so that it never runs longer than the parent.

    Args:
        parent: id of the process that started this one. Does nothing in that process itself.

    Ends this process with the signal if the parent has already ended.
    """
    if os.getpid() == parent:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@contextmanager
def children_end_too() -> Iterator[None]:
    """Context manager: processes that are forked within it end, by SIGKILL, when this process ends."""
    global _followed
    before, _followed = _followed, os.getpid()
    try:
        yield
    finally:
        _followed = before


def _follow() -> None:
    """In a forked process: end with its parent if that asked for it."""
    global _followed
    parent, _followed = _followed, None
    if parent is not None:
        end_with(parent, signal.SIGKILL)


_followed: int | None = None
os.register_at_fork(after_in_child=_follow)
