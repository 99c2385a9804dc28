"""The Triton kernels of one highway layer of one time step, forward and backward.

A program computes J units with their Q gates for the whole batch, in registers, as in lstm/triton_kernels.py. The
kernel of a layer also normalizes the state that enters the next layer, because it has just computed that state; the
backward kernels are split in the same way. fused.py has the equations. With Q = 1, the transform gate is 1 and the
carry gate 0: a layer of a tanh RNN.

The arrays of a scan, by the entries of the table that has their addresses, with G = Q H. Layer d of step t has the
place t D + d. The first L layers normalize the state that enters them:
    running (T + 1): number of sequences that run at each step, then 0; only with PADDED
    x, normal_x, dx (T, B, G); dy (T, B, H); a (T D, B, G); states (T D + 1, B, H), of which the first is given
    normal (T + 1, L, B, H), of which the first is given
    entering (2, B, H): normalized states with scale and shift; places take turns, and the first is given
    weight (D, G, H), for the backward pass (D, H, G), in the precision of products
    state, product: without FUSED, the left factor of the next product, and the product, in that precision
    ds (B, H); parameters and their gradients; statistics; those of states have T + 1 steps, of the population T
"""

from typing import no_type_check

import triton
import triton.language as tl

from bnrnn.scan.triton_shared.blocks import (
    BATCH_SIZE,
    CLOCK,
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


@no_type_check
@triton.jit
def _next(table, t, d, T, B, L: tl.constexpr, TOP: tl.constexpr, BATCH: tl.constexpr, PADDED: tl.constexpr):
    """Of the layer after layer d of step t: the number of sequences, 0 after the last; its number; its statistics' row.

    Those of the batch have a row after the last step, those of the population have not.
    """
    if TOP:
        t, d = t + 1, d - d
    else:
        d = d + 1
    count = tl.load(address(table, RUNNING, tl.int32) + t) if PADDED else tl.where(t < T, B, 0)
    return count, d, (t if BATCH else tl.minimum(t, T - 1)) * L + d, t * L + d


@no_type_check
@triton.jit
def _gates(a, table, d, columns, present, G: tl.constexpr, Q: tl.constexpr, Z: tl.constexpr, SHIFTED: tl.constexpr,
           TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """The values h, t and c of a layer, from its sums before scale and shift."""
    if Z:
        a = a * vector(table, GAMMA_Z, d * G, columns, present)
    if SHIFTED:
        a = a + vector(table, BIAS, d * G, columns, present)
    if Q == 3:
        h, transform, carry, _ = split_gates(a, TILE, J)
        return tanh(h), tl.sigmoid(transform), tl.sigmoid(carry)
    elif Q == 2:
        h, transform = split_two(a, TILE, J)
        return tanh(h), tl.sigmoid(transform), 1.0 - tl.sigmoid(transform)
    else:
        return tanh(a), tl.full([TILE, J], 1.0, tl.float32), tl.zeros([TILE, J], tl.float32)


@no_type_check
@triton.jit
def _entering(state, table, t, d, T, B, rows, units, valid, eps, H: tl.constexpr, L: tl.constexpr, TOP: tl.constexpr,
              STATE_SHIFTED: tl.constexpr, BATCH: tl.constexpr, PADDED: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """The state that enters the layer after layer d of step t: normalized, with scale and shift; 0 if it ended."""
    count, d_next, row, at = _next(table, t, d, T, B, L, TOP, BATCH, PADDED)
    mask = (rows < count)[:, None] & valid[None, :]
    v = normalized(state, mask, tl.maximum(count, 1), address(table, MEAN_S) + row * H, address(table, VAR_S) + row * H,
                   units, valid, eps, BATCH)  # fmt: skip
    if KEEP:
        here = rows[:, None] * H + units[None, :]
        tl.store(address(table, NORMAL) + at * B * H + here, v, mask=(rows < B)[:, None] & valid[None, :])
    v = v * vector(table, GAMMA_S, d_next * H, units, valid)
    if STATE_SHIFTED:
        v = v + vector(table, BETA_S, d_next * H, units, valid)
    return tl.where(mask, v, 0.0)


@no_type_check
@triton.jit
def _sums(before, table, t, d, place, B, n, rows, columns, present, eps, H: tl.constexpr, Q: tl.constexpr,
          P: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, IX: tl.constexpr, Z: tl.constexpr,
          BATCH: tl.constexpr, KEEP: tl.constexpr, FUSED: tl.constexpr, FIRST: tl.constexpr, ENTERED: tl.constexpr,
          LOW: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The sums of a layer, normalized if Z. Without FUSED, cuBLAS has computed the product."""
    G: tl.constexpr = Q * H
    here = rows[:, None] * G + columns[None, :]
    mask = (rows < n)[:, None] & present[None, :]
    if FUSED:
        left = address(table, ENTERING) + (place % 2) * B * H if ENTERED else before
        a = product(left, rows, n, address(table, WEIGHT, LOW) + d * G * H, columns, present, H, P * J, TILE, K, LOW,
                    WIDEN, PRECISION)  # fmt: skip
    else:
        a = tl.load(address(table, PRODUCT, LOW) + here, mask=mask, other=0.0).to(tl.float32)
    if FIRST:
        x = tl.load(address(table, X) + t * B * G + here, mask=mask, other=0.0)
        if IX:
            x = normalized(x, mask, n, address(table, MEAN_X) + t * G, address(table, VAR_X) + t * G, columns, present,
                           eps, BATCH)  # fmt: skip
            if KEEP:
                tl.store(address(table, NORMAL_X) + t * B * G + here, x, mask=mask)
            x = x * vector(table, GAMMA_X, 0, columns, present)
        a += x
    if Z:
        a = normalized(a, mask, n, address(table, MEAN_Z) + place * G, address(table, VAR_Z) + place * G, columns,
                       present, eps, BATCH)  # fmt: skip
    if KEEP:
        tl.store(address(table, A) + place * B * G + here, a, mask=mask)
    return a


@no_type_check
@triton.jit(do_not_specialize=["offset", "d"])
def forward_layer(table, offset, d, eps, H: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
                  J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, IX: tl.constexpr, Z: tl.constexpr,
                  SHIFTED: tl.constexpr, STATE_SHIFTED: tl.constexpr, BATCH: tl.constexpr, PADDED: tl.constexpr,
                  KEEP: tl.constexpr, FUSED: tl.constexpr, FIRST: tl.constexpr, TOP: tl.constexpr,
                  ENTERED: tl.constexpr, NEXT_ENTERS: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """Forward pass of layer d of step clock + offset: write a and the state; normalize the latter if NEXT_ENTERS.

    IX and Z say whether the input and the sums are normalized, SHIFTED and STATE_SHIFTED whether the sums and the
    entering states are shifted, ENTERED whether this layer normalizes the state that enters it. FIRST means d = 0, TOP
    means d = D - 1. Without KEEP, a and the normalized values are not kept.
    """
    G: tl.constexpr = Q * H
    P: tl.constexpr = 4 if Q == 3 else Q
    t, T, B = tl.load(table + CLOCK) + offset, tl.load(table + STEPS), tl.load(table + BATCH_SIZE).to(tl.int32)
    rows, units = tl.arange(0, TILE), tl.program_id(0) * J + tl.arange(0, J)
    columns, present = gate_columns(tl.program_id(0) * J, H, Q, P, J)
    valid = units < H
    n = tl.load(address(table, RUNNING, tl.int32) + t) if PADDED else B
    place = t * D + d
    of_units = rows[:, None] * H + units[None, :]
    running = (rows < n)[:, None] & valid[None, :]
    every = (rows < B)[:, None] & valid[None, :]
    before = address(table, STATES) + place * B * H

    a = _sums(before, table, t, d, place, B, n, rows, columns, present, eps, H, Q, P, J, TILE, K, IX, Z, BATCH, KEEP,
              FUSED, FIRST, ENTERED, LOW, WIDEN, PRECISION)  # fmt: skip
    h, transform, carry = _gates(a, table, d, columns, present, G, Q, Z, SHIFTED, TILE, J)
    now = tl.load(before + of_units, mask=every, other=0.0)
    state = tl.where(running, h * transform + now * carry, now)
    tl.store(before + B * H + of_units, state, mask=every)
    if NEXT_ENTERS:
        state = _entering(state, table, t, d, T, B, rows, units, valid, eps, H, L, TOP, STATE_SHIFTED, BATCH, PADDED,
                          KEEP)  # fmt: skip
        if FUSED:
            tl.store(address(table, ENTERING) + ((place + 1) % 2) * B * H + of_units, state, mask=every)
    if not FUSED:
        tl.store(address(table, STATE, LOW) + of_units, state.to(LOW), mask=every)


@no_type_check
@triton.jit
def _leaving(table, t, d, T, B, rows, units, valid, eps, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
             L: tl.constexpr, TOP: tl.constexpr, NEXT_ENTERED: tl.constexpr, STATE_SHIFTED: tl.constexpr,
             BATCH: tl.constexpr, PADDED: tl.constexpr, FUSED: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr,
             K: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The gradient of a layer's output that flows through R of the next layer: 0 after the last."""
    count, d_next, row, at = _next(table, t, d, T, B, L, TOP, BATCH, PADDED)
    mask = (rows < count)[:, None] & valid[None, :]
    if FUSED:
        left, right = address(table, A) + (t * D + d + 1) * B * G, address(table, WEIGHT, LOW) + d_next * G * H
        dv = product(left, rows, count, right, units, valid, G, J, TILE, K, LOW, WIDEN, PRECISION)
    else:
        dv = tl.load(address(table, PRODUCT, LOW) + rows[:, None] * H + units[None, :], mask=mask, other=0.0)
        dv = dv.to(tl.float32)
    if NEXT_ENTERED:
        total = tl.sum(dv, axis=0)
        v = tl.load(address(table, NORMAL) + at * B * H + rows[:, None] * H + units[None, :], mask=mask, other=0.0)
        if STATE_SHIFTED:
            add(address(table, DBETA_S) + d_next * H, units, valid, total)
        dv = through_norm(dv, total, v, mask, tl.maximum(count, 1), address(table, GAMMA_S) + d_next * H,
                          address(table, DGAMMA_S) + d_next * H, address(table, VAR_S) + row * H, units, valid, eps,
                          BATCH)  # fmt: skip
    return dv


@no_type_check
@triton.jit
def _through_gates(grad, h, transform, carry, now, mask, Q: tl.constexpr, TILE: tl.constexpr, J: tl.constexpr):
    """The gradient of the gates' pre-activations, from that of the layer's output."""
    of_h, slope = grad * transform * (1.0 - h * h), grad * transform * (1.0 - transform)
    if Q == 3:
        of_carry = grad * now * carry * (1.0 - carry)
        da = join_gates(of_h, slope * h, of_carry, tl.zeros([TILE, J], tl.float32), TILE, J)
    elif Q == 2:
        da = join_two(of_h, slope * (h - now), TILE, J)
    else:
        da = of_h
    return tl.where(mask, da, 0.0)


@no_type_check
@triton.jit(do_not_specialize=["offset", "d"])
def backward_layer(table, offset, d, eps, H: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
                   J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, IX: tl.constexpr, Z: tl.constexpr,
                   SHIFTED: tl.constexpr, STATE_SHIFTED: tl.constexpr, BATCH: tl.constexpr, PADDED: tl.constexpr,
                   FUSED: tl.constexpr, FIRST: tl.constexpr, TOP: tl.constexpr, NEXT_ENTERED: tl.constexpr,
                   LOW: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Backward pass of layer d of step clock - offset: overwrite a with its gradient, and write dx if FIRST.

    On entry, ds is the gradient of the layer's output without the part that flows through R of the next layer. On
    return, it is the gradient of the layer's input without the part that flows through R of this layer. Adds to the
    gradients of the parameters. dx may have the memory of normal_x.
    """
    G: tl.constexpr = Q * H
    P: tl.constexpr = 4 if Q == 3 else Q
    t, T, B = tl.load(table + CLOCK) - offset, tl.load(table + STEPS), tl.load(table + BATCH_SIZE).to(tl.int32)
    rows, units = tl.arange(0, TILE), tl.program_id(0) * J + tl.arange(0, J)
    columns, present = gate_columns(tl.program_id(0) * J, H, Q, P, J)
    valid = units < H
    n = tl.load(address(table, RUNNING, tl.int32) + t) if PADDED else B
    place = t * D + d
    of_gates = rows[:, None] * G + columns[None, :]
    of_units = rows[:, None] * H + units[None, :]
    gates_mask = (rows < n)[:, None] & present[None, :]
    running = (rows < n)[:, None] & valid[None, :]
    every = (rows < B)[:, None] & valid[None, :]

    ds = address(table, DS) + of_units
    grad = tl.load(ds, mask=every, other=0.0)
    grad += _leaving(table, t, d, T, B, rows, units, valid, eps, H, G, D, L, TOP, NEXT_ENTERED, STATE_SHIFTED, BATCH,
                     PADDED, FUSED, J, TILE, K, LOW, WIDEN, PRECISION)  # fmt: skip
    if TOP:
        grad += tl.load(address(table, DY) + t * B * H + of_units, mask=every, other=0.0)
    a = tl.load(address(table, A) + place * B * G + of_gates, mask=gates_mask, other=0.0)
    now = tl.load(address(table, STATES) + place * B * H + of_units, mask=running, other=0.0)
    h, transform, carry = _gates(a, table, d, columns, present, G, Q, Z, SHIFTED, TILE, J)
    da = _through_gates(grad, h, transform, carry, now, gates_mask, Q, TILE, J)
    total = tl.sum(da, axis=0)
    if SHIFTED:
        add(address(table, DBIAS) + d * G, columns, present, total)
    if Z:
        da = through_norm(da, total, a, gates_mask, n, address(table, GAMMA_Z) + d * G,
                          address(table, DGAMMA_Z) + d * G, address(table, VAR_Z) + place * G, columns, present, eps,
                          BATCH)  # fmt: skip
    dx = da
    if FIRST and IX:
        x = tl.load(address(table, NORMAL_X) + t * B * G + of_gates, mask=gates_mask, other=0.0)
        dx = through_norm(da, tl.sum(da, axis=0), x, gates_mask, n, address(table, GAMMA_X), address(table, DGAMMA_X),
                          address(table, VAR_X) + t * G, columns, present, eps, BATCH)  # fmt: skip
    tl.debug_barrier()  # all threads have loaded what is overwritten now
    all_gates = (rows < B)[:, None] & present[None, :]
    tl.store(ds, tl.where(running, grad * carry, grad), mask=every)
    tl.store(address(table, A) + place * B * G + of_gates, da, mask=all_gates)
    if FIRST:
        tl.store(address(table, DX) + t * B * G + of_gates, dx, mask=all_gates)
    if not FUSED:
        tl.store(address(table, STATE, LOW) + of_gates, da.to(LOW), mask=all_gates)
