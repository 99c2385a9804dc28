"""What the emulator notices: bounds, alignment, conflicting accesses, copies that have not arrived, barriers."""

import numpy as np
import pytest

from tests.emulator.memory import Fault
from tests.emulator.snippets import run

ADDRESS = "shl.b32 %r2, %r1, 2; add.s32 %r2, %r2, 1024;"  # of a word of shared memory for each thread
NEXT = "xor.b32 %r3, %r2, {};"  # that of another thread: of the same warp with 4, of another with 128
GLOBAL = "cvt.u64.u32 %rd3, %r1; shl.b64 %rd3, %rd3, 2; add.s64 %rd3, %rd3, %rd1;"


def words(count: int = 64) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


def test_vectors_are_loaded_and_stored_in_order():
    data, to = words(128), words(128)
    code = """mul.wide.u32 %rd3, %r1, 16; add.s64 %rd4, %rd3, %rd1; add.s64 %rd5, %rd3, %rd2;
              ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd4 + 0];
              st.global.v2.b32 [%rd5 + 8], {%r5, %r2};"""
    found = run(code, [data, to])
    assert (found["%r4"] == 4 * np.arange(32) + 2).all()
    expected = words(128).reshape(32, 4)
    expected[:, 2], expected[:, 3] = expected[:, 3].copy(), expected[:, 0].copy()
    assert (to == expected.ravel()).all() and not found.findings


def test_narrow_values_are_extended_with_zeros():
    data = np.full(64, 0xFFFE, np.uint16)
    code = "shl.b32 %r2, %r1, 1; cvt.u64.u32 %rd3, %r2; add.s64 %rd3, %rd3, %rd1; ld.global.b16 %rs1, [%rd3];"
    assert (run(code, [data])["%rs1"] == 0xFFFE).all()


@pytest.mark.parametrize("offset", [-4, 4 * 64 - 124, 2**31])
def test_an_access_out_of_bounds_is_an_error_that_names_the_line(offset):
    with pytest.raises(Fault, match=r"(out of bounds|no array).*ld\.global\.b32"):
        run(f"{GLOBAL} ld.global.b32 %r2, [%rd3 + {offset}];", [words(), words()])


def test_a_masked_thread_accesses_nothing():
    found = run(f"{GLOBAL} setp.lt.u32 %p1, %r1, 20; mov.u32 %r2, 0; @%p1 ld.global.b32 %r2, [%rd3];", [words(20)])
    assert found["%r2"].tolist() == [*range(20), *[0] * 12]


@pytest.mark.parametrize(("access", "offset"), [("v4.b32", 4), ("v2.b32", 4), ("b32", 2), ("b64", 4)])
def test_a_misaligned_access_is_an_error(access, offset):
    registers = {"v4.b32": "{%r2, %r3, %r4, %r5}", "v2.b32": "{%r2, %r3}", "b32": "%r2", "b64": "%rd4"}[access]
    with pytest.raises(Fault, match="misaligned"):
        run(f"ld.global.{access} {registers}, [%rd1 + {offset}];", [words()])


@pytest.mark.parametrize("partner", [4, 128])  # in the same warp, in another
@pytest.mark.parametrize(
    ("barrier", "conflict"), [("", True), ("bar.sync 0;", False), ("bar.warp.sync -1;", "of another warp")]
)
def test_another_threads_word_may_be_read_only_after_a_barrier(partner, barrier, conflict):
    code = f"{ADDRESS} {NEXT.format(partner)} st.shared.b32 [%r2], %r1; {barrier} ld.shared.b32 %r4, [%r3];"
    found = run(code, threads=64)
    assert (found["%r4"] == np.arange(64) ^ partner // 4).all()
    expected = conflict is True or (conflict == "of another warp" and partner == 128)
    assert found.kinds == ({"read after write"} if expected else set())


@pytest.mark.parametrize("partner", [4, 128])
@pytest.mark.parametrize(
    ("barrier", "conflict"), [("", True), ("bar.sync 0;", False), ("bar.warp.sync -1;", "of another warp")]
)
def test_a_word_that_another_thread_has_read_may_be_written_only_after_a_barrier(partner, barrier, conflict):
    code = f"""{ADDRESS} {NEXT.format(partner)} st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r4, [%r3];
               {barrier} st.shared.b32 [%r2], 7;"""
    expected = conflict is True or (conflict == "of another warp" and partner == 128)
    assert run(code, threads=64).kinds == ({"write after read"} if expected else set())


def test_readers_of_several_warps_are_remembered():
    """All threads read word 0, and after a barrier of its warp thread 0 writes it."""
    code = """setp.eq.b32 %p1, %r1, 0; mov.u32 %r2, 1024; @%p1 st.shared.b32 [%r2], 3; bar.sync 0;
              ld.shared.b32 %r4, [%r2]; bar.warp.sync -1; @%p1 st.shared.b32 [%r2], 4;"""
    assert run(code, threads=64).kinds == {"write after read"}
    assert not run(code, threads=32).kinds


def test_threads_may_write_equal_values_but_not_different_ones():
    assert not run("mov.u32 %r2, 1024; st.shared.b32 [%r2], 5;").kinds
    assert run("mov.u32 %r2, 1024; st.shared.b32 [%r2], %r1;").kinds == {"threads write different values at once"}


def test_shared_memory_has_no_value_at_first():
    assert run(f"{ADDRESS} ld.shared.b32 %r4, [%r2];").kinds == {"read of memory without a value"}


def test_a_copy_that_was_not_waited_for_has_not_arrived():
    copy = f"{ADDRESS} {GLOBAL} cp.async.ca.shared.global [%r2 + 0], [%rd3 + 0], 0x4; cp.async.commit_group;"
    load, wait = "ld.shared.b32 %r4, [%r2];", "cp.async.wait_group 0;"
    found = run(copy + wait + load, [words()])
    assert (found["%r4"] == np.arange(32)).all() and not found.kinds
    for early in ("", "cp.async.wait_group 1;"):
        assert "read of a copy that has not arrived" in run(copy + early + load + wait, [words()]).kinds
    with pytest.raises(Fault, match="before a copy"):
        run(copy, [words()])


def test_a_copy_of_another_thread_needs_a_barrier_after_the_wait():
    def kinds(between: str) -> set[str]:
        copy = f"{ADDRESS} {NEXT.format(4)} {GLOBAL} cp.async.ca.shared.global [%r2 + 0], [%rd3 + 0], 0x4;"
        return run(f"{copy} cp.async.commit_group; {between} ld.shared.b32 %r4, [%r3];", [words()]).kinds

    wait, barrier = "cp.async.wait_group 0;", "bar.sync 0;"
    assert kinds(wait) == kinds(barrier + wait) == {"read after write"}
    assert not kinds(wait + barrier)


def test_a_copy_of_size_zero_writes_zeros_and_reads_nothing():
    code = f"""{ADDRESS} {GLOBAL} setp.lt.u32 %p1, %r1, 4; selp.b32 %r5, 4, 0, %p1;
               cp.async.ca.shared.global [%r2 + 0], [%rd3 + 0], 0x4, %r5; cp.async.commit_group;
               cp.async.wait_group 0; ld.shared.b32 %r4, [%r2];"""
    assert run(code, [words(4)])["%r4"].tolist() == [0, 1, 2, 3, *[0] * 28]


def test_a_barrier_that_some_threads_miss_is_an_error():
    code = "setp.lt.u32 %p1, %r1, 32; @%p1 bra $end; bar.sync 0; $end:"
    with pytest.raises(Fault, match="barrier"):
        run(code.replace("$end:", "\n$end:\n"), threads=64, warps=1)
    with pytest.raises(Fault, match="only some threads"):
        run(code.replace("$end:", "\n$end:\n"), threads=64)


COUNTED = """
setp.eq.b32 %p1, %r1, 0; mov.u32 %r5, %ctaid.x; shl.b32 %r6, %r5, 7; cvt.u64.u32 %rd4, %r6; add.s64 %rd5, %rd3, %rd4;
xor.b32 %r6, %r6, 128; cvt.u64.u32 %rd4, %r6; add.s64 %rd6, %rd3, %rd4;
st.global.b32 [%rd5], %r5; {release} @%p1 atom.global.gpu.acq_rel.add.u32 %r8, [%rd2 + 0], 1;
$wait:
@%p1 atom.global.gpu.acq_rel.add.u32 %r8, [%rd2 + 0], 0; mov.u32 %r9, 1024;
@%p1 st.shared.b32 [%r9], %r8; bar.sync 0; ld.shared.b32 %r8, [%r9]; bar.sync 0;
setp.lt.u32 %p2, %r8, {target}; @%p2 bra $wait;
xor.b32 %r7, %r1, 1; ld.global.b32 %r10, [%rd6];
"""  # each block writes 32 words, waits for the other block, and reads the other's words


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("delayed", [-1, 0, 1])
def test_blocks_see_what_others_wrote_before_a_counter(seed, delayed):
    code = GLOBAL + COUNTED.format(release="bar.sync 0;", target=2)
    counter = np.zeros(4, np.uint32)
    found = run(code, [words(), counter], blocks=2, seed=seed, delayed=delayed)
    assert not found.kinds and counter[0] == 2
    assert found["%r10"].tolist() == [1] * 32 + [0] * 32


@pytest.mark.parametrize(("release", "target"), [("", 2), ("bar.sync 0;", 1)])
def test_blocks_conflict_without_a_barrier_before_the_counter_or_without_waiting(release, target):
    code = GLOBAL + COUNTED.format(release=release, target=target)
    kinds = set[str]()
    for seed in range(4):
        kinds |= run(code, [words(), np.zeros(4, np.uint32)], blocks=2, seed=seed).kinds
    assert kinds & {"read after write", "write after read"}


def test_blocks_that_write_the_same_word_conflict():
    found = run(f"{GLOBAL} mov.u32 %r5, %ctaid.x; st.global.b32 [%rd3], %r5;", [words()], blocks=2)
    assert found.kinds == {"write after write"}


def test_atomic_sums_of_one_block_need_no_barrier_between_its_threads():
    data = np.zeros(32, np.float32)
    run(f"{GLOBAL} atom.global.gpu.relaxed.add.f32 %r5, [%rd3 + 0], 0f40000000;", [data])
    assert (data == 2).all()


def test_matrices_of_shared_memory_have_the_order_of_the_isa():
    """Row r of matrix j is at the address of thread 8 j + r; thread t gets the elements 2 (t % 4) of row t // 4."""
    rows = "shl.b32 %r2, %r1, 4; add.s32 %r2, %r2, 1024;"
    fill = "".join(f"add.s32 %r4, %r5, {k}; st.shared.b16 [%r2 + {2 * k}], %rs{k % 8};" for k in range(8))
    prepare = "".join(f"cvt.u16.u32 %rs{k}, %r5; add.s32 %r5, %r5, 1;" for k in range(8))
    store = f"{rows} shl.b32 %r5, %r1, 3; {prepare} {fill} bar.sync 0;"
    load = "ldmatrix.sync.aligned.m8n8.x4%s.shared.b16 {%%r6, %%r7, %%r8, %%r9}, [%%r2];"
    lane = np.arange(32)
    found, turned = run(store + load % ""), run(store + load % ".trans")
    for j, name in enumerate(("%r6", "%r7", "%r8", "%r9")):
        low, high = found[name] & 0xFFFF, found[name] >> 16
        assert (low == 64 * j + lane // 4 * 8 + 2 * (lane % 4)).all() and (high == low + 1).all()
        low, high = turned[name] & 0xFFFF, turned[name] >> 16
        assert (low == 64 * j + 2 * (lane % 4) * 8 + lane // 4).all() and (high == low + 8).all()
    back = "bar.sync 0; stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2+512], {%r6, %r7, %r8, %r9}; bar.sync 0;"
    again = run(store + load % "" + back + "ld.shared.b16 %rs1, [%r2+518];")
    assert (again["%rs1"] == 8 * lane + 3).all()
