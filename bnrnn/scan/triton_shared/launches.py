"""Launching the kernels of a scan's steps: from a table of addresses, and as captured CUDA graphs.

A recurrence launches thousands of kernels that each run for microseconds, so launching takes longer than computing. A
captured CUDA graph launches many kernels at once, but calls them with the same arguments every time. The kernels
therefore have one argument that never moves: a table with the addresses and sizes of the scan, which is written before
each run. A graph then runs any scan of its form, whatever its memory, length, batch size and padding: nothing is copied
into fixed buffers, and nothing is captured twice. A sequence is a series of graphs of 128, 32, 8 and 1 steps. The first
entry of the table, the clock, is the step at which the next graph begins.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bnrnn.errors import first_line
from bnrnn.scan import graphs
from bnrnn.scan.native.build import plain
from bnrnn.scan.transfer import to_device

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run in Python, on CPU tensors
CHUNKS = (128, 32, 8, 1)  # numbers of steps of the graphs
MAX_FORMS = 64  # so many are remembered; the one that was not used for longest is forgotten first

_known: OrderedDict[Hashable, "Launches"] = OrderedDict()


class Launches:
    """The launches of all scans of one form, in one direction, on one stream.

    Args:
        name: of the recurrence and the direction.
        entries: names of the entries of the table.
        step: launches step number `offset` of a chunk, given (table, offset).
        whole_sequence: whether `step` launches one kernel that computes all steps.
        direction: 1 if steps go forward in time, -1 if backward.
        fixed: memory that the graphs use whatever the scan, by name of its entry.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        entries: tuple[str, ...],
        step: Callable[[Tensor, int], None],
        direction: int,
        fixed: dict[str, Tensor],
        whole_sequence: bool = False,
    ) -> None:
        self.name, self.entries, self.step, self.direction, self.fixed = name, entries, step, direction, fixed
        self.table = torch.zeros(len(entries), dtype=torch.int64, device=device)
        self.whole_sequence = whole_sequence
        self.runs, self.graphs, self.can_be_captured = 0, dict[int, Any](), True

    def run(self, num_steps: int, values: dict[str, int | Tensor | None]) -> None:
        """Write the table, and launch all steps.

        The steps of the first run are launched one by one, which compiles their kernels, and so are those of a run that
        becomes part of a graph that the caller captures.

        Args:
            values: numbers, and tensors of which the table has the address. Entries without a value are 0.
        """
        values = values | self.fixed
        given = [values.get(name) for name in self.entries]
        numbers = torch.tensor([v.data_ptr() if isinstance(v, Tensor) else v or 0 for v in given], device="cpu")
        self.table.copy_(to_device(numbers, self.table.device))
        if self.whole_sequence:
            return self.step(self.table, 0)
        replay = self.runs > 0 and graphs.possible(self.table.device)
        self.runs += 1
        for size in chunks(num_steps):
            graph = self._graph(size) if replay and self.can_be_captured else None
            if graph is None:
                self._launch(size)
            else:
                graph.replay()

    def _graph(self, size: int) -> Any:
        """The graph of so many steps. None, and then no graph for any number, if they cannot be captured."""
        if size not in self.graphs:
            try:
                self.graphs[size] = graphs.captured(partial(self._launch, size))
            except RuntimeError as error:
                self.can_be_captured = False
                message = "%s cannot be captured as a CUDA graph (%s). Its steps are launched one by one, more slowly."
                logging.getLogger("bnrnn").warning(message, self.name, first_line(error))
                return None
        return self.graphs[size]

    def _launch(self, size: int) -> None:
        for offset in range(size):
            self.step(self.table, offset)
        self.table[:1] += self.direction * size


def launches(key: Hashable, device: torch.device, make: Callable[[], Launches]) -> Launches:
    """The launches of the form `key`, made at first use. A table serves one stream, where one scan follows another."""
    key = (key, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    if key not in _known:
        _known[key] = make()
        while len(_known) > MAX_FORMS:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key]


def chunks(num_steps: int) -> Iterator[int]:
    """The sizes of the graphs that together have `num_steps` steps."""
    for size in CHUNKS:
        yield from [size] * (num_steps // size)
        num_steps %= size


def ready(tensor: Tensor) -> Tensor:
    """The tensor as kernels read it: contiguous, at a multiple of 16 bytes. Copied only if it is not so."""
    tensor = plain(tensor)
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
