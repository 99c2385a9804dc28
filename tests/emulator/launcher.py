"""Takes the place of the GPU for Triton: what it would launch, with its real arguments, is emulated.

Triton compiles each kernel for the chosen architecture, as on a machine that has it. The tensors of a scan are in the
CPU's memory. In the emulator each is an array of its own, at an address that is aligned as its own is. The table of
addresses is translated.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from bnrnn.scan.triton_shared.launches import Launches
from tests.emulator import machine, ptx
from tests.emulator.memory import Arrays, Fault, Finding

Edit = Callable[[ptx.Kernel], ptx.Kernel]
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of shared memory that a program can have


class Driver:
    """What Triton asks of a driver before it launches a kernel."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are remembered by device

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Emulation:
    """All launches within `emulated`.

    Args:
        edit: changes a kernel, for tests.
        stop: whether the first finding is raised as a fault.
        kernels: number of launches by name of the kernel; `executed`, `barriers`, `traffic` likewise.
        warps: number of warps of a program.
    """

    architecture: int
    schedule: machine.Schedule
    edit: Edit | None = None
    stop: bool = False
    kernels: Counter[str] = field(default_factory=Counter)
    findings: Counter[Finding] = field(default_factory=Counter)
    grids: set[tuple[int, int, int]] = field(default_factory=set)
    executed: Counter[str] = field(default_factory=Counter)
    barriers: Counter[str] = field(default_factory=Counter)
    traffic: Counter[str] = field(default_factory=Counter)
    warps: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _entries: tuple[str, ...] = ()

    def run(self, compiled: CompiledKernel, *given: Any) -> None:
        """Emulate a launch that Triton would hand to the driver."""
        grid, arguments = given[:3], given[9:]
        kernel = _parsed(compiled.asm["ptx"])
        kernel = self.edit(kernel) if self.edit else kernel
        kinds = compiled.src.signature
        values = [v for kind, v in zip(kinds.values(), arguments, strict=True) if kind != "constexpr"]
        metadata = compiled.metadata
        if metadata.shared > SHARED[self.architecture]:
            raise Fault(f"{kernel.name} needs {metadata.shared} bytes of shared memory")
        waits = any(i.opcode.startswith("atom") and "acq_rel" in i.opcode for i in kernel.instructions)
        if waits and np.prod(grid) > 1 and not metadata.launch_cooperative_grid:
            raise Fault(f"the programs of {kernel.name} wait for each other, and may not all run at once")
        table, *others = values
        arrays = self._arrays(table, kernel.unit, int(np.prod(grid)))
        numbers = [arrays.moved["table"], *others, 0, 0]  # the last two are memory for Triton's own use: none is needed
        named = dict(zip(kernel.parameters, numbers, strict=False))
        launch = machine.Launch(kernel, grid, named, arrays, metadata.shared, self._schedule(grid), self.stop)
        launch.run()
        self.kernels[kernel.name] += 1
        self.findings += launch.findings.counts
        self.grids.add(grid)
        self.executed[kernel.name] += launch.executed
        self.barriers[kernel.name] += launch.barriers
        self.traffic[kernel.name] += launch.traffic
        self.warps[kernel.name] = kernel.num_threads // 32
        arrays.memories.clear()  # gigabytes, which cycles of references would keep

    def _schedule(self, grid: tuple[int, int, int]) -> machine.Schedule:
        """A different order in each launch."""
        return replace(self.schedule, seed=self.schedule.seed + self.kernels.total())

    def _arrays(self, table: Tensor, unit: int, num_blocks: int) -> Arrays:
        """The table and the tensors whose addresses it has; those that overlap are one array."""
        ordered = sorted(self.tensors.items(), key=lambda item: item[1].data_ptr())
        joined, places = dict[str, tuple[int, int]](), dict[str, tuple[str, int]]()  # begin and end; array and offset
        last = ""
        for name, tensor in ordered:
            begin = tensor.data_ptr()
            end = begin + tensor.numel() * tensor.element_size()
            if last and begin < joined[last][1]:
                joined[last] = joined[last][0], max(end, joined[last][1])
            else:
                last = name
                joined[last] = begin, end
            places[name] = last, begin - joined[last][0]
        content = table.clone()
        arrays = {"table": (table.data_ptr(), content.numpy().view(np.uint8))}
        arrays |= {name: (begin, _bytes(begin, end)) for name, (begin, end) in joined.items() if end > begin}
        found = Arrays(arrays, unit, num_blocks)
        for entry, name in enumerate(self._entries):
            if name in self.tensors and self.tensors[name].numel():
                array, offset = places[name]
                if content[entry] != self.tensors[name].data_ptr():
                    raise Fault(f"the table's entry {name!r} is not the address of that tensor")
                content[entry] = found.moved[array] + offset
        return found


def _bytes(begin: int, end: int) -> Any:
    """The bytes between two addresses of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin))


_parsed = lru_cache(maxsize=16)(ptx.parse)


@contextmanager
def emulated(
    architecture: int, schedule: machine.Schedule | None = None, edit: Edit | None = None, stop: bool = False
) -> Iterator[Emulation]:
    """Context manager in which Triton's kernels run in the emulator. New memory is full of NaN."""
    emulation = Emulation(architecture, schedule or machine.Schedule(), edit, stop)
    run = Launches.run

    def recorded(launches: Launches, num_steps: int, values: dict[str, int | Tensor | None]) -> None:
        tensors = {name: v for name, v in (values | launches.fixed).items() if isinstance(v, Tensor)}
        emulation.tensors = {name: v for name, v in tensors.items() if name in launches.entries}
        emulation._entries = launches.entries
        run(launches, num_steps, values)

    def launched(compiled: CompiledKernel) -> Any:
        return lambda *given: emulation.run(compiled, *given)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    with ExitStack() as stack:
        stack.enter_context(patch.object(driver, "_active", Driver(architecture)))
        stack.enter_context(patch.object(Launches, "run", recorded))
        stack.enter_context(patch.object(CompiledKernel, "run", property(launched)))
        stack.enter_context(patch.object(CompiledKernel, "_init_handles", lambda compiled: None))
        try:
            yield emulation
        finally:
            torch.use_deterministic_algorithms(before)
