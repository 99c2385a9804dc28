"""Damage to the order in kernels: where barriers are moved, and that it is noticed."""

import numpy as np
import pytest

from tests.emulator.orders import Damage, damages, traced, without
from tests.emulator.snippets import run

ADDRESSES = "shl.b32 %r2, %r1, 2; add.s32 %r2, %r2, 1024; xor.b32 %r3, %r2, 4; xor.b32 %r5, %r2, 128;"
EXCHANGE = f"{ADDRESSES} st.shared.b32 [%r2], %r1; {{}} ld.shared.b32 %r4, [{{}}];"
COPY = f"""{ADDRESSES} cvt.u64.u32 %rd3, %r1; shl.b64 %rd3, %rd3, 2; add.s64 %rd3, %rd3, %rd1;
           cp.async.ca.shared.global [%r2], [%rd3], 4; cp.async.commit_group; cp.async.wait_group 0;
           ld.shared.b32 %r4, [%r2];"""


def all_damage(code: str) -> list[Damage]:
    with traced() as trace:
        found = run(code, [np.arange(64, dtype=np.uint32)], threads=64)
    assert not found.findings
    return list(damages(found.kernel, trace))


def kinds(code: str, damage: Damage) -> set[str]:
    """What is found in the damaged code."""
    return run(code, [np.arange(64, dtype=np.uint32)], threads=64, edit=lambda kernel: damage.kernel).kinds


@pytest.mark.parametrize(
    ("barrier", "partner"), [("bar.sync 0;", "%r3"), ("bar.sync 0;", "%r5"), ("bar.warp.sync -1;", "%r3")]
)
def test_a_barrier_between_two_threads_is_deleted_and_moved_in_both_directions_and_noticed(barrier, partner):
    code = EXCHANGE.format(barrier, partner)
    found = all_damage(code)
    assert [damage.change for damage in found] == ["deleted", "earlier", "later"]
    assert all(kinds(code, damage) == {"read after write"} for damage in found)


def test_a_barrier_that_orders_nothing_is_not_moved_and_its_deletion_not_noticed():
    code = EXCHANGE.format("bar.sync 0;", "%r2")  # each thread reads its own word
    (damage,) = all_damage(code)
    assert damage.change == "deleted" and not kinds(code, damage)


def test_a_barrier_is_moved_past_the_nearest_instruction_with_which_the_order_changes():
    """The store of 9 and the load of a thread's own word do not count."""
    code = f"""{ADDRESSES} st.shared.b32 [%r2], %r1; st.shared.b32 [%r2 + 2048], 9; bar.sync 0;
               ld.shared.b32 %r4, [%r2]; ld.shared.b32 %r6, [%r5];"""
    _, earlier, later = all_damage(code)
    orders = [[i.opcode.split(".")[0] for i in damage.kernel.instructions[-6:-1]] for damage in (earlier, later)]
    assert orders == [["bar", "st", "st", "ld", "ld"], ["st", "st", "ld", "ld", "bar"]]


def test_a_wait_for_a_copy_is_deleted_and_moved_and_noticed():
    found = all_damage(COPY)
    assert [damage.change for damage in found] == ["deleted", "earlier", "later"]
    late = {"read of a copy that has not arrived"}
    assert all(kinds(COPY, damage) == late for damage in found if damage.change == "later")


def test_a_branch_still_leads_to_its_target_when_an_instruction_before_it_is_deleted():
    code = """mov.u32 %r2, 0;\nbar.sync 0;\n$L__BB0_1:\nadd.s32 %r2, %r2, 1;\nsetp.lt.s32 %p1, %r2, 5;
              \n@%p1 bra $L__BB0_1;"""

    def edit(kernel):
        return without(kernel, [i.opcode for i in kernel.instructions].index("bar.sync"))

    assert (run(code, edit=edit)["%r2"] == 5).all()
