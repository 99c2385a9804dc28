"""Matrix products of the emulator, with the places of elements as the PTX ISA's formulas have them, one by one."""

import numpy as np
import pytest
import torch

from tests.emulator.snippets import run

DEPTH = {"tf32": 8, "bf16": 16, "f16": 16}
RANDOM = np.random.default_rng(0)


def braces(first: int, count: int) -> str:
    """A vector of registers."""
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 values that the kind of a product reads exactly."""
    if kind == "tf32":
        return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return torch.from_numpy(values).to({"bf16": torch.bfloat16, "f16": torch.float16}[kind]).float().numpy()


def words(values: np.ndarray, kind: str) -> np.ndarray:
    """Elements along the last axis as 32-bit words, two to a word if they have 16 bits."""
    if kind == "tf32":
        return values.view(np.uint32)
    low = torch.from_numpy(values).to({"bf16": torch.bfloat16, "f16": torch.float16}[kind])
    return low.view(torch.int16).numpy().view(np.uint32)


def left_registers(a: np.ndarray, kind: str, first_row: int = 0) -> list[np.ndarray]:
    """Registers a0 to a3 of a warp: row is the lane // 4, plus 8 in a1 and a3; a2 and a3 have the second half."""
    of_words, half = words(a, kind), DEPTH[kind] // (2 if kind == "tf32" else 4)
    return [
        np.array([of_words[first_row + lane // 4 + 8 * (i % 2), lane % 4 + half * (i // 2)] for lane in range(32)])
        for i in range(4)
    ]


def right_registers(b: np.ndarray, kind: str) -> list[np.ndarray]:
    """Registers b0 and b1: column lane // 4, and the first or the second half of the depth."""
    of_words, half = words(np.ascontiguousarray(b.T), kind), DEPTH[kind] // (2 if kind == "tf32" else 4)
    return [np.array([of_words[lane // 4, lane % 4 + half * i] for lane in range(32)]) for i in range(2)]


@pytest.mark.parametrize("kind", DEPTH)
def test_a_product_of_a_warp(kind):
    depth = DEPTH[kind]
    a, b = (rounded(RANDOM.standard_normal(shape).astype(np.float32), kind) for shape in ((16, depth), (depth, 8)))
    given = {f"%r{10 + i}": v for i, v in enumerate(left_registers(a, kind))}
    given |= {f"%r{20 + i}": v for i, v in enumerate(right_registers(b, kind))}
    given |= {f"%r{30 + i}": np.full(32, i, np.float32) for i in range(4)}
    places = {"d": (2, 4), "left": (10, 4), "right": (20, 2), "c": (30, 4)}
    operands = ", ".join(braces(first, count) for first, count in places.values())
    types = f"m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"
    found = run(f"mma.sync.aligned.{types} {operands};", given=given)
    expected = a.astype(np.float64) @ b
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
            assert found[f"%r{2 + i}"].view(np.float32)[lane] == np.float32(expected[row, column] + i)


def test_tf32_reads_no_last_bits():
    one = np.array([1 + 2**-11 + 2**-23], np.float32)  # the last bit of TF32 is 2^-10
    given = {f"%r{10 + i}": np.full(32, one if i == 0 else 0, np.float32) for i in range(4)}
    given |= {f"%r{20 + i}": np.full(32, 1 if i == 0 else 0, np.float32) for i in range(2)}
    given |= {f"%r{30 + i}": np.zeros(32, np.float32) for i in range(4)}
    operands = "{%r2, %r3, %r4, %r5}, {%r10, %r11, %r12, %r13}, {%r20, %r21}, {%r30, %r31, %r32, %r33}"
    code = f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {operands};"
    assert (run(code, given=given)["%r2"].view(np.float32) == 4).all()


SIZES = {"tf32": 4, "bf16": 2, "f16": 2}


def stored(matrix: np.ndarray, kind: str, row_bytes: int, blocks_apart: int, halves_apart: int) -> dict[int, int]:
    """Words by their offset in shared memory: rows of `row_bytes`, of which chunks of 16 bytes are exchanged.

    With rows of 128, 64 and 32 bytes, the number of the chunk is combined with bits 7 to 9, 7 and 8, or 7 of the
    offset by exclusive or. With rows of 16 bytes (no exchange), the second half of the depth is `halves_apart` on.
    """
    found = {}
    for row, values in enumerate(words(matrix, kind)):
        for k, word in enumerate(values.tolist()):
            offset = row // 8 * blocks_apart + row % 8 * row_bytes + 4 * k
            if row_bytes == 16:
                offset = row // 8 * blocks_apart + row % 8 * 16 + k // 4 * halves_apart + k % 4 * 4
            chunk = offset // 16 % 8 ^ (offset // 128 % 8 & row_bytes // 16 - 1)
            found[offset // 128 * 128 + chunk * 16 + offset % 16] = word
    return found


def descriptor(begin: int, row_bytes: int, blocks_apart: int, halves_apart: int) -> np.uint64:
    mode = {16: 0, 128: 1, 64: 2, 32: 3}[row_bytes]
    return np.uint64(begin >> 4 | halves_apart >> 4 << 16 | blocks_apart >> 4 << 32 | mode << 62)


ACCUMULATORS = braces(40, 8)
FENCED = "fence.proxy.async.shared::cta; wgmma.fence.sync.aligned;"
END = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def product_of_four_warps(kind: str, row_bytes: int, before: str = FENCED, after: str = END, left_in_registers=False):
    """Run one product (64, 16). Returns what was run, and the expected result."""
    shapes = (64, DEPTH[kind]), (16, DEPTH[kind])
    a, b = (rounded(RANDOM.standard_normal(shape).astype(np.float32), kind) for shape in shapes)
    layout = (row_bytes, 8 * row_bytes if row_bytes > 16 else 256, 128)
    content = stored(a, kind, *layout) | {8192 + at: word for at, word in stored(b, kind, *layout).items()}
    shared = np.zeros(4096, np.uint32)
    for at, word in content.items():
        shared[at // 4] = word
    fill = "shl.b32 %r2, %r1, 2; add.s32 %r3, %r2, 1024; cvt.u64.u32 %rd3, %r2; add.s64 %rd3, %rd3, %rd1;"
    for k in range(0, 16384, 512):
        fill += f"ld.global.b32 %r4, [%rd3 + {k}]; st.shared.b32 [%r3 + {k}], %r4;"
    given = {"%rd4": descriptor(1024, *layout), "%rd5": descriptor(1024 + 8192, *layout)}
    given |= {f"%r{40 + i}": np.ones(128, np.float32) for i in range(8)} | {"%p3": np.True_}
    left = "%rd4"
    if left_in_registers:
        registers = [np.concatenate(w) for w in zip(*(left_registers(a, kind, 16 * w) for w in range(4)), strict=True)]
        given |= {f"%r{10 + i}": values for i, values in enumerate(registers)}
        left = "{%r10, %r11, %r12, %r13}"
    transposed = "" if kind == "tf32" else ", 0" if left_in_registers else ", 0, 0"
    types = f"m64n16k{DEPTH[kind]}.f32.{kind}.{kind}"
    multiply = f"wgmma.mma_async.sync.aligned.{types} {ACCUMULATORS}, {left}, %rd5, %p3, 1, 1{transposed};"
    found = run(f"{fill} bar.sync 0; {before} {multiply} {after}", [shared], threads=128, shared=16384, given=given)
    return found, a.astype(np.float64) @ b.T + 1


@pytest.mark.parametrize("left_in_registers", [False, True])
@pytest.mark.parametrize("row_bytes", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", DEPTH)
def test_an_asynchronous_product_in_every_layout(kind, row_bytes, left_in_registers):
    found, expected = product_of_four_warps(kind, row_bytes, left_in_registers=left_in_registers)
    assert not found.findings
    for thread in range(128):
        for i in range(8):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
            column = i // 4 * 8 + 2 * (thread % 4) + i % 2
            assert found[f"%r{40 + i}"].view(np.float32)[thread] == np.float32(expected[row, column])


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("wgmma.fence.sync.aligned;", END, "product of memory without a fence"),
        ("fence.proxy.async.shared::cta; add.f32 %r41, %r41, %r41;", END, "product of registers without a fence"),
        ("fence.proxy.async.shared::cta;", END, "first product without a fence"),
        (FENCED, f"add.f32 %r9, %r41, %r41; {END}", "register of a product that has not ended"),
        (FENCED, f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; mov.b32 %r41, 0; {END}",
         "register of a product that has not ended"),
        (FENCED, f"st.shared.b32 [%r3], %r1; {END}", "write to a factor of a product that has not ended"),
        (FENCED, f"{END} st.shared.b32 [%r3], %r1;", "write after read"),
    ],
)  # fmt: skip
def test_what_an_asynchronous_product_still_uses_is_watched(before, after, kind):
    assert kind in product_of_four_warps("tf32", 128, before, after)[0].kinds


def test_memory_may_be_written_after_the_wait_and_a_barrier():
    assert not product_of_four_warps("tf32", 128, FENCED, f"{END} bar.sync 0; st.shared.b32 [%r3], %r1;")[0].kinds


def test_memory_that_was_written_after_the_last_barrier_may_not_be_read():
    before = f"st.shared.b32 [%r3], %r1; {FENCED}"
    assert product_of_four_warps("tf32", 128, before)[0].kinds == {"read after write"}
