"""The matrix products of tensor cores: mma.sync, and the asynchronous wgmma of sm_90.

Numbers are those of sections of the PTX ISA 8.7. Products of elements are exact; their sum is rounded once to float32,
where the hardware's order and rounding are not defined. TF32 reads a float32 without its last 13 bits.

Left out: factors in memory whose rows are not along the depth (wgmma), sparse and integer products, and all of tcgen05
(sm_100).
"""

import re
from functools import partial
from typing import Any

import numpy as np

from tests.emulator import movement
from tests.emulator.memory import Memory, Who
from tests.emulator.ptx import Instruction, names
from tests.emulator.values import Array, from_bfloat16, truncated_to_tf32

TABLE: dict[re.Pattern[str], movement.Step] = {}
LANE = np.arange(32)
ROW, PLACE = LANE // 4, LANE % 4  # of a lane in a fragment
SWIZZLED = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row of eight, by the mode of a descriptor


instruction = partial(movement.instruction, table=TABLE)


def elements(words: Array, kind: str) -> Array:
    """The elements (..., n) of 32-bit words (...), in float32: one of TF32, two of 16 bits."""
    if kind == "tf32":
        return truncated_to_tf32(words)[..., None]
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return from_bfloat16(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)


def left_fragment(registers: list[Array], kind: str) -> Array:
    """The left factor (warps, 16, depth) from four registers of each thread (9.7.14.5.4, 9.7.14.5.8)."""
    words = np.stack(registers).reshape(4, -1, 32)
    parts = elements(words, kind)  # (4, warps, 32, n)
    n = parts.shape[-1]
    factor = np.zeros((words.shape[1], 16, 8 * n), np.float32)
    for part, (row, column) in zip(parts, ((0, 0), (8, 0), (0, 4 * n), (8, 4 * n)), strict=True):
        for i in range(n):
            factor[:, ROW + row, column + n * PLACE + i] = part[..., i]
    return factor


def right_fragment(registers: list[Array], kind: str) -> Array:
    """The right factor (warps, depth, 8) from two registers of each thread."""
    parts = elements(np.stack(registers).reshape(2, -1, 32), kind)
    n = parts.shape[-1]
    factor = np.zeros((parts.shape[1], 8 * n, 8), np.float32)
    for part, depth in zip(parts, (0, 4 * n), strict=True):
        for i in range(n):
            factor[:, depth + n * PLACE + i, ROW] = part[..., i]
    return factor


def sum_fragment(registers: list[Array]) -> Array:
    """The summand (warps, 16, columns) from 4 registers of each thread for every 8 columns."""
    total = np.zeros((len(registers[0]) // 32, 16, 2 * len(registers)), np.float32)
    for j, values in enumerate(registers):
        row, column = _place(j)
        total[:, ROW + row, column + 2 * PLACE] = values.reshape(-1, 32)
    return total


def from_sum(total: Array, j: int) -> Array:
    """Register number j of each thread."""
    row, column = _place(j)
    return total[:, ROW + row, column + 2 * PLACE].reshape(-1)


def _place(j: int) -> tuple[int, int]:
    return j % 4 // 2 * 8, j // 4 * 8 + j % 2


def times(left: Array, right: Array, summand: Array) -> Array:
    exact = left.astype(np.float64) @ right.astype(np.float64) + summand
    return exact.astype(np.float32)


@instruction(r"mma\.sync\.aligned\.(m16n8k8\.row\.col\.f32\.tf32\.tf32|m16n8k16\.row\.col\.f32\.(b?f16)\.\2)\.f32")
def product(group: Any, instruction: Instruction, mask: Array | None) -> None:  # 9.7.14.5.14
    kind, (to, left, right, summand) = instruction.opcode.split(".")[-2], instruction.operands
    total = times(left_fragment(group.vector(left, "b32"), kind), right_fragment(group.vector(right, "b32"), kind),
                  sum_fragment(group.vector(summand, "f32")))  # fmt: skip
    for j, name in enumerate(names(to)):
        group.put(name, from_sum(total, j), mask)


class Products:
    """The asynchronous products of a group: registers and memory that they still use (9.7.15)."""

    def __init__(self) -> None:
        self.open = list[tuple[Memory, Array]]()  # units of shared memory that are read
        self.committed = list[list[tuple[Memory, Array]]]()
        self.busy, self.changed = set[str](), set[str]()  # registers: of products; written since the last fence
        self.fenced = False  # a fence of registers must precede the first product
        self.order = 0  # the last write to shared memory that a fence has shown to the asynchronous proxy

    def check(self, name: str, group: Any) -> None:
        """Some other instruction uses a register."""
        if name in self.busy:
            group.launch.findings.add("register of a product that has not ended", name, np.array([-1]), group.at)


@instruction(r"fence\.proxy\.async\.shared::cta")  # 9.7.13.4
def fence_memory(group: Any, instruction: Instruction, mask: Array | None) -> None:
    group.products.order = group.block.shared.num_writes


@instruction(r"wgmma\.fence\.sync\.aligned")  # 9.7.15.7.1
def fence_registers(group: Any, instruction: Instruction, mask: Array | None) -> None:
    group.products.changed.clear()
    group.products.fenced = True


def factor(group: Any, descriptor: Array, rows: int, kind: str, instruction: Instruction) -> list[Array]:
    """A factor (rows, depth) in shared memory for each group of four warps, by their descriptors (9.7.15.5.1.2)."""
    found, shared, width = [], group.block.shared, 4 if kind == "tf32" else 2
    for value in descriptor[::128].tolist():
        begin, leading, stride = (((value >> at) & 0x3FFF) << 4 for at in (0, 16, 32))
        row_size = SWIZZLED[value >> 62]
        row, column = np.arange(rows)[:, None], np.arange(0, 32, 4)[None, :]  # bytes of 32 bytes of depth
        if row_size == 16:
            at = begin + row // 8 * stride + row % 8 * 16 + column // 16 * leading + column % 16
        else:
            at = begin + row // 8 * stride + row % 8 * row_size + column
            at = at ^ (at >> 3 & row_size - 16)
        places = shared.places(at.reshape(-1), 4, instruction)
        who = _first(group, places)
        late = shared.order[places] > group.products.order
        if late.any():
            who.findings.add("product of memory without a fence", shared.name, shared.written_at[places[late]], who.at)
        words = shared.load(places, who).view(np.uint32).reshape(rows, 8)
        shared.in_use[places] += 1
        group.products.open.append((shared, places))
        found.append(elements(words, kind).reshape(rows, 32 // width))
    return found


def _first(group: Any, places: Array) -> Who:
    """The first thread, which stands for the hardware that reads these units."""
    return group.who()._replace(threads=np.full(len(places), group.threads[0]))


@instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k(8\.f32\.tf32\.tf32|16\.f32\.(b?f16)\.\2)")  # 9.7.15.5.2
def begin(group: Any, instruction: Instruction, mask: Array | None) -> None:
    to, left, right, keep, *signs = instruction.operands
    if signs[:2] != ["1", "1"] or any(transposed != "0" for transposed in signs[2:]):
        raise NotImplementedError(f"a negated or transposed factor: {instruction}")
    registers, kind, products = names(to), instruction.opcode.split(".")[-1], group.products
    columns = 2 * len(registers)
    used = registers + (names(left) if "{" in left else [])
    # Triton sets sums to 0 after the fence. In the machine code the product takes the constant 0 in place of registers.
    if changed := {name for name in products.changed.intersection(used) if group.registers[name].any()}:
        group.launch.findings.add("product of registers without a fence", min(changed), np.array([-1]), group.at)
    if not products.fenced:
        group.launch.findings.add("first product without a fence", registers[0], np.array([-1]), group.at)
    products.busy.clear()  # products follow each other in order
    if "{" in left:
        lefts = left_fragment(group.vector(left, "b32"), kind)
    else:
        lefts = np.concatenate(factor(group, group.value(left, "b64"), 64, kind, instruction)).reshape(
            len(group.threads) // 32, 16, -1
        )
    rights = np.stack(factor(group, group.value(right, "b64"), columns, kind, instruction)).transpose(0, 2, 1)
    if group.value(keep, "pred")[0]:
        summand = sum_fragment([group.value(name, "f32") for name in registers])
    else:
        summand = np.zeros((1, 16, columns), np.float32)
    total = times(lefts, np.repeat(rights, 4, axis=0), summand)
    for j, name in enumerate(registers):
        group.registers[name] = from_sum(total, j).view(np.uint32)
    products.changed.difference_update(registers)
    products.busy.update(registers)


@instruction(r"wgmma\.commit_group\.sync\.aligned")  # 9.7.15.7.2
def commit(group: Any, instruction: Instruction, mask: Array | None) -> None:
    group.products.committed.append(group.products.open)
    group.products.open = []


@instruction(r"wgmma\.wait_group\.sync\.aligned")  # 9.7.15.7.3
def wait(group: Any, instruction: Instruction, mask: Array | None) -> None:
    products = group.products
    while len(products.committed) > int(instruction.operands[0]):
        for shared, places in products.committed.pop(0):
            shared.in_use[places] -= 1
            shared.load(places, _first(group, places))
    if not products.committed and not products.open:
        products.busy.clear()
