"""Each instruction of the emulator against the definition of the PTX ISA, on values at which it could go wrong."""

import re

import numpy as np
import pytest
import torch

from tests.emulator import arithmetic
from tests.emulator.snippets import run
from tests.emulator.values import to_bfloat16

INF, NAN, ULP = np.inf, np.nan, 2.0**-23
F, I, U, L, M = np.float32, np.int32, np.uint32, np.int64, np.uint64
TINY = 2.0**-149  # the smallest subnormal number


def pair(low: float, high: float) -> np.ndarray:
    return np.array([low, high], F).view(M)[0]


CASES = [  # opcode, sources, result
    ("add.s32", (I(2**31 - 1), I(1)), I(-(2**31))),
    ("add.s64", (L(2**63 - 1), L(1)), L(-(2**63))),
    ("add.f32", (F(1), F(ULP / 2)), F(1)),  # a tie goes to even
    ("add.f32", (F(1 + ULP), F(ULP / 2)), F(1 + 2 * ULP)),
    ("add.f32", (F(TINY), F(TINY)), F(2 * TINY)),
    ("add.f32", (F(INF), F(-INF)), F(NAN)),
    ("sub.s32", (I(-(2**31)), I(1)), I(2**31 - 1)),
    ("sub.f32", (F(0), F(0)), F(0)),
    ("mul.f32", (F(2**100), F(2**100)), F(INF)),
    ("mul.f32", (F(-1), F(0)), F(-0.0)),
    ("add.f32x2", (pair(1, 2), pair(0.5, -2)), pair(1.5, 0)),
    ("sub.f32x2", (pair(1, 2), pair(0.5, -2)), pair(0.5, 4)),
    ("mul.f32x2", (pair(3, 2), pair(0.5, -2)), pair(1.5, -4)),
    ("fma.rn.f32x2", (pair(3, 2), pair(0.5, -2), pair(1, 1)), pair(2.5, -3)),
    ("mul.lo.s32", (I(2**16), I(2**16 + 1)), I(2**16)),
    ("mul.lo.s64", (L(2**40), L(2**30)), L(0)),
    ("mul.wide.s32", (I(-(2**31)), I(2)), L(-(2**32))),
    ("mul.wide.u32", (U(2**32 - 1), U(2**32 - 1)), M((2**32 - 1) ** 2)),
    ("mad.lo.s32", (I(2**16), I(2**16), I(-1)), I(-1)),
    ("mad.lo.s64", (L(-3), L(4), L(5)), L(-7)),
    ("mad.wide.s32", (I(-(2**31)), I(2), L(1)), L(-(2**32) + 1)),
    ("mad.wide.u32", (U(2**32 - 1), U(2), M(1)), M(2**33 - 1)),
    ("fma.rn.f32", (F(1 + 2**-12), F(1 + 2**-12), F(2**-60)), F(1 + 2**-11 + ULP)),  # just above a tie
    ("fma.rn.f32", (F(1 + 2**-12), F(1 + 2**-12), F(-(2**-60))), F(1 + 2**-11)),  # just below it
    ("fma.rn.f32", (F(1 + 2**-12), F(1 + 2**-12), F(0)), F(1 + 2**-11)),
    ("fma.rn.f32", (F(2**100), F(2**100), F(-INF)), F(-INF)),
    ("fma.rn.f32", (F(INF), F(0), F(1)), F(NAN)),
    ("fma.rn.f32", (F(1 + ULP), F(1 - ULP), F(-1)), F(-(2**-46))),
    ("neg.f32", (F(0),), F(-0.0)),
    ("neg.s32", (I(-(2**31)),), I(-(2**31))),
    ("abs.f32", (F(-0.0),), F(0)),
    ("max.s32", (I(-1), I(0)), I(0)),
    ("max.u32", (U(2**32 - 1), U(0)), U(2**32 - 1)),
    ("min.s64", (L(-1), L(0)), L(-1)),
    ("max.f32", (F(NAN), F(-1)), F(-1)),
    ("min.f32", (F(NAN), F(NAN)), F(NAN)),
    ("div.full.f32", (F(1), F(0)), F(INF)),
    ("div.full.f32", (F(0), F(0)), F(NAN)),
    ("sqrt.approx.ftz.f32", (F(TINY),), F(0)),
    ("sqrt.approx.f32", (F(-1),), F(NAN)),
    ("rcp.approx.ftz.f32", (F(-0.0),), F(-INF)),
    ("rsqrt.approx.f32", (F(0),), F(INF)),
    ("ex2.approx.f32", (F(-INF),), F(0)),
    ("ex2.approx.f32", (F(129),), F(INF)),
    ("setp.lt.f32", (F(NAN), F(1)), False),
    ("setp.ge.f32", (F(1), F(NAN)), False),
    ("setp.ne.f32", (F(NAN), F(NAN)), False),
    ("setp.eq.f32", (F(0), F(-0.0)), True),
    ("setp.lt.s32", (I(-1), I(0)), True),
    ("setp.lt.u32", (U(2**32 - 1), U(0)), False),
    ("setp.gt.s64", (L(2**40), L(2**31)), True),
    ("setp.le.u64", (M(2**63), M(1)), False),
    ("setp.eq.b32", (U(7), U(7)), True),
    ("selp.b32", (U(1), U(2), True), U(1)),
    ("selp.f32", (F(1), F(2), False), F(2)),
    ("and.b32", (U(12), U(10)), U(8)),
    ("or.b64", (M(2**40), M(1)), M(2**40 + 1)),
    ("xor.b32", (U(12), U(10)), U(6)),
    ("and.pred", (True, False), False),
    ("not.b32", (U(0),), U(2**32 - 1)),
    ("not.pred", (True,), False),
    ("shl.b32", (U(3), U(31)), U(2**31)),
    ("shl.b32", (U(3), U(32)), U(0)),  # not modulo the width, as a processor would
    ("shl.b64", (M(1), U(63)), M(2**63)),
    ("shr.u32", (U(2**31), U(40)), U(0)),
    ("shr.s32", (I(-8), U(40)), I(-1)),
    ("shr.s64", (L(-8), U(1)), L(-4)),
    ("bfe.u32", (U(0b110100), U(2), U(3)), U(0b101)),
    ("bfe.u32", (U(2**32 - 1), U(28), U(9)), U(15)),
    ("bfe.s32", (I(0b110100), U(2), U(3)), I(-3)),
    ("bfe.s32", (I(2**31 - 1), U(0), U(0)), I(0)),
    ("bfe.s32", (I(-(2**31)), U(30), U(5)), I(-2)),
    ("cvt.s64.s32", (I(-1),), L(-1)),
    ("cvt.u64.u32", (U(2**32 - 1),), M(2**32 - 1)),
    ("cvt.u32.u64", (M(2**32 + 5),), U(5)),
    ("cvt.rn.f32.s32", (I(2**24 + 1),), F(2**24)),
    ("cvt.rn.f32.s32", (I(2**24 + 3),), F(2**24 + 4)),
    ("cvt.rn.f32.u32", (U(2**32 - 1),), F(2**32)),
    ("cvt.rn.bf16x2.f32", (F(1), F(2)), U(0x3F804000)),  # the first is the upper half
    ("cvt.rn.bf16.f32", (F(1 + 2**-8),), np.uint16(0x3F80)),  # a tie goes to even
    ("cvt.rn.bf16.f32", (F(1 + 3 * 2**-8),), np.uint16(0x3F82)),
    ("cvt.rna.tf32.f32", (F(1 + 2**-12),), U(0x3F800000)),
    ("cvt.rna.tf32.f32", (F(-1 - 2**-11),), U(0xBF802000)),  # a tie goes away from zero
    ("cvt.rna.tf32.f32", (F(np.nan),), U(0x7FFFFFFF)),
    ("cvt.f32.bf16", (np.uint16(0x3F81),), F(1 + 2**-7)),
]  # fmt: skip


def register(value: object, number: int) -> str:
    size = 0 if isinstance(value, bool) else np.asarray(value).dtype.itemsize
    return {0: "%p", 2: "%rs", 4: "%r", 8: "%rd"}[size] + str(number)


def result(opcode: str, sources: tuple, expected: object) -> np.ndarray:
    """The result of an instruction on the same values in all threads, as the type of `expected`."""
    given = {register(value, 3 + i): np.asarray(value) for i, value in enumerate(sources)}
    to = register(expected, 8)
    found = run(f"{opcode} {', '.join([to, *given])};", given=given)[to]
    assert found.shape == (32,) and len(set(found.tolist())) == 1
    return found[:1].view(np.asarray(expected).dtype)


@pytest.mark.parametrize(("opcode", "sources", "expected"), CASES)
def test_a_value_is_what_the_isa_says(opcode, sources, expected):
    with np.errstate(all="ignore"):
        found, expected = result(opcode, sources, expected), np.asarray([expected])
    if found.dtype == F and np.isnan(expected[0]):
        assert np.isnan(found[0])
    else:
        assert found.tobytes() == expected.tobytes(), (found, expected)


def test_every_instruction_that_computes_is_tested():
    tested = {opcode for opcode, *_ in CASES}
    assert [r.pattern for r in arithmetic.RULES if not any(re.fullmatch(r.pattern, name) for name in tested)] == []


@pytest.mark.parametrize("opcode", ["mul.hi.s32", "add.rz.f32", "cvt.rz.tf32.f32", "add.sat.s32", "tcgen05.ld.x2.b32"])
def test_an_unknown_instruction_is_an_error_that_names_it(opcode):
    with pytest.raises(NotImplementedError, match=re.escape(opcode)):
        run(f"{opcode} %r2, %r3, %r4;", given=dict.fromkeys(("%r3", "%r4"), U(0)))


@pytest.mark.parametrize(
    ("opcode", "exact", "bound"),
    [
        ("div.full.f32", lambda a, b: a / b, 2),
        ("sqrt.approx.f32", lambda a: np.sqrt(a), 1),
        ("rcp.approx.f32", lambda a: 1 / a, 1.1),
        ("rsqrt.approx.f32", lambda a: 1 / np.sqrt(a), 1.1),
        ("ex2.approx.f32", lambda a: np.exp2(a), 2),
    ],
)
def test_an_approximate_instruction_errs_as_much_as_it_may(opcode, exact, bound):
    values = np.random.default_rng(0).uniform(0.5, 4, (2, 512)).astype(F)
    given = {f"%r{3 + i}": v for i, v in enumerate(values[: exact.__code__.co_argcount])}
    found = run(f"{opcode} %r9, {', '.join(given)};", threads=512, given=given)["%r9"].view(F)
    true = exact(*(v.astype(np.float64) for v in given.values()))
    errors = np.abs(found - true) / true / ULP
    assert bound * 0.5 < errors.max() <= bound + 0.5  # half an ulp is from rounding
    again = run(f"{opcode} %r9, {', '.join(given)};", threads=512, given=given)["%r9"].view(F)
    assert (found == again).all()


def test_conversion_to_bfloat16_is_that_of_torch():
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    values = np.concatenate([bits.view(F), np.array([NAN, INF, -INF, 0, -0.0, TINY, 3.4e38], F)])
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(values)
    assert (to_bfloat16(values)[number] == expected[number]).all()
    assert (to_bfloat16(values)[~number] == 0x7FFF).all()


def test_immediates_have_the_type_of_the_instruction():
    code = """add.f32 %r2, %r9, 0fBF800000; add.s32 %r3, %r8, -1; mov.b64 %rd3, -2; mov.b32 %r4, 0x10;
              mov.b32 %r5, 0f40000000;"""
    found = run(code, given={"%r9": F(3), "%r8": I(0)})
    assert found["%r2"].view(F)[0] == 2 and found["%r3"].view(I)[0] == -1 and found["%rd3"].view(L)[0] == -2
    assert found["%r4"][0] == 16 and found["%r5"].view(F)[0] == 2


def test_a_guard_keeps_the_values_of_other_threads():
    code = "setp.lt.u32 %p1, %r1, 5; mov.u32 %r2, 7; @%p1 mov.u32 %r2, 8; @!%p1 add.s32 %r2, %r2, 1;"
    assert (run(code)["%r2"] == 8).all()
    assert (
        run("setp.eq.b32 %p1, %r1, 3; mov.u32 %r2, 7; @%p1 mov.u32 %r2, 8;")["%r2"].tolist() == [7] * 3 + [8] + [7] * 28
    )


def test_registers_are_split_and_joined_from_the_lowest_half():
    found = run("mov.b64 %rd3, {%r1, %r2}; mov.b64 {%r3, %r4}, %rd3;", given={"%r2": U(9)})
    assert (found["%rd3"] == np.arange(32) + (9 << 32)).all()
    assert (found["%r3"] == np.arange(32)).all() and (found["%r4"] == 9).all()


def test_shuffles_stay_within_a_warp():
    found = run("shfl.sync.bfly.b32 %r2, %r1, 16, 31, -1; shfl.sync.idx.b32 %r3, %r1, 35, 31, -1;", threads=64)
    thread = np.arange(64)
    assert (found["%r2"] == (thread ^ 16)).all()
    assert (found["%r3"] == thread // 32 * 32 + 3).all()


def test_a_register_without_a_value_is_an_error():
    with pytest.raises(Exception, match="%r7 has no value"):
        run("add.s32 %r2, %r7, 1;")
