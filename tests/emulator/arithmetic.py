"""The instructions that compute a value from registers. Each is a function of arrays with one element a thread.

The table has a pattern of opcodes with all their modifiers. What no pattern matches is an error that names the opcode.
Numbers are those of sections of the PTX ISA 8.7. Left out: saturation, flushing of subnormal numbers (all instructions
here keep them), carries, and rounding other than to nearest even.

Approximate instructions get an error that looks random, as large as the ISA allows: nothing may rely on their last
bits.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from tests.emulator.values import TYPES, Array, approximately, fused_multiply_add, to_bfloat16

ULP = 2.0**-23


class Rule(NamedTuple):
    """How opcodes of a pattern compute: types of the sources, given the opcode's parts, and the function."""

    pattern: str
    sources: Callable[[list[str]], list[str]]
    compute: Callable[..., Array]


RULES: list[Rule] = []


def instruction(pattern: str, sources: int | Callable[[list[str]], list[str]] = 2) -> Callable:
    """Decorator of the function (parts of the opcode, *sources); a number of sources all have the opcode's type."""
    of = sources if callable(sources) else lambda parts: [parts[-1]] * sources

    def register(compute: Callable[..., Array]) -> Callable[..., Array]:
        RULES.append(Rule(pattern, of, compute))
        return compute

    return register


@cache
def rule(opcode: str) -> Rule | None:
    """The rule of an opcode, if it is one of these."""
    return next((r for r in RULES if re.fullmatch(r.pattern, opcode)), None)


INTEGER = r"([us](16|32|64))"
BITS = r"(b(16|32|64)|pred)"


@instruction(rf"(add|sub)\.({INTEGER}|f32)|mul\.f32")  # 9.7.1.1, 9.7.1.2, 9.7.3.3 to 9.7.3.5
def add(parts: list[str], a: Array, b: Array) -> Array:
    return {"add": np.add, "sub": np.subtract, "mul": np.multiply}[parts[0]](a, b)


@instruction(r"(add|sub|mul)\.f32x2")  # 9.7.3.3 to 9.7.3.5
def add_two(parts: list[str], a: Array, b: Array) -> Array:
    return add([parts[0]], a.view(np.float32), b.view(np.float32)).view(np.uint64)


@instruction(rf"mul\.lo\.{INTEGER}")  # 9.7.1.3
def multiply_low(parts: list[str], a: Array, b: Array) -> Array:
    return a * b


@instruction(r"mul\.wide\.[us](16|32)")  # 9.7.1.3
def multiply_wide(parts: list[str], a: Array, b: Array) -> Array:
    wide = TYPES[_twice(parts[-1])]
    return a.astype(wide) * b.astype(wide)


def _twice(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


@instruction(rf"mad\.lo\.{INTEGER}", 3)  # 9.7.1.4
def multiply_add_low(parts: list[str], a: Array, b: Array, c: Array) -> Array:
    return a * b + c


@instruction(r"mad\.wide\.[us](16|32)", lambda parts: [parts[-1], parts[-1], _twice(parts[-1])])  # 9.7.1.4
def multiply_add_wide(parts: list[str], a: Array, b: Array, c: Array) -> Array:
    return multiply_wide(parts, a, b) + c


@instruction(r"fma\.rn\.f32", 3)  # 9.7.3.6
def fused(parts: list[str], a: Array, b: Array, c: Array) -> Array:
    return fused_multiply_add(a, b, c)


@instruction(r"fma\.rn\.f32x2", 3)  # 9.7.3.6
def fused_two(parts: list[str], a: Array, b: Array, c: Array) -> Array:
    return fused_multiply_add(*(value.view(np.float32) for value in (a, b, c))).view(np.uint64)


@instruction(r"neg\.(s32|s64|f32)|abs\.(s32|f32)", 1)  # 9.7.1.10, 9.7.1.11, 9.7.3.9, 9.7.3.10
def negate(parts: list[str], a: Array) -> Array:
    return -a if parts[0] == "neg" else np.abs(a)


@instruction(rf"(min|max)\.({INTEGER}|f32)")  # 9.7.1.12, 9.7.1.13, 9.7.3.11, 9.7.3.12: a number, if one is NaN
def extreme(parts: list[str], a: Array, b: Array) -> Array:
    if parts[-1] == "f32":
        return {"min": np.fmin, "max": np.fmax}[parts[0]](a, b)
    return {"min": np.minimum, "max": np.maximum}[parts[0]](a, b)


@instruction(r"div\.full\.f32")  # 9.7.3.8: at most 2 ulp
def divide(parts: list[str], a: Array, b: Array) -> Array:
    return approximately(a.astype(np.float64) / b, 2 * ULP)


@instruction(r"sqrt\.approx(\.ftz)?\.f32", 1)  # 9.7.3.15: relative error of 2^-23
def square_root(parts: list[str], a: Array) -> Array:
    kept = np.where(np.abs(a) < np.finfo(np.float32).tiny, np.copysign(0, a), a) if "ftz" in parts else a
    return approximately(np.sqrt(kept.astype(np.float64)), ULP)


@instruction(r"(rcp|rsqrt)\.approx(\.ftz)?\.f32", 1)  # 9.7.3.13, 9.7.3.16: 1 ulp; relative error of 2^-22.9
def reciprocal(parts: list[str], a: Array) -> Array:
    value = a.astype(np.float64)
    return approximately(1 / (value if parts[0] == "rcp" else np.sqrt(value)), 2**0.1 * ULP)


@instruction(r"ex2\.approx(\.ftz)?\.f32", 1)  # 9.7.3.21: at most 2 ulp
def power_of_two(parts: list[str], a: Array) -> Array:
    return approximately(np.exp2(a.astype(np.float64)), 2 * ULP)


COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip


@instruction(rf"setp\.({'|'.join(COMPARE)})\.({INTEGER}|b(16|32|64)|f32)")  # 9.7.6.2: false if one is NaN, but `ne`
def compare(parts: list[str], a: Array, b: Array) -> Array:
    ordered = ~(np.isnan(a) | np.isnan(b)) if parts[-1] == "f32" else True
    return COMPARE[parts[1]](a, b) & ordered


@instruction(rf"selp\.({INTEGER}|b(16|32|64)|f32)", lambda parts: [parts[-1], parts[-1], "pred"])  # 9.7.6.3
def select(parts: list[str], a: Array, b: Array, first: Array) -> Array:
    return np.where(first, a, b)


@instruction(rf"(and|or|xor)\.{BITS}")  # 9.7.8.1 to 9.7.8.3
def logic(parts: list[str], a: Array, b: Array) -> Array:
    return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[parts[0]](a, b)


@instruction(rf"not\.{BITS}", 1)  # 9.7.8.4
def invert(parts: list[str], a: Array) -> Array:
    return ~a


@instruction(r"sh[lr]\.[bus](16|32|64)", lambda parts: [parts[-1], "u32"])  # 9.7.8.7, 9.7.8.8
def shift(parts: list[str], a: Array, count: Array) -> Array:
    width = 8 * a.dtype.itemsize
    if parts[0] == "shl":
        return np.where(count < width, a << np.minimum(count, width - 1).astype(a.dtype), a.dtype.type(0))
    kept = a >> np.minimum(count, width - 1).astype(a.dtype)
    return kept if parts[-1][0] == "s" else np.where(count < width, kept, a.dtype.type(0))


@instruction(r"bfe\.[us]32", lambda parts: [parts[-1], "u32", "u32"])  # 9.7.1.19
def extract(parts: list[str], a: Array, position: Array, length: Array) -> Array:
    position, length = position & np.uint32(0xFF), np.minimum(length & np.uint32(0xFF), np.uint32(32))
    wide = (a.astype(np.int64) >> np.minimum(position, 63).astype(np.int64)) & ((1 << length.astype(np.int64)) - 1)
    if parts[-1] == "u32":
        return wide.astype(np.uint32)
    last = np.minimum(position.astype(np.int64) + length - 1, 31)
    sign = (a.view(np.uint32) >> np.maximum(last, 0).astype(np.uint32)) & 1
    negative = (sign == 1) & (length > 0)
    return np.where(negative, wide | (-1 << length.astype(np.int64)), wide).astype(np.int32)


@instruction(r"cvt\.[usb](8|16|32|64)\.[usb](8|16|32|64)", 1)  # 9.7.9.21: the low bits, or extended with the sign
def convert(parts: list[str], a: Array) -> Array:
    return a.astype(TYPES[parts[1]])


@instruction(r"cvt\.rn\.f32\.[us](32|64)", 1)  # 9.7.9.21
def convert_to_float(parts: list[str], a: Array) -> Array:
    return a.astype(np.float32)


@instruction(r"cvt\.rn\.bf16x2\.f32")  # 9.7.9.21: the first source is the upper half
def convert_two(parts: list[str], upper: Array, lower: Array) -> Array:
    return to_bfloat16(upper).astype(np.uint32) << np.uint32(16) | to_bfloat16(lower).astype(np.uint32)


@instruction(r"cvt\.rn\.bf16\.f32", 1)  # 9.7.9.21
def convert_one(parts: list[str], a: Array) -> Array:
    return to_bfloat16(a)


@instruction(r"cvt\.rna\.tf32\.f32", 1)  # 9.7.9.21: to nearest, ties away from zero; the last 13 bits are then 0
def convert_to_tf32(parts: list[str], a: Array) -> Array:
    rounded = (a.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(a), np.uint32(0x7FFFFFFF), rounded)


@instruction(r"cvt\.f32\.bf16", lambda parts: ["b16"])  # 9.7.9.21
def widen(parts: list[str], a: Array) -> Array:
    return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)
