"""Operations on register tiles, which the Triton kernels of all recurrences share.

A program computes J units, with their P gates, for the whole batch, so it needs no batch statistics of other programs.
A tile (TILE, P J) has one row for each sequence; gate p of unit j is in column p J + j. Sizes of tiles are powers of
two: TILE is at least B, and P is 4 for three gates. A mask says which elements exist.

Kernels read the addresses and sizes of a scan from a table in memory (see launches.py), whose first entries are CLOCK
to RUNNING. All that is known when a kernel is compiled stands in one named tuple, `form`: these constants, and those of
the recurrence. (Triton's compiler takes only names for the sizes of a tile, such as TILE, not form.TILE.)
    H units; Q gates, P in a tile; G = Q H
    J units of a program; TILE rows of a tile; K columns of the factors of a product that are loaded at once
    FUSED: whether the kernel computes the recurrent product, or cuBLAS does
    BATCH: whether to compute and store batch statistics, or to read those of the population; EPS of all norms
    PADDED: whether sequences have different lengths; KEEP: whether a backward pass follows
    LOW and PRECISION of products; ROUND: whether their factors are rounded to TF32
    WIDEN: whether the interpreter runs, which cannot multiply bfloat16
"""

from typing import no_type_check

import triton
import triton.language as tl

CLOCK, STEPS, BATCH_SIZE, RUNNING = (tl.constexpr(i) for i in range(4))
CONSTANTS = ("H", "Q", "P", "G", "J", "TILE", "K", "FUSED", "BATCH", "EPS", "PADDED", "KEEP", "LOW", "PRECISION",
             "ROUND", "WIDEN")  # fmt: skip
MOST_SPINS = tl.constexpr(2**20)  # about a second: a barrier that was not passed by then is a fault


@no_type_check
@triton.jit
def address(table, entry: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    """The address in an entry of the table. All are multiples of 16 bytes, so that vectors of four can be loaded."""
    return tl.multiple_of(tl.load(table + entry).to(tl.pointer_type(DTYPE)), 16)


@no_type_check
@triton.jit
def vector(table, entry: tl.constexpr, offset, columns, valid):
    """Values of the columns of a tile, as a row."""
    return tl.load(address(table, entry) + offset + columns, mask=valid, other=0.0)[None, :]


@no_type_check
@triton.jit
def gate_columns(form: tl.constexpr):
    """For the units of this program: the column of each element of a tile's row in an array (rows, G); if it exists."""
    wide = tl.arange(0, form.P * form.J)
    unit, gate = tl.program_id(0) * form.J + wide % form.J, wide // form.J
    return gate * form.H + unit, (unit < form.H) & (gate < form.Q)


@no_type_check
@triton.jit
def split_gates(tile, form: tl.constexpr):
    """The four gates (TILE, J) of a tile."""
    TILE: tl.constexpr = form.TILE
    J: tl.constexpr = form.J
    pairs = tl.reshape(tl.permute(tl.reshape(tile, (TILE, 4, J)), (0, 2, 1)), (TILE, J, 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@no_type_check
@triton.jit
def join_gates(first, second, third, fourth, form: tl.constexpr):
    """The tile of four gates (TILE, J)."""
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    TILE: tl.constexpr = form.TILE
    J: tl.constexpr = form.J
    return tl.reshape(tl.permute(tl.reshape(pairs, (TILE, J, 4)), (0, 2, 1)), (TILE, 4 * J))


@no_type_check
@triton.jit
def split_two(tile, form: tl.constexpr):
    """The two gates (TILE, J) of a tile."""
    TILE: tl.constexpr = form.TILE
    J: tl.constexpr = form.J
    return tl.split(tl.permute(tl.reshape(tile, (TILE, 2, J)), (0, 2, 1)))


@no_type_check
@triton.jit
def join_two(first, second, form: tl.constexpr):
    """The tile of two gates (TILE, J)."""
    TILE: tl.constexpr = form.TILE
    J: tl.constexpr = form.J
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (TILE, 2 * J))


@no_type_check
@triton.jit
def lowered(x, form: tl.constexpr):
    """A factor in the precision of products."""
    x = x.to(form.LOW)
    return x.to(tl.float32) if form.WIDEN else x


@no_type_check
@triton.jit
def nearest(x, form: tl.constexpr):
    """The left factor of a product, for TF32 rounded to the nearest such number.

    Tensor cores only ignore the last 13 bits of a float32, so all products would be too small, by about 7e-4. Batch
    normalization undoes this in the forward pass. Gradients are then too large, unless the product of the backward pass
    is too small in the same way: that of cuBLAS, which rounds, is not.
    """
    if form.ROUND:
        bits = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], tl.uint32, is_pure=True, pack=1)
        x = bits.to(tl.float32, bitcast=True)
    return x


@no_type_check
@triton.jit
def tanh(x):
    s = x * x  # near 0 use a polynomial (Cephes tanhf): 2 sigmoid(2x) - 1 would lose the digits of a small result
    p = (((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1) * s
    return tl.where(s < 0.390625, x + x * s * (p - 3.33332819422e-1), 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@no_type_check
@triton.jit
def product(left, rows, count, right, columns, valid, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
            form: tl.constexpr):  # fmt: skip
    """A tile (TILE, WIDTH) of left @ right^T: all rows, where those from `count` on are 0, and some columns.

    Both factors have rows of DEPTH elements; `right` already has the precision LOW, and for TF32 is rounded to it.
    """
    TILE: tl.constexpr = form.TILE
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for k in range(0, DEPTH, form.K):
        depth = k + tl.arange(0, form.K)
        a = tl.load(left + rows[:, None] * DEPTH + depth[None, :],
                    mask=(rows < count)[:, None] & (depth < DEPTH)[None, :], other=0.0)  # fmt: skip
        b = tl.load(right + columns[None, :] * DEPTH + depth[:, None],
                    mask=(depth < DEPTH)[:, None] & valid[None, :], other=0.0)  # fmt: skip
        total = tl.dot(nearest(lowered(a, form), form), lowered(b, form), total, input_precision=form.PRECISION)
    return total


@no_type_check
@triton.jit
def normalized(v, mask, count, means, variances, columns, valid, form: tl.constexpr):
    """Normalize a tile; 0 outside the mask. If BATCH, with its statistics over `count` rows, which are stored.

    The variance takes a second pass, over registers: E[v²] - E[v]² would lose digits.
    """
    if form.BATCH:
        mean = tl.sum(tl.where(mask, v, 0.0), axis=0) / count
        centred = tl.where(mask, v - mean[None, :], 0.0)
        var = tl.sum(centred * centred, axis=0) / count
        tl.store(means + columns, mean, mask=valid)
        tl.store(variances + columns, var, mask=valid)
    else:
        mean = tl.load(means + columns, mask=valid, other=0.0)
        var = tl.load(variances + columns, mask=valid, other=1.0)
        centred = tl.where(mask, v - mean[None, :], 0.0)
    return centred * (1.0 / tl.sqrt(var + form.EPS))[None, :]


@no_type_check
@triton.jit
def add(pointer, columns, valid, value):
    """Add to values in memory that belong to this program.

    With few columns, several threads have the same one, and one of them stores it. With a load and a store, the others
    could load while it stores, since no barrier lies between.
    """
    tl.atomic_add(pointer + columns, value, mask=valid, sem="relaxed")


@no_type_check
@triton.jit
def through_norm(d, total, v, mask, count, gamma, dgamma, variances, columns, valid, form: tl.constexpr):
    """The gradient of values before normalization; 0 outside the mask. Adds to dgamma.

    v are the normalized values, d the gradient of gamma v and `total` its sum over the batch. With population
    statistics no gradient flows through them.
    """
    total_v = tl.sum(d * v, axis=0)
    add(dgamma, columns, valid, total_v)
    scale = tl.load(gamma + columns, mask=valid, other=0.0)
    scale /= tl.sqrt(tl.load(variances + columns, mask=valid, other=1.0) + form.EPS)
    if form.BATCH:
        d = d - (total / count)[None, :] - v * (total_v / count)[None, :]
    return tl.where(mask, scale[None, :] * d, 0.0)


@no_type_check
@triton.jit
def wait_for_all(arrived, target):
    """Wait until the programs that share a counter have arrived `target` times together; all must be running.

    What they stored before is then visible to this program.
    """
    tl.debug_barrier()  # all threads of this program have stored
    seen = tl.atomic_add(arrived, 1) + 1
    spins = 0
    while (seen < target) & (spins < MOST_SPINS):
        seen = tl.atomic_add(arrived, 0)
        spins += 1
    tl.debug_barrier()
