"""Processes that end with the process that started them."""

import ctypes
import os
import signal
import sys


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
