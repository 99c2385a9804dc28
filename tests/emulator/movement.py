"""The instructions that move data between registers and memory, threads and blocks, and those of control.

Each is a function of the group of threads, the instruction, and the mask of the threads that execute it. It returns
True if other groups may run then. Numbers are those of sections of the PTX ISA 8.7. Left out: caches and their hints,
volatile accesses, local and constant memory, clusters.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.emulator.memory import Fault, Memory
from tests.emulator.ptx import WIDTHS, Instruction, names
from tests.emulator.values import UNSIGNED, Array, bits

Step = Callable[[Any, Instruction, Array | None], bool | None]
TABLE: dict[re.Pattern[str], Step] = {}


class Copy(NamedTuple):
    """An asynchronous copy that has begun: values, units of shared memory (threads, k), and threads."""

    values: Array
    places: Array
    threads: Array


def instruction(pattern: str, table: dict[re.Pattern[str], Step] = TABLE) -> Callable[[Step], Step]:
    """Decorator of the function of all opcodes that the pattern matches."""

    def register(function: Step) -> Step:
        table[re.compile(pattern)] = function
        return function

    return register


def everyone(group: Any, mask: Array | None) -> Array:
    return np.ones(len(group.threads), bool) if mask is None else mask


def address(group: Any, text: str, kind: str) -> Array:
    """The addresses of an operand [register + offset], as int64 (6.4.1)."""
    found = re.fullmatch(r"\[\s*([%\w.]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
    assert found is not None, text
    return group.value(found[1], kind).astype(np.int64) + int(found[2] or "0", 0)


def memory(group: Any, space: str, addresses: Array, instruction: Instruction) -> Memory:
    return group.block.shared if space == "shared" else group.launch.arrays.at(addresses, instruction)


def _access(group: Any, instruction: Instruction, text: str, mask: Array) -> tuple[Memory, Array, int, str]:
    """Of a load or store: the memory, the units, the number of elements of a thread, and their type."""
    _, space, *rest = instruction.opcode.split(".")
    kind, count = rest[-1], {"v2": 2, "v4": 4}.get(rest[0], 1)
    at = address(group, text, "u32" if space == "shared" else "u64")[mask]
    found = memory(group, space, at, instruction)
    group.launch.traffic += (space == "global") * len(at) * count * WIDTHS[kind]
    return found, found.places(at, count * WIDTHS[kind], instruction), count, kind


@instruction(r"ld\.(global|shared)(\.v[24])?\.[bsuf](8|16|32|64)")  # 9.7.9.8
def load(group: Any, instruction: Instruction, mask: Array | None) -> None:
    full = everyone(group, mask)
    if not full.any():  # the registers have values that nobody may use
        for name in names(instruction.operands[0]):
            group.put(name, np.zeros(len(full), np.uint32), mask)
        return
    found, places, count, kind = _access(group, instruction, instruction.operands[1], full)
    loaded = found.load(places, group.who(full)).reshape(len(places), count, -1)
    loaded = np.ascontiguousarray(loaded).view(UNSIGNED[WIDTHS[kind]])[..., 0]
    for name, column in zip(names(instruction.operands[0]), loaded.T, strict=True):
        values = np.zeros(len(full), loaded.dtype)
        values[full] = column
        group.put(name, values, mask)


@instruction(r"st\.(global|shared)(\.v[24])?\.[bsuf](8|16|32|64)")  # 9.7.9.12
def store(group: Any, instruction: Instruction, mask: Array | None) -> None:
    full = everyone(group, mask)
    if not full.any():
        return
    found, places, _, kind = _access(group, instruction, instruction.operands[0], full)
    values = np.stack([bits(value)[full] for value in group.vector(instruction.operands[1], kind)], 1)
    found.store(places, values.view(UNSIGNED[found.unit]).reshape(places.shape), group.who(full))


@instruction(r"ld\.param\.[bsu](32|64)")  # 9.7.9.8
def load_parameter(group: Any, instruction: Instruction, mask: Array | None) -> None:
    kind = instruction.opcode.split(".")[-1]
    values = group.value(instruction.operands[1].strip("[]"), kind)
    wide = group.kernel.widths[instruction.operands[0].rstrip("0123456789")]
    group.put(instruction.operands[0], values.astype(np.int64) if kind == "s32" and wide == 8 else values, mask)


@instruction(r"mov\.([busf](16|32|64)|pred)")  # 9.7.9.1, 9.7.9.2
def move(group: Any, instruction: Instruction, mask: Array | None) -> None:
    (to, source), kind = instruction.operands, instruction.opcode.split(".")[1]
    if source.startswith("{"):  # the first is the lowest
        half = f"b{8 * WIDTHS[kind] // 2}"
        values = np.stack(group.vector(source, half), 1).view(UNSIGNED[WIDTHS[kind]])[:, 0]
        group.put(to, values, mask)
    elif to.startswith("{"):
        half = UNSIGNED[WIDTHS[kind] // 2]
        values = np.ascontiguousarray(group.value(source, kind)).view(half).reshape(-1, 2)
        for name, column in zip(names(to), values.T, strict=True):
            group.put(name, column, mask)
    else:
        group.put(to, group.value(source, kind), mask)


@instruction(r"shfl\.sync\.(bfly|idx)\.b32")  # 9.7.9.6
def shuffle(group: Any, instruction: Instruction, mask: Array | None) -> None:
    to, source, lane, clamp, members = instruction.operands
    if int(clamp, 0) != 31 or int(members, 0) % 2**32 != 2**32 - 1 or mask is not None:
        raise NotImplementedError(f"a shuffle of a part of a warp: {instruction}")
    own, other = np.arange(len(group.threads)), group.value(lane, "u32").astype(np.int64) & 31
    other = own % 32 ^ other if ".bfly" in instruction.opcode else other
    group.put(to, group.value(source, "b32")[own // 32 * 32 + other])


@instruction(r"bra(\.uni)?")  # 9.7.12.3
def branch(group: Any, instruction: Instruction, mask: Array | None) -> None:
    full = everyone(group, mask)
    if full.all():
        group.pc = group.kernel.labels[instruction.operands[0]]
    elif full.any():
        raise Fault(f"a branch that only some threads of a group take: {instruction}")


@instruction(r"ret|exit")  # 9.7.12.6, 9.7.12.7
def end(group: Any, instruction: Instruction, mask: Array | None) -> bool:
    if mask is not None:
        raise NotImplementedError(str(instruction))
    if group.copies or any(group.committed):
        raise Fault("the kernel ends before a copy to shared memory has arrived")
    group.done = True
    if any(other.waiting for other in group.block.groups):
        group.block.arrive()
    return True


@instruction(r"bar\.sync")  # 9.7.13.1
def barrier(group: Any, instruction: Instruction, mask: Array | None) -> bool:
    if instruction.operands != ("0",) or mask is not None:
        raise NotImplementedError(f"a barrier of a part of the threads: {instruction}")
    group.waiting = True
    group.block.arrive()
    return True


@instruction(r"bar\.warp\.sync")  # 9.7.13.2
def barrier_of_warps(group: Any, instruction: Instruction, mask: Array | None) -> None:
    if int(instruction.operands[0], 0) % 2**32 != 2**32 - 1 or mask is not None:
        raise NotImplementedError(f"a barrier of a part of a warp: {instruction}")
    group.phase += 1


@instruction(r"atom\.global\.gpu\.acq_rel\.add\.u32")  # 9.7.13.5: one thread after the other
def atomic(group: Any, instruction: Instruction, mask: Array | None) -> bool:
    to, place, summand = instruction.operands
    full, values = everyone(group, mask), group.value(summand, "u32")
    before = np.zeros(len(full), np.uint32)
    addresses = address(group, place, "u64")
    for i in np.flatnonzero(full):
        found = memory(group, "global", addresses[i : i + 1], instruction)
        (at,) = found.places(addresses[i : i + 1], 4, instruction)
        before[i] = found.data[at].view(np.uint32)[0]
        found.data[at] = np.array([before[i] + values[i]], np.uint32).view(found.data.dtype)
        group.block.acquire_and_release(int(addresses[i]))
    group.put(to, before, mask)
    return True


@instruction(r"(red|atom)\.global\.gpu\.relaxed\.add\.f32")  # 9.7.13.5, 9.7.13.7: orders nothing
def atomic_sum(group: Any, instruction: Instruction, mask: Array | None) -> None:
    *to, place, summand = instruction.operands
    full, values = everyone(group, mask), group.value(summand, "f32")
    before, addresses = np.zeros(len(full), np.float32), address(group, place, "u64")
    for i in np.flatnonzero(full):
        found, who = memory(group, "global", addresses[i : i + 1], instruction), group.who(np.arange(len(full)) == i)
        at = found.places(addresses[i : i + 1], 4, instruction)
        before[i] = found.load(at, who).view(np.float32)[0, 0]
        found.store(at, np.array([[before[i] + values[i]]], np.float32).view(found.data.dtype), who)
    if to:
        group.put(to[0], before, mask)


@instruction(r"cp\.async\.c[ag]\.shared\.global")  # 9.7.9.25.3.1: bytes beyond the source's size are 0
def copy(group: Any, instruction: Instruction, mask: Array | None) -> None:
    full, (to, source, size, *given) = everyone(group, mask), instruction.operands
    if not full.any():
        return
    count, who = int(size, 0), group.who(full)
    sizes = group.value(given[0], "u32")[full] if given else np.full(full.sum(), count, np.uint32)
    if not np.isin(sizes, (0, count)).all():
        raise NotImplementedError(f"a copy of a part: {instruction}")
    shared = group.block.shared
    places = shared.places(address(group, to, "u32")[full], count, instruction)
    values, some = np.zeros(places.shape, shared.data.dtype), sizes > 0
    addresses = address(group, source, "u64")[full][some]
    if some.any():
        group.launch.traffic += len(addresses) * count
        found = memory(group, "global", addresses, instruction)
        loaded = found.load(found.places(addresses, count, instruction), who._replace(threads=who.threads[some]))
        values[some] = loaded.view(shared.data.dtype)
    shared.expect(places, who)
    group.copies.append(Copy(values, places, who.threads))


@instruction(r"cp\.async\.commit_group")  # 9.7.9.25.3.2
def commit(group: Any, instruction: Instruction, mask: Array | None) -> None:
    group.committed.append(group.copies)
    group.copies = []


@instruction(r"cp\.async\.wait_group")  # 9.7.9.25.3.3: all but the last so many have arrived, for their own threads
def wait(group: Any, instruction: Instruction, mask: Array | None) -> None:
    while len(group.committed) > int(instruction.operands[0]):
        for values, places, threads in group.committed.pop(0):
            group.block.shared.deliver(places, values, threads, group.who())


def _matrix(group: Any, instruction: Instruction, text: str, j: int) -> Array:
    """The units (threads, k) of the two elements of matrix j of 8 x 8 that each thread has; one row a thread's address.

    They are neighbours in a row, or in a column with .trans.
    """
    addresses, shared = address(group, text, "u32"), group.block.shared
    lanes = np.arange(len(group.threads))
    first, row, column = lanes // 32 * 32 + 8 * j, lanes % 32 // 4, lanes % 4
    shared.places(addresses[first + row], 16, instruction)  # rows are aligned
    if ".trans" not in instruction.opcode:
        return shared.places(addresses[first + row] + 4 * column, 4, instruction)
    pair = [shared.places(addresses[first + 2 * column + k] + 2 * row, 2, instruction) for k in range(2)]
    return np.concatenate(pair, 1)


@instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16")  # 9.7.14.5.15
def load_matrices(group: Any, instruction: Instruction, mask: Array | None) -> None:
    for j, name in enumerate(names(instruction.operands[0])):
        values = group.block.shared.load(_matrix(group, instruction, instruction.operands[1], j), group.who())
        group.put(name, values.view(np.uint32)[:, 0], mask)


@instruction(r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16")  # 9.7.14.5.16
def store_matrices(group: Any, instruction: Instruction, mask: Array | None) -> None:
    shared = group.block.shared
    for j, name in enumerate(names(instruction.operands[1])):
        places = _matrix(group, instruction, instruction.operands[0], j)
        values = np.ascontiguousarray(group.value(name, "b32")).view(shared.data.dtype)
        shared.store(places, values.reshape(places.shape), group.who())
