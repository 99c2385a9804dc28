"""The Triton kernels of one highway layer of one time step, forward and backward.

A program computes J units with their Q gates for the whole batch, in registers, as in lstm/triton_kernels.py. The
kernel of a layer also normalizes the state that enters the next layer, because it has just computed that state; the
backward kernels are split in the same way. fused.py has the equations. With Q = 1, the transform gate is 1 and the
carry gate 0: a layer of a tanh RNN.

The arrays of a scan, by the entries of the table that has their addresses, with G = Q H. Layer d of step t has the
place t D + d:
    running (T + 1): number of sequences that run at each step, then 0; only with PADDED
    x, normal_x, dx (T, B, G); dy (T, B, H); a (T D, B, G); states (T D + 1, B, H), of which the first is given
    normal (T + 1, L, B, H), of which the first is given
    entering (2, B, H): normalized states with scale and shift; places take turns, and the first is given
    weight (D, G, H), for the backward pass (D, H, G), in the precision of products
    state, product: without FUSED, the left factor of the next product, and the product, in that precision
    ds (B, H); parameters and their gradients; statistics; those of states have T + 1 steps, of the population T

The constants beside those of blocks.py:
    D layers, of which the first L normalize the state that enters them
    IX, Z: whether the input and the sums are normalized
    SHIFTED, STATE_SHIFTED: whether the sums and the entering states are shifted
    FIRST, TOP: whether this is the first layer, the last one
    ENTERED, NEXT_ENTERS: whether this layer, and the next one, normalizes the state that enters it
"""

from collections import namedtuple
from typing import no_type_check

import triton
import triton.language as tl

from bnrnn.scan.triton_shared.blocks import (
    BATCH_SIZE,
    CLOCK,
    CONSTANTS,
    RUNNING,
    STEPS,
    add,
    address,
    gate_columns,
    join_gates,
    join_two,
    normalized,
    product,
    split_gates,
    split_two,
    tanh,
    through_norm,
    vector,
)

ENTRIES = ("clock", "steps", "batch_size", "running", "x", "normal_x", "a", "states", "normal", "entering", "weight",
           "state", "product", "bias", "gamma_x", "gamma_s", "beta_s", "gamma_z", "mean_x", "var_x", "mean_s", "var_s",
           "mean_z", "var_z", "dy", "ds", "dx", "dbias", "dgamma_x", "dgamma_s", "dbeta_s", "dgamma_z")  # fmt: skip
(X, NORMAL_X, A, STATES, NORMAL, ENTERING, WEIGHT, STATE, PRODUCT, BIAS, GAMMA_X, GAMMA_S, BETA_S, GAMMA_Z, MEAN_X,
 VAR_X, MEAN_S, VAR_S, MEAN_Z, VAR_Z, DY, DS, DX, DBIAS, DGAMMA_X, DGAMMA_S, DBETA_S,
 DGAMMA_Z) = (tl.constexpr(i) for i in range(4, len(ENTRIES)))  # fmt: skip
Constants = namedtuple("Constants", (*CONSTANTS, "D", "L", "IX", "Z", "SHIFTED", "STATE_SHIFTED", "FIRST", "TOP",
                                     "ENTERED", "NEXT_ENTERS"))  # fmt: skip


@no_type_check
@triton.jit
def _next(table, t, d, T, B, form: tl.constexpr):
    """Of the layer after layer d of step t: the number of sequences, 0 after the last; its number; its statistics' row.

    Those of the batch have a row after the last step, those of the population have not.
    """
    if form.TOP:
        t, d = t + 1, d - d
    else:
        d = d + 1
    count = tl.load(address(table, RUNNING, tl.int32) + t) if form.PADDED else tl.where(t < T, B, 0)
    return count, d, (t if form.BATCH else tl.minimum(t, T - 1)) * form.L + d, t * form.L + d


@no_type_check
@triton.jit
def _gates(a, table, d, columns, present, form: tl.constexpr):
    """The values h, t and c of a layer, from its sums before scale and shift."""
    if form.Z:
        a = a * vector(table, GAMMA_Z, d * form.G, columns, present)
    if form.SHIFTED:
        a = a + vector(table, BIAS, d * form.G, columns, present)
    if form.Q == 3:
        h, transform, carry, _ = split_gates(a, form)
        return tanh(h), tl.sigmoid(transform), tl.sigmoid(carry)
    elif form.Q == 2:
        h, transform = split_two(a, form)
        return tanh(h), tl.sigmoid(transform), 1.0 - tl.sigmoid(transform)
    else:
        TILE: tl.constexpr = form.TILE
        J: tl.constexpr = form.J
        return tanh(a), tl.full([TILE, J], 1.0, tl.float32), tl.zeros([TILE, J], tl.float32)


@no_type_check
@triton.jit
def _entering(state, table, t, d, T, B, rows, units, valid, form: tl.constexpr):
    """The state that enters the layer after layer d of step t: normalized, with scale and shift; 0 if it ended."""
    count, d_next, row, at = _next(table, t, d, T, B, form)
    mask = (rows < count)[:, None] & valid[None, :]
    v = normalized(state, mask, tl.maximum(count, 1), address(table, MEAN_S) + row * form.H,
                   address(table, VAR_S) + row * form.H, units, valid, form)  # fmt: skip
    if form.KEEP:
        here = rows[:, None] * form.H + units[None, :]
        tl.store(address(table, NORMAL) + at * B * form.H + here, v, mask=(rows < B)[:, None] & valid[None, :])
    v = v * vector(table, GAMMA_S, d_next * form.H, units, valid)
    if form.STATE_SHIFTED:
        v = v + vector(table, BETA_S, d_next * form.H, units, valid)
    return tl.where(mask, v, 0.0)


@no_type_check
@triton.jit
def _sums(before, table, t, d, place, B, n, rows, columns, present, form: tl.constexpr):
    """The sums of a layer, normalized if Z. Without FUSED, cuBLAS has computed the product."""
    here = rows[:, None] * form.G + columns[None, :]
    mask = (rows < n)[:, None] & present[None, :]
    if form.FUSED:
        left = address(table, ENTERING) + (place % 2) * B * form.H if form.ENTERED else before
        right = address(table, WEIGHT, form.LOW) + d * form.G * form.H
        a = product(left, rows, n, right, columns, present, form.H, form.P * form.J, form)
    else:
        a = tl.load(address(table, PRODUCT, form.LOW) + here, mask=mask, other=0.0).to(tl.float32)
    if form.FIRST:
        x = tl.load(address(table, X) + t * B * form.G + here, mask=mask, other=0.0)
        if form.IX:
            x = normalized(x, mask, n, address(table, MEAN_X) + t * form.G, address(table, VAR_X) + t * form.G,
                           columns, present, form)  # fmt: skip
            if form.KEEP:
                tl.store(address(table, NORMAL_X) + t * B * form.G + here, x, mask=mask)
            x = x * vector(table, GAMMA_X, 0, columns, present)
        a += x
    if form.Z:
        a = normalized(a, mask, n, address(table, MEAN_Z) + place * form.G, address(table, VAR_Z) + place * form.G,
                       columns, present, form)  # fmt: skip
    if form.KEEP:
        tl.store(address(table, A) + place * B * form.G + here, a, mask=mask)
    return a


@no_type_check
@triton.jit(do_not_specialize=["offset", "d"])
def forward_layer(table, offset, d, form: tl.constexpr):
    """Forward pass of layer d of step clock + offset: write a and the state; normalize the latter if NEXT_ENTERS.

    Without KEEP, a and the normalized values are not kept.
    """
    t, T, B = tl.load(table + CLOCK) + offset, tl.load(table + STEPS), tl.load(table + BATCH_SIZE).to(tl.int32)
    rows, units = tl.arange(0, form.TILE), tl.program_id(0) * form.J + tl.arange(0, form.J)
    columns, present = gate_columns(form)
    valid = units < form.H
    n = tl.load(address(table, RUNNING, tl.int32) + t) if form.PADDED else B
    place = t * form.D + d
    of_units = rows[:, None] * form.H + units[None, :]
    running = (rows < n)[:, None] & valid[None, :]
    every = (rows < B)[:, None] & valid[None, :]
    before = address(table, STATES) + place * B * form.H

    a = _sums(before, table, t, d, place, B, n, rows, columns, present, form)
    h, transform, carry = _gates(a, table, d, columns, present, form)
    now = tl.load(before + of_units, mask=every, other=0.0)
    state = tl.where(running, h * transform + now * carry, now)
    tl.store(before + B * form.H + of_units, state, mask=every)
    if form.NEXT_ENTERS:
        state = _entering(state, table, t, d, T, B, rows, units, valid, form)
        if form.FUSED:
            tl.store(address(table, ENTERING) + ((place + 1) % 2) * B * form.H + of_units, state, mask=every)
    if not form.FUSED:
        tl.store(address(table, STATE, form.LOW) + of_units, state.to(form.LOW), mask=every)


@no_type_check
@triton.jit
def _leaving(table, t, d, T, B, rows, units, valid, form: tl.constexpr):
    """The gradient of a layer's output that flows through R of the next layer: 0 after the last."""
    count, d_next, row, at = _next(table, t, d, T, B, form)
    mask = (rows < count)[:, None] & valid[None, :]
    here = rows[:, None] * form.H + units[None, :]
    if form.FUSED:
        left = address(table, A) + (t * form.D + d + 1) * B * form.G
        right = address(table, WEIGHT, form.LOW) + d_next * form.G * form.H
        dv = product(left, rows, count, right, units, valid, form.G, form.J, form)
    else:
        dv = tl.load(address(table, PRODUCT, form.LOW) + here, mask=mask, other=0.0).to(tl.float32)
    if form.NEXT_ENTERS:
        total = tl.sum(dv, axis=0)
        v = tl.load(address(table, NORMAL) + at * B * form.H + here, mask=mask, other=0.0)
        if form.STATE_SHIFTED:
            add(address(table, DBETA_S) + d_next * form.H, units, valid, total)
        dv = through_norm(dv, total, v, mask, tl.maximum(count, 1), address(table, GAMMA_S) + d_next * form.H,
                          address(table, DGAMMA_S) + d_next * form.H, address(table, VAR_S) + row * form.H, units,
                          valid, form)  # fmt: skip
    return dv


@no_type_check
@triton.jit
def _through_gates(grad, h, transform, carry, now, mask, form: tl.constexpr):
    """The gradient of the gates' pre-activations, from that of the layer's output."""
    of_h, slope = grad * transform * (1.0 - h * h), grad * transform * (1.0 - transform)
    if form.Q == 3:
        of_carry = grad * now * carry * (1.0 - carry)
        da = join_gates(of_h, slope * h, of_carry, tl.zeros_like(of_h), form)
    elif form.Q == 2:
        da = join_two(of_h, slope * (h - now), form)
    else:
        da = of_h
    return tl.where(mask, da, 0.0)


@no_type_check
@triton.jit(do_not_specialize=["offset", "d"])
def backward_layer(table, offset, d, form: tl.constexpr):
    """Backward pass of layer d of step clock - offset: overwrite a with its gradient, and write dx if FIRST.

    On entry, ds is the gradient of the layer's output without the part that flows through R of the next layer. On
    return, it is the gradient of the layer's input without the part that flows through R of this layer. Adds to the
    gradients of the parameters. dx may have the memory of normal_x.
    """
    t, T, B = tl.load(table + CLOCK) - offset, tl.load(table + STEPS), tl.load(table + BATCH_SIZE).to(tl.int32)
    rows, units = tl.arange(0, form.TILE), tl.program_id(0) * form.J + tl.arange(0, form.J)
    columns, present = gate_columns(form)
    valid = units < form.H
    n = tl.load(address(table, RUNNING, tl.int32) + t) if form.PADDED else B
    place = t * form.D + d
    of_gates = rows[:, None] * form.G + columns[None, :]
    of_units = rows[:, None] * form.H + units[None, :]
    gates_mask = (rows < n)[:, None] & present[None, :]
    running = (rows < n)[:, None] & valid[None, :]
    every = (rows < B)[:, None] & valid[None, :]

    ds = address(table, DS) + of_units
    grad = tl.load(ds, mask=every, other=0.0)
    grad += _leaving(table, t, d, T, B, rows, units, valid, form)
    if form.TOP:
        grad += tl.load(address(table, DY) + t * B * form.H + of_units, mask=every, other=0.0)
    a = tl.load(address(table, A) + place * B * form.G + of_gates, mask=gates_mask, other=0.0)
    now = tl.load(address(table, STATES) + place * B * form.H + of_units, mask=running, other=0.0)
    h, transform, carry = _gates(a, table, d, columns, present, form)
    da = _through_gates(grad, h, transform, carry, now, gates_mask, form)
    total = tl.sum(da, axis=0)
    if form.SHIFTED:
        add(address(table, DBIAS) + d * form.G, columns, present, total)
    if form.Z:
        da = through_norm(da, total, a, gates_mask, n, address(table, GAMMA_Z) + d * form.G,
                          address(table, DGAMMA_Z) + d * form.G, address(table, VAR_Z) + place * form.G, columns,
                          present, form)  # fmt: skip
    dx = da
    if form.FIRST and form.IX:
        x = tl.load(address(table, NORMAL_X) + t * B * form.G + of_gates, mask=gates_mask, other=0.0)
        dx = through_norm(da, tl.sum(da, axis=0), x, gates_mask, n, address(table, GAMMA_X), address(table, DGAMMA_X),
                          address(table, VAR_X) + t * form.G, columns, present, form)  # fmt: skip
    tl.debug_barrier()  # all threads have loaded what is overwritten now
    all_gates = (rows < B)[:, None] & present[None, :]
    tl.store(ds, tl.where(running, grad * carry, grad), mask=every)
    tl.store(address(table, A) + place * B * form.G + of_gates, da, mask=all_gates)
    if form.FIRST:
        tl.store(address(table, DX) + t * B * form.G + of_gates, dx, mask=all_gates)
    if not form.FUSED:
        tl.store(address(table, STATE, form.LOW) + of_gates, da.to(form.LOW), mask=all_gates)
