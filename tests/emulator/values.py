"""Numbers as PTX has them in registers, in numpy arrays with one element for each thread.

A register holds bits: an unsigned integer of its width, or a boolean for a predicate. An instruction looks at them as
the type that it names (PTX ISA, section 5.2).
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray
TYPES = {"pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
         "s16": np.int16, "f16": np.float16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
         "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "f32x2": np.uint64,
         "bf16x2": np.uint32}  # fmt: skip
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(values: Array) -> Array:
    """The bits of values, as a register has them."""
    return values if values.dtype == np.bool_ else values.view(UNSIGNED[values.dtype.itemsize])


def immediate(text: str, kind: str, count: int) -> Array:
    """A constant of the program, for `count` threads (section 4.5)."""
    dtype = np.dtype(TYPES[kind])
    if text[:2].lower() in ("0f", "0d"):
        return np.full(count, int(text[2:], 16), UNSIGNED[4 if text[1].lower() == "f" else 8]).view(dtype)
    value = int(text, 0)
    if dtype == np.bool_:
        return np.full(count, value != 0)
    return np.full(count, value % (1 << 8 * dtype.itemsize), UNSIGNED[dtype.itemsize]).view(dtype)


def to_bfloat16(values: Array) -> Array:
    """The upper 16 bits of float32, rounded to nearest even; NaN is 0x7FFF."""
    v = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((v + 0x7FFF + ((v >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def from_bfloat16(values: Array) -> Array:
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def truncated_to_tf32(values: Array) -> Array:
    """float32 as the tensor cores read it for TF32: without its last 13 bits, which the ISA leaves undefined."""
    return (bits(values) & np.uint32(0xFFFFE000)).view(np.float32)


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """a b + c in float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there, so that rounding it to float32 is as if it were
    exact (Boldo and Melquiond 2008).
    """
    with np.errstate(all="ignore"):
        product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = product + c
        shifted = total - product
        rest = (product - (total - shifted)) + (c - shifted)
        even = (np.isfinite(total) & (rest != 0)) & (total.view(np.int64) & 1 == 0)
        away = np.where((rest > 0) == (total > 0), 1, -1)
        return (total.view(np.int64) + np.where(even, away, 0)).view(np.float64).astype(np.float32)


def approximately(exact: Array, error: float) -> Array:
    """float32 of float64 values, with a relative error of up to `error`, as approximate instructions may have.

    The same value always has the same error, which looks random.
    """
    mixed = (exact.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    with np.errstate(all="ignore"):
        return (exact * (1 + error * (mixed / 2.0**31 - 1))).astype(np.float32)
