"""Operations on a block of J units for the whole batch, which the Triton kernels of all recurrences share.

A batch that is larger than a tile is processed tile by tile. `at` points to rows of `row` elements; `columns` are the
columns of the block, and `valid` masks those that exist. The first `count` rows are normalized and counted.

A pointer may be None. It is advanced by a conditional expression in place: Triton 3.6 accepts no function that returns
None.
"""

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def moments(at, row, columns, valid, count, B: tl.constexpr, TILE: tl.constexpr, J: tl.constexpr):
    """Mean and biased variance over the first `count` rows, in two passes."""
    total = tl.zeros([J], tl.float32)
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < count)[:, None] & valid[None, :]
        total += tl.sum(tl.load(at + rows[:, None] * row + columns[None, :], mask=mask, other=0.0), axis=0)
    mean = total / count
    squares = tl.zeros([J], tl.float32)
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < count)[:, None] & valid[None, :]
        v = tl.load(at + rows[:, None] * row + columns[None, :], mask=mask, other=0.0)
        d = tl.where(mask, v - mean[None, :], 0.0)
        squares += tl.sum(d * d, axis=0)
    return mean, squares / count


@no_type_check
@triton.jit
def statistics(at, row, columns, valid, count, means, vars, eps, BATCH: tl.constexpr, B: tl.constexpr,
                TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Mean and 1 / sqrt(var + eps). If BATCH, compute the statistics from the batch and store them; else load them."""
    if BATCH:
        mean, var = moments(at, row, columns, valid, count, B, TILE, J)
        tl.store(means + columns, mean, mask=valid)
        tl.store(vars + columns, var, mask=valid)
    else:
        mean = tl.load(means + columns, mask=valid, other=0.0)
        var = tl.load(vars + columns, mask=valid, other=1.0)
    return mean, 1.0 / tl.sqrt(var + eps)


@no_type_check
@triton.jit
def standardize(at, row, columns, valid, count, means, vars, eps, BATCH: tl.constexpr, B: tl.constexpr,
                 TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Normalize the first `count` rows in place."""
    mean, rstd = statistics(at, row, columns, valid, count, means, vars, eps, BATCH, B, TILE, J)
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < count)[:, None] & valid[None, :]
        here = at + rows[:, None] * row + columns[None, :]
        tl.store(here, (tl.load(here, mask=mask, other=0.0) - mean[None, :]) * rstd[None, :], mask=mask)


@no_type_check
@triton.jit
def lowered(x, LOW: tl.constexpr, WIDEN: tl.constexpr):
    x = x.to(LOW)
    return x.to(tl.float32) if WIDEN else x  # the interpreter cannot multiply bfloat16


@no_type_check
@triton.jit
def tanh(x):
    s = x * x  # near 0 use a polynomial (Cephes tanhf): 2 sigmoid(2x) - 1 would lose the digits of a small result
    p = (((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1) * s
    return tl.where(s < 0.390625, x + x * s * (p - 3.33332819422e-1), 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@no_type_check
@triton.jit
def product_tile(left, row, rows, running, right, right_row, right_column, columns, valid, DEPTH: tl.constexpr,
                 J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """A tile of left @ right: the given `rows`, where rows from `running` on are treated as 0, and J `columns`."""
    total = tl.zeros([TILE, J], tl.float32)
    for k in range(0, DEPTH, K):
        depth = k + tl.arange(0, K)
        a = tl.load(left + rows[:, None] * row + depth[None, :],
                    mask=(rows < running)[:, None] & (depth < DEPTH)[None, :], other=0.0)  # fmt: skip
        b = tl.load(right + depth[:, None] * right_row + columns[None, :] * right_column,
                    mask=(depth < DEPTH)[:, None] & valid[None, :], other=0.0)  # fmt: skip
        total += tl.dot(lowered(a, LOW, WIDEN), lowered(b, LOW, WIDEN), input_precision=PRECISION)
    return total


@no_type_check
@triton.jit
def add(pointer, columns, valid, value):
    tl.store(pointer + columns, tl.load(pointer + columns, mask=valid, other=0.0) + value, mask=valid)


@no_type_check
@triton.jit
def norm_terms(at, da, row, columns, valid, count, gamma, dgamma, var, eps, BATCH: tl.constexpr, B: tl.constexpr,
               TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """gamma rstd, m(da) and m(da at), for normalized values `at` and the gradient `da` of their scaled values.

    m() is the mean over the batch. With population statistics, no gradient flows through them, so both means are 0.
    Adds to dgamma.
    """
    mean, mean_v = tl.zeros([J], tl.float32), tl.zeros([J], tl.float32)
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < count)[:, None] & valid[None, :]
        here = rows[:, None] * row + columns[None, :]
        d = tl.load(da + here, mask=mask, other=0.0)
        mean += tl.sum(d, axis=0)
        mean_v += tl.sum(d * tl.load(at + here, mask=mask, other=0.0), axis=0)
    add(dgamma, columns, valid, mean_v)
    scale = tl.load(gamma + columns, mask=valid, other=0.0)
    scale /= tl.sqrt(tl.load(var + columns, mask=valid, other=1.0) + eps)
    inverse = 1.0 / count if BATCH else 0.0
    return scale, mean * inverse, mean_v * inverse


@no_type_check
@triton.jit
def through_norm(at, da, row, columns, valid, count, gamma, dgamma, var, eps, BATCH: tl.constexpr, B: tl.constexpr,
                 TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Overwrite normalized values with the gradient of the values before normalization; 0 after `count` rows."""
    scale, mean, mean_v = tl.full([J], 1.0, tl.float32), tl.zeros([J], tl.float32), tl.zeros([J], tl.float32)
    if gamma is not None:
        scale, mean, mean_v = norm_terms(at, da, row, columns, valid, count, gamma, dgamma, var, eps, BATCH, B, TILE, J)
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < count)[:, None] & valid[None, :]
        here = rows[:, None] * row + columns[None, :]
        d = tl.load(da + here, mask=mask, other=0.0)
        if gamma is not None:
            d = scale[None, :] * (d - mean[None, :] - tl.load(at + here, mask=mask, other=0.0) * mean_v[None, :])
        tl.store(at + here, tl.where(mask, d, 0.0), mask=(rows < B)[:, None] & valid[None, :])
