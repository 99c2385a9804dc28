"""Damage to the order in a compiled kernel: its barriers, fences and waits are deleted or moved.

A barrier is moved past the nearest instruction with which that changes the order: another one, on the other side of the
barrier and of no further barrier, uses the same bytes from another thread, and one of the two writes. Which bytes an
instruction uses is recorded in a run. Fences and waits are moved past the nearest instruction of the kind that they
order. No branch, and no target of one, may lie between.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from tests.emulator.memory import Memory, Who
from tests.emulator.ptx import Instruction, Kernel, names
from tests.emulator.values import Array

BARRIERS = ("bar.sync", "bar.warp.sync")
COUNTER = "atom.global.gpu.acq_rel"
# Of other instructions: what they are moved past, to an earlier and to a later place.
PAST = {
    "cp.async.wait_group": (("cp.async.c",), ("ld.shared", "ldmatrix", "wgmma.mma")),
    "fence.proxy.async": (("st.shared", "stmatrix", "cp.async.wait"), ("wgmma.mma",)),
    "wgmma.fence": ((), ("wgmma.mma",)),
    "wgmma.wait_group": (("wgmma.mma",), ()),  # and past what uses the sums
}


class Damage(NamedTuple):
    """A change of one instruction; `change` is "deleted", "earlier" or "later", and `kernel` the damaged kernel."""

    instruction: Instruction
    number: int
    change: str
    kernel: Kernel


class Use(NamedTuple):
    """What an instruction did: the memory, its units, their threads, and whether it wrote."""

    memory: tuple[str, int]
    units: Array
    threads: Array
    writes: bool


class Trace:
    """The memory that each instruction uses, by the instructions of the kernel and the number of the instruction."""

    def __init__(self) -> None:
        self.uses = dict[tuple[int, int], list[Use]]()

    def add(self, memory: Memory, places: Array, threads: Array, who: Who, writes: bool) -> None:
        name = memory.name, who.block if memory.name == "shared memory" else -1
        use = Use(name, places.reshape(-1), np.repeat(threads, places.shape[1]), writes)
        self.uses.setdefault((id(who.findings.instructions), who.at), []).append(use)

    def conflict(self, kernel: Kernel, first: int, second: int, warps: bool) -> bool:
        """Whether two instructions use the same units from different threads (or warps), and one writes."""
        uses = [self.uses.get((id(kernel.instructions), at), []) for at in (first, second)]
        if any(kernel.instructions[at].opcode.startswith(COUNTER) for at in (first, second)):
            return any(use.memory[1] < 0 for use in uses[0] + uses[1])  # it orders all that other programs see
        return any(_overlap(one, other, warps) for one in uses[0] for other in uses[1])


def _overlap(one: Use, other: Use, warps: bool) -> bool:
    if one.memory != other.memory or not (one.writes or other.writes):
        return False
    common = np.intersect1d(one.units, other.units)
    places = [np.searchsorted(common, use.units).clip(max=len(common) - 1) for use in (one, other) if len(common)]
    least, most = np.full(len(common), 1 << 30), np.full(len(common), -1)
    for use, place in zip((one, other), places, strict=False):
        used = common[place] == use.units
        threads = use.threads[used] // (32 if warps else 1)
        np.minimum.at(least, place[used], threads)
        np.maximum.at(most, place[used], threads)
    return bool((least < most).any())


@contextmanager
def traced() -> Iterator[Trace]:
    """Context manager in which accesses are recorded."""
    trace = Trace()
    load, store, expect, deliver = Memory.load, Memory.store, Memory.expect, Memory.deliver

    def traced_load(memory: Memory, places: Array, who: Who) -> Array:
        trace.add(memory, places, who.threads, who, False)
        return load(memory, places, who)

    def traced_store(memory: Memory, places: Array, values: Array, who: Who) -> None:
        trace.add(memory, places, who.threads, who, True)
        store(memory, places, values, who)

    def traced_expect(memory: Memory, places: Array, who: Who) -> None:
        trace.add(memory, places, who.threads, who, True)
        expect(memory, places, who)

    def traced_deliver(memory: Memory, places: Array, values: Array, threads: Array, who: Who) -> None:
        trace.add(memory, places, threads, who, True)
        deliver(memory, places, values, threads, who)

    with patch.multiple(Memory, load=traced_load, store=traced_store, expect=traced_expect, deliver=traced_deliver):
        yield trace


def damages(kernel: Kernel, trace: Trace) -> Iterator[Damage]:
    """All damage to the order in a kernel."""
    orders = [at for at, i in enumerate(kernel.instructions) if i.opcode.startswith((*BARRIERS, *PAST))]
    for number, at in enumerate(orders):
        instruction = kernel.instructions[at]
        yield Damage(instruction, number, "deleted", without(kernel, at))
        for change, step in (("earlier", -1), ("later", 1)):
            target = _target(kernel, trace, at, step)
            if target is not None:
                yield Damage(instruction, number, change, moved(kernel, at, target))


def without(kernel: Kernel, at: int) -> Kernel:
    """The kernel without an instruction."""
    labels = {name: place - (place > at) for name, place in kernel.labels.items()}
    return replace(kernel, instructions=kernel.instructions[:at] + kernel.instructions[at + 1 :], labels=labels)


def moved(kernel: Kernel, at: int, target: int) -> Kernel:
    """The kernel with an instruction before an earlier one or after a later one, with no target of a branch between."""
    rest = list(kernel.instructions)
    rest.insert(target, rest.pop(at))
    return replace(kernel, instructions=tuple(rest))


def _target(kernel: Kernel, trace: Trace, at: int, step: int) -> int | None:
    """The number of the nearest instruction past which a move changes the order."""
    opcode = kernel.instructions[at].opcode
    if not opcode.startswith(BARRIERS):
        past = next(past for name, past in PAST.items() if opcode.startswith(name))[step > 0]
        sums = _sums(kernel, at) if opcode.startswith("wgmma.wait_group") and step > 0 else set()
        near = _near(kernel, at, step)
        return next((n for n in near if _opcode(kernel, n).startswith(past) or sums & _registers(kernel, n)), None)
    until = ("bar.",) if "warp" in opcode else ("bar.sync",)
    others = list(_near(kernel, at, -step, until))
    for n in _near(kernel, at, step, until):
        for other in others:
            if trace.conflict(kernel, n, other, _ordered_in_warps(kernel, at, n, other)):
                return n
    return None


def _sums(kernel: Kernel, at: int) -> set[str]:
    """The registers of the sums of the last asynchronous product before an instruction."""
    product = next((n for n in range(at, -1, -1) if _opcode(kernel, n).startswith("wgmma.mma")), None)
    return set() if product is None else set(names(kernel.instructions[product].operands[0]))


def _registers(kernel: Kernel, n: int) -> set[str]:
    return set(re.findall(r"%\w+", " ".join(kernel.instructions[n].operands)))


def _ordered_in_warps(kernel: Kernel, at: int, *ends: int) -> bool:
    """Whether a barrier of warps, other than the instruction itself, lies between two instructions."""
    return any(_opcode(kernel, n).startswith("bar.warp") for n in range(min(ends), max(ends)) if n != at)


def _near(kernel: Kernel, at: int, step: int, until: tuple[str, ...] = ()) -> Iterator[int]:
    """Numbers of the instructions in one direction, up to a branch, a target of one, or one of these opcodes."""
    n, targets = at + step, {kernel.labels[i.operands[0]] for i in kernel.instructions if i.opcode.startswith("bra")}
    while 0 <= n < len(kernel.instructions) and not _opcode(kernel, n).startswith(("bra", "ret", *until)):
        if (n if step > 0 else n + 1) in targets:
            return
        yield n
        n += step


def _opcode(kernel: Kernel, n: int) -> str:
    return kernel.instructions[n].opcode
