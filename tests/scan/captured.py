"""CUDA graphs without a GPU: what a captured graph would launch, it calls again with the same arguments."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from bnrnn.scan.triton_shared import launches


class Graph:
    """Remembers the calls of a chunk, whose arguments a CUDA graph could not change either."""

    def __init__(self, run) -> None:
        self.run, self.replays = run, 0

    def replay(self) -> None:
        self.replays += 1
        self.run()


@contextmanager
def graphs():
    """Context manager in which scans on the CPU are captured. Yields the graphs that were made."""
    made: list[Graph] = []

    def captured(run):
        made.append(Graph(run))
        return made[-1]

    def init(self, *args):
        before(self, *args)
        self.captures = True

    before = launches.Launches.__init__
    launches._known.clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(launches.Launches, "__init__", init))
        stack.enter_context(patch.object(launches, "captured", captured))
        stack.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        yield made
    launches._known.clear()
