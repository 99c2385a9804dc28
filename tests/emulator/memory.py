"""Memory that knows who wrote and read it last, and finds accesses that nothing orders.

An access belongs to a block (a Triton program), one of its threads, and an epoch: the number of barriers that the block
has passed. Another access comes after it if it is the same thread's, or if a barrier, or a counter on which blocks wait
for each other, lies between them. `Who` says up to which epoch of each block that is so. This covers less than
the memory model of the PTX ISA (section 8): what this module accepts is ordered there as well, because the barriers and
atomic operations of the kernels are of the scope that they need.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from tests.emulator.values import UNSIGNED, Array

NONE, MANY = -1, -1000  # readers: no thread, threads of several warps; -2 - w means several threads of warp w


class Fault(Exception):
    """What stops a GPU, or is undefined: an access that is out of bounds or misaligned, a barrier that some miss."""


class Finding(NamedTuple):
    """Something that is not an error of the program's results in this run, but may be in another."""

    kind: str
    memory: str
    first: str  # the instruction that came first, and the one that conflicts with it
    second: str


class Who(NamedTuple):
    """The threads that execute an instruction.

    Args:
        epoch: of their block.
        phase: number of barriers that each of their warps has passed.
        seen: the last epoch of each block that comes before the instruction.
    """

    block: int
    epoch: int
    phase: int
    seen: Array
    threads: Array
    at: int  # number of the instruction
    findings: "Findings"


class Findings:
    """What was found, with the number of accesses."""

    def __init__(self, instructions: tuple) -> None:
        self.counts, self.instructions = Counter[Finding](), instructions

    def add(self, kind: str, memory: str, first: Array, at: int) -> None:
        for before in np.unique(first):
            name = str(self.instructions[before]) if before >= 0 else "-"
            self.counts[Finding(kind, memory, name, str(self.instructions[at]))] += int((first == before).sum())


class Memory:
    """An array in global memory, or the shared memory of a block.

    Args:
        data: its bytes.
        base: its address.
        unit: accesses are recorded for so many bytes.
        num_blocks: number of blocks that may access it.
        empty: whether it has no values at first.
    """

    def __init__(self, name: str, data: Array, base: int, unit: int, num_blocks: int = 1, empty: bool = False) -> None:
        self.name, self.base, self.unit, self.data = name, base, unit, data.view(UNSIGNED[unit])
        count = len(self.data)
        self.empty = np.full(count, empty)
        self.coming = np.zeros(count, bool)  # copied asynchronously, and not there yet
        self.writer, self.written, self.written_at = np.full((3, count), -1, np.int32)  # block, epoch, instruction
        self.writing_thread, self.written_phase = np.full((2, count), -1, np.int32)
        self.read, self.reader, self.read_at, self.read_phase = np.full((4, num_blocks, count), NONE, np.int32)
        self.order = np.zeros(count, np.int64)  # of the last write, for fences
        self.num_writes = 0
        self.in_use = np.zeros(count, np.int16)  # number of asynchronous products that still read

    def places(self, addresses: Array, size: int, instruction: object) -> Array:
        """The units (threads, size / unit) at these addresses."""
        offsets = addresses - self.base
        if (addresses % size).any():
            raise Fault(f"misaligned access: {instruction} at {self.name} + {offsets[addresses % size != 0][0]}")
        outside = (offsets < 0) | (offsets + size > len(self.data) * self.unit)
        if outside.any():
            size_here = len(self.data) * self.unit
            raise Fault(f"out of bounds: {instruction} at {self.name} + {offsets[outside][0]} of {size_here} bytes")
        return (offsets // self.unit)[:, None] + np.arange(size // self.unit)

    def load(self, places: Array, who: Who) -> Array:
        """The values at units (threads, k), with a check."""
        flat, threads = self._flat(places, who)
        self._check_read(flat, threads, who)
        return self.data[places]

    def store(self, places: Array, values: Array, who: Who) -> None:
        """Write values of the shape of `places`, with a check."""
        flat, threads = self._flat(places, who)
        values = values.reshape(-1)
        self._check_write(flat, threads, values, who)
        self.data[flat], self.empty[flat] = values, False
        if (self.data[flat] != values).any():
            who.findings.add("threads write different values at once", self.name, np.array([who.at]), who.at)
        self._record_write(flat, threads, who)

    def expect(self, places: Array, who: Who) -> None:
        """Begin an asynchronous copy to these units."""
        flat, threads = self._flat(places, who)
        self._check_write(flat, threads, None, who)
        self.coming[flat] = True
        self._record_write(flat, threads, who)

    def deliver(self, places: Array, values: Array, threads: Array, who: Who) -> None:
        """End an asynchronous copy, which another write may not have overtaken."""
        flat, threads = places.reshape(-1), np.repeat(threads, places.shape[1])
        taken = self.writing_thread[flat] != threads
        self._report("a copy and another write at once", flat[taken], self.written_at, who)
        self.data[flat], self.coming[flat], self.empty[flat] = values.reshape(-1), False, False
        self._record_write(flat, threads, who)

    @staticmethod
    def _flat(places: Array, who: Who) -> tuple[Array, Array]:
        return places.reshape(-1), np.repeat(who.threads, places.shape[1])

    def _unordered_write(self, flat: Array, threads: Array, who: Who) -> Array:
        """Whether the last write does not come before this access."""
        writer = self.writer[flat]
        seen = (writer < 0) | (self.written[flat] <= who.seen[writer])
        before = self.writing_thread[flat]
        own = (before == threads) | ((before // 32 == threads // 32) & (self.written_phase[flat] < who.phase))
        return ~(seen | ((writer == who.block) & own))

    def _check_read(self, flat: Array, threads: Array, who: Who) -> None:
        self._report("read of a copy that has not arrived", flat[self.coming[flat]], self.written_at, who)
        self._report("read of memory without a value", flat[self.empty[flat] & ~self.coming[flat]], None, who)
        self._report("read after write", flat[self._unordered_write(flat, threads, who)], self.written_at, who)
        self._record_read(flat, threads, who)

    def _record_read(self, flat: Array, threads: Array, who: Who) -> None:
        readers, warps = self.reader[who.block], threads // 32
        before, stale = readers[flat], self.read[who.block, flat] != who.epoch
        same_warp = _warp(before) == warps
        together = np.where(same_warp, -2 - warps, MANY)
        readers[flat] = np.where(stale | (before == threads), threads, together)
        now = readers[flat]
        several = (now != threads) & (now != MANY) & (_warp(now) == warps)  # in this instruction too
        readers[flat[several]] = -2 - warps[several]
        readers[flat[_warp(now) != warps]] = MANY
        self.read[who.block, flat], self.read_at[who.block, flat] = who.epoch, who.at
        self.read_phase[who.block, flat] = who.phase

    def _check_write(self, flat: Array, threads: Array, values: Array | None, who: Who) -> None:
        unordered = self._unordered_write(flat, threads, who)
        if values is not None:
            unordered &= self.data[flat] != values
        unordered |= self.coming[flat]
        self._report("write to a factor of a product that has not ended", flat[self.in_use[flat] > 0], None, who)
        self._report("write after write", flat[unordered], self.written_at, who)
        for block in range(len(self.read)):
            unordered = self.read[block, flat] > who.seen[block]
            if block == who.block:
                before = self.reader[block, flat]
                of_warp = (_warp(before) == threads // 32) & (self.read_phase[block, flat] < who.phase)
                unordered &= (before != threads) & ~of_warp
            self._report("write after read", flat[unordered], self.read_at[block], who)

    def _record_write(self, flat: Array, threads: Array, who: Who) -> None:
        self.writer[flat], self.written[flat], self.written_at[flat] = who.block, who.epoch, who.at
        self.writing_thread[flat], self.written_phase[flat] = threads, who.phase
        self.num_writes += 1
        self.order[flat] = self.num_writes

    def _report(self, kind: str, flat: Array, first: Array | None, who: Who) -> None:
        if len(flat):
            who.findings.add(kind, self.name, np.full(len(flat), -1) if first is None else first[flat], who.at)


def _warp(readers: Array) -> Array:
    """The warp of readers; a negative number if there are none, or several warps."""
    return np.where(readers >= 0, readers // 32, np.where(readers == MANY, MANY, -2 - readers))


class Arrays:
    """Global memory: arrays at addresses so far apart that no error leads from one to another."""

    def __init__(self, arrays: dict[str, tuple[int, Array]], unit: int, num_blocks: int) -> None:
        """Given the address and the bytes of each array. Those that overlap must have been joined."""
        self.memories = list[Memory]()
        self.moved = dict[str, int]()  # addresses by name
        for number, (name, (address, data)) in enumerate(arrays.items(), 1):
            base = (number << 32) + address % 512  # aligned as it is
            self.memories.append(Memory(name, data, base, min(unit, len(data) & -len(data)), num_blocks))
            self.moved[name] = base

    def at(self, addresses: Array, instruction: object) -> Memory:
        """The array to which all of the addresses belong."""
        numbers = np.unique(addresses >> 32)
        if len(numbers) != 1 or not 1 <= numbers[0] <= len(self.memories):
            raise Fault(f"no array at {addresses[0]:#x}: {instruction}")
        return self.memories[numbers[0] - 1]
