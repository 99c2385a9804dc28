"""CUDA graphs without a GPU: what a captured graph would launch, it calls again with the same arguments."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from bnrnn.scan import graphs as scan_graphs
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

    launches._known.clear()
    scan_graphs._known.clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(scan_graphs, "captured", captured))
        stack.enter_context(patch.object(scan_graphs, "possible", lambda device: True))
        yield made
    launches._known.clear()
    scan_graphs._known.clear()
