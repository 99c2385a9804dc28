"""Runs a few instructions in the emulator, for the tests of its parts."""

from collections import Counter
from collections.abc import Callable

import numpy as np

from tests.emulator import machine, ptx
from tests.emulator.memory import Arrays, Finding
from tests.emulator.values import UNSIGNED, Array

Edit = Callable[[ptx.Kernel], ptx.Kernel]
HEAD = """
.visible .entry snippet(
	.param .u64 .ptr .global .align 1 snippet_param_0,
	.param .u64 .ptr .global .align 1 snippet_param_1
)
.reqntid %d
{
	.reg .pred 	%%p<9>;
	.reg .b16 	%%rs<9>;
	.reg .b32 	%%r<99>;
	.reg .b64 	%%rd<99>;
"""


class Run:
    """What a snippet did: the registers of each block (threads in rows), shared memory, and what was found."""

    def __init__(
        self, code: str, arrays: list[Array], threads: int, blocks: int, shared: int, edit: Edit, **schedule: int
    ) -> None:
        self.kernel = edit(ptx.parse(f"{HEAD % threads}{code}\nret;\n}}"))
        named = {str(i): (0, array.view(np.uint8)) for i, array in enumerate(arrays)}
        memory = Arrays(named, self.kernel.unit, blocks)
        arguments = dict(zip(self.kernel.parameters, (*memory.moved.values(), 0, 0), strict=False))
        self.launch = machine.Launch(
            self.kernel, (blocks, 1, 1), arguments, memory, shared, machine.Schedule(**schedule)
        )
        self.groups = list[machine.Group]()

    def run(self, given: dict[str, Array]) -> "Run":
        blocks = [machine.Block(self.launch, number) for number in range(self.launch.num_blocks)]
        self.groups = [group for block in blocks for group in block.groups]
        for group in self.groups:
            for name, values in given.items():
                values = np.asarray(values)
                own = np.broadcast_to(values, self.kernel.num_threads)[group.threads]
                group.registers[name] = own if own.dtype == bool else own.view(UNSIGNED[own.dtype.itemsize])
        self.launch.run(self.groups)
        return self

    def __getitem__(self, name: str) -> Array:
        return np.concatenate([group.registers[name] for group in self.groups])

    @property
    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.findings}

    @property
    def findings(self) -> Counter[Finding]:
        return self.launch.findings.counts


def run(
    code: str, arrays: list[Array] | None = None, threads: int = 32, blocks: int = 1, shared: int = 4096,
    given: dict[str, Array] | None = None, edit: Edit = lambda kernel: kernel, **schedule: int,
) -> Run:  # fmt: skip
    """Run instructions. The addresses of two arrays are in %rd1 and %rd2, that of shared memory is 1024.

    `edit` changes the kernel before it runs.
    """
    load = "ld.param.b64 %rd1, [snippet_param_0];\nld.param.b64 %rd2, [snippet_param_1];\nmov.u32 %r1, %tid.x;\n"
    return Run(load + code, arrays or [], threads, blocks, shared, edit, **schedule).run(given or {})
