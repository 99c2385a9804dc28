"""Runs the blocks of a grid: groups of threads that go through the instructions together, barriers and counters.

Threads of a group execute each instruction at the same time. Groups take turns in random order, at barriers and at
atomic operations. A group is a whole block, or some warps of it. A branch must be the same for all threads of a group,
as it is in the code of Triton, where only predicates differ.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tests.emulator import arithmetic, movement, tensor
from tests.emulator.memory import Arrays, Fault, Findings, Memory, Who
from tests.emulator.ptx import Instruction, Kernel, names
from tests.emulator.values import TYPES, UNSIGNED, Array, bits, immediate

SHARED_BASE = 1024  # address of shared memory: aligned as the swizzled layouts of sm_90 need it


@dataclass(frozen=True)
class Schedule:
    """In which order groups run.

    Args:
        seed: of the random order.
        warps: number of warps of a group; 0 for all of the block.
        delayed: a block that runs rarely, or -1.
    """

    seed: int = 0
    warps: int = 0
    delayed: int = -1

    def next(self, groups: list["Group"], generator: np.random.Generator) -> "Group":
        others = [group for group in groups if group.block.number != self.delayed]
        rare = self.delayed >= 0 and others and generator.random() < 0.98
        among = others if rare else groups
        return among[generator.integers(len(among))]


@dataclass
class Launch:
    """One launch of a kernel: runs it, and has what was found.

    Args:
        arguments: values of the parameters by name.
        shared: bytes of the shared memory of a block.
        stop: whether the first finding is raised as a fault.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: dict[str, int]
    arrays: Arrays
    shared: int
    schedule: Schedule = field(default_factory=Schedule)
    stop: bool = False
    executed: int = 0  # instructions of warps
    barriers: int = 0  # that the first block has passed
    traffic: int = 0  # bytes that were loaded from global memory and stored there

    def __post_init__(self) -> None:
        self.findings = Findings(self.kernel.instructions)
        self.released = dict[int, Array]()  # by address of a counter: epochs that an acquiring thread sees

    @property
    def num_blocks(self) -> int:
        return int(np.prod(self.grid))

    def run(self, groups: "list[Group] | None" = None) -> None:
        """Run to the end: these groups of threads, or new ones of all blocks."""
        generator = np.random.default_rng(self.schedule.seed)
        groups = list(groups or (group for number in range(self.num_blocks) for group in Block(self, number).groups))
        with np.errstate(all="ignore"):
            while groups:
                ready = [group for group in groups if not group.waiting]
                group = self.schedule.next(ready, generator)
                group.run()
                if self.stop and self.findings.counts:
                    raise Fault(next(iter(self.findings.counts)).kind)
                if group.done:
                    groups.remove(group)


class Block:
    """A Triton program: its shared memory, its epoch, and the groups of its threads."""

    def __init__(self, launch: Launch, number: int) -> None:
        self.launch, self.number, self.epoch = launch, number, 0
        x, y, _ = launch.grid
        self.position = number % x, number // x % y, number // (x * y)
        self.seen = np.full(launch.num_blocks, -1)  # the last epoch of each block that is before this one's
        self.acquired = self.seen.copy()  # becomes visible to all threads at the next barrier
        size = -(-max(launch.shared, 16) // 16) * 16
        # Without a value, memory has a pattern that is NaN in every format.
        self.shared = Memory("shared memory", np.full(size, 0xFF, np.uint8), SHARED_BASE, launch.kernel.unit,
                             launch.num_blocks, empty=True)  # fmt: skip
        threads = np.arange(launch.kernel.num_threads)
        width = 32 * launch.schedule.warps or len(threads)
        self.groups = [Group(self, threads[begin : begin + width]) for begin in range(0, len(threads), width)]

    def arrive(self) -> None:
        """A group has come to a barrier. All go on when all have come."""
        if any(group.done for group in self.groups):
            raise Fault("some threads have ended, and others wait at a barrier")
        if not all(group.waiting for group in self.groups):
            return
        if len({group.at for group in self.groups}) > 1:
            raise Fault("threads wait at different barriers")
        self.seen = np.maximum(self.seen, self.acquired)
        self.seen[self.number] = self.epoch
        self.epoch += 1
        self.launch.barriers += self.number == 0
        for group in self.groups:
            group.waiting = False

    def acquire_and_release(self, address: int) -> None:
        """An atomic operation on a counter, by one thread: it sees what others released there, and releases.

        Others see what this block did before its last barrier.
        """
        before = self.launch.released.get(address, np.full(self.launch.num_blocks, -1))
        self.acquired = np.maximum(self.acquired, before)
        self.launch.released[address] = np.maximum(before, self.seen)


class Group:
    """Threads that run together, and their registers."""

    def __init__(self, block: Block, threads: Array) -> None:
        self.block, self.launch, self.kernel, self.threads = block, block.launch, block.launch.kernel, threads
        self.registers = dict[str, Array]()
        self.pc, self.at, self.phase, self.waiting, self.done = 0, 0, 0, False, False
        self.copies, self.committed = list[movement.Copy](), list[list[movement.Copy]]()
        self.products = tensor.Products()

    def run(self) -> None:
        """Run until a barrier, an atomic operation or the end."""
        instructions, steps = self.kernel.instructions, _steps(self.kernel)
        while True:
            self.at, instruction = self.pc, instructions[self.pc]
            self.pc += 1
            self.launch.executed += len(self.threads) // 32
            mask = self.guard(instruction)
            if steps[self.at](self, instruction, mask):
                return

    def guard(self, instruction: Instruction) -> Array | None:
        """Which threads execute an instruction; None for all."""
        if not instruction.guard:
            return None
        value = self.registers[instruction.guard]
        return ~value if instruction.negated else value

    def value(self, text: str, kind: str) -> Array:
        """An operand, as a type."""
        found = self.registers.get(text)
        if found is None:
            return self._other_value(text, kind)
        self.products.check(text, self)
        dtype = np.dtype(TYPES[kind])
        if found.dtype.itemsize != dtype.itemsize:
            found = found.astype(UNSIGNED[dtype.itemsize])
        return found if found.dtype == dtype else found.view(dtype)

    def _other_value(self, text: str, kind: str) -> Array:
        count = len(self.threads)
        if text == "global_smem":
            return np.full(count, SHARED_BASE, TYPES[kind])
        if text in self.kernel.parameters:
            return immediate(str(self.launch.arguments[text]), kind, count)
        if text in self._special:
            return np.broadcast_to(self._special[text], count).astype(TYPES[kind])
        if text.startswith("%"):
            raise Fault(f"register {text} has no value: {self.kernel.instructions[self.at]}")
        return immediate(text, kind, count)

    @cached_property
    def _special(self) -> dict[str, Array | int]:
        """Registers of section 10 of the PTX ISA."""
        of_grid = {f"%ctaid.{axis}": value for axis, value in zip("xyz", self.block.position, strict=True)}
        of_grid |= {f"%nctaid.{axis}": value for axis, value in zip("xyz", self.launch.grid, strict=True)}
        return of_grid | {"%tid.x": self.threads, "%laneid": self.threads % 32}

    def put(self, name: str, values: Array, mask: Array | None = None) -> None:
        """Write a register; only of the threads in the mask."""
        if name == "_":
            return
        self.products.check(name, self)
        self.products.changed.add(name)
        values, width = bits(np.ascontiguousarray(values)), self.kernel.widths[name.rstrip("0123456789")]
        if width and values.dtype.itemsize != width:
            values = values.astype(UNSIGNED[width])
        if mask is not None and not mask.all():
            before = self.registers.get(name)
            values = np.where(mask, values, _nothing(values) if before is None else before)
        self.registers[name] = values

    def vector(self, text: str, kind: str) -> list[Array]:
        return [self.value(name, kind) for name in names(text)]

    def who(self, mask: Array | None = None) -> Who:
        threads = self.threads if mask is None else self.threads[mask]
        block = self.block
        return Who(block.number, block.epoch, self.phase, block.seen, threads, self.at, self.launch.findings)


def _nothing(values: Array) -> Array:
    """What a register has that was never written: a pattern that is NaN in every format."""
    return ~np.zeros_like(values)


MOST_KNOWN = 64  # kernels that stay in memory
_known: dict[int, tuple[Kernel, list]] = {}


def _steps(kernel: Kernel) -> list:
    """The function of each instruction of a kernel; an unknown one is an error before anything runs."""
    if id(kernel) not in _known:
        if len(_known) == MOST_KNOWN:
            _known.clear()
        _known[id(kernel)] = kernel, [_step(instruction) for instruction in kernel.instructions]
    return _known[id(kernel)][1]


def _step(instruction: Instruction):
    if rule := arithmetic.rule(instruction.opcode):
        parts = instruction.opcode.split(".")
        kinds = rule.sources(parts)

        def compute(group: Group, instruction: Instruction, mask: Array | None) -> None:
            destination, *sources = instruction.operands
            values = [group.value(text, kind) for text, kind in zip(sources, kinds, strict=True)]
            group.put(destination, rule.compute(parts, *values), mask)

        return compute
    for table in (movement.TABLE, tensor.TABLE):
        for pattern, function in table.items():
            if pattern.fullmatch(instruction.opcode):
                return function
    raise NotImplementedError(f"the emulator has no instruction {instruction.opcode}: {instruction}")
