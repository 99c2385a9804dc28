"""The Triton kernels of one time step or of a whole sequence, forward and backward.

A program computes J units with their four gates, for the whole batch: one loop over the depth of the recurrent
product, whose tile (TILE, 4J) stays in registers until h is written. Equation numbers are those of Cooijmans et al.
2016; fused.py has the equations of the backward pass.

The arrays of a scan, by the entries of the table that has their addresses. T, B, H as everywhere:
    running (T + 1): number of sequences that run at each step, then 0; only with PADDED
    x, normal_x, u, dx (T, B, 4H); dy (T, B, H); h (T + 1, B, H)
    c (T + 1, B, H), or (2, B, H) without KEEP: steps take turns
    weight (4H, H), for the backward pass (H, 4H), in the precision of products
    state, product: without FUSED, the left factor of the next product, and the product, in that precision
    arrived (1): how often a program has computed a step, with WHOLE; 0 at first
    dh, dc (B, H); parameters and their gradients (4H) or (H); statistics (T, 4H) or (T, H)

The constants beside those of blocks.py:
    WHOLE: whether a launch computes all steps
    IH, HH, CELL: whether the input product, the recurrent product and the cell output are normalized
    SHIFTED, CELL_SHIFTED: whether the gates and the cell output are shifted
    ALL_COUNT: whether finished sequences count in the statistics of the batch
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
    normalized,
    product,
    split_gates,
    tanh,
    through_norm,
    vector,
    wait_for_all,
)

ENTRIES = ("clock", "steps", "batch_size", "running", "x", "normal_x", "u", "c", "h", "weight", "state", "product",
           "gamma_ih", "gamma_hh", "bias", "gamma_c", "beta_c", "mean_ih", "var_ih", "mean_hh", "var_hh", "mean_c",
           "var_c", "dy", "dh", "dc", "dx", "dgamma_ih", "dgamma_hh", "dbias", "dgamma_c", "dbeta_c",
           "arrived")  # fmt: skip
(X, NORMAL_X, U, C, STATES, WEIGHT, STATE, PRODUCT, GAMMA_IH, GAMMA_HH, BIAS, GAMMA_C, BETA_C, MEAN_IH, VAR_IH, MEAN_HH,
 VAR_HH, MEAN_C, VAR_C, DY, DH, DC, DX, DGAMMA_IH, DGAMMA_HH, DBIAS, DGAMMA_C, DBETA_C,
 ARRIVED) = (tl.constexpr(i) for i in range(4, len(ENTRIES)))  # fmt: skip
Constants = namedtuple("Constants", (*CONSTANTS, "WHOLE", "IH", "HH", "CELL", "SHIFTED", "CELL_SHIFTED", "ALL_COUNT"))


@no_type_check
@triton.jit
def _gates(x, u, table, columns, present, form: tl.constexpr):
    """Input gate, forget gate, candidate and output gate (eq. 6), from the values before scale and shift."""
    if form.IH:
        x = x * vector(table, GAMMA_IH, 0, columns, present)
    if form.SHIFTED:
        x = x + vector(table, BIAS, 0, columns, present)
    if form.HH:
        u = u * vector(table, GAMMA_HH, 0, columns, present)
    i, f, g, o = split_gates(x + u, form)
    return tl.sigmoid(i), tl.sigmoid(f), tanh(g), tl.sigmoid(o)


@no_type_check
@triton.jit
def _products(table, h_prev, t, B, count, rows, columns, present, form: tl.constexpr):
    """The input product and the recurrent one, normalized. Without FUSED, cuBLAS has computed the latter."""
    here = rows[:, None] * form.G + columns[None, :]
    mask = (rows < count)[:, None] & present[None, :]
    if form.FUSED:
        u = product(h_prev, rows, count, address(table, WEIGHT, form.LOW), columns, present, form.H, 4 * form.J, form)
    else:
        u = tl.load(address(table, PRODUCT, form.LOW) + here, mask=mask, other=0.0).to(tl.float32)
    at, of_statistics = t * B * form.G, t * form.G
    x = tl.load(address(table, X) + at + here, mask=mask, other=0.0)
    if form.HH:
        u = normalized(u, mask, count, address(table, MEAN_HH) + of_statistics, address(table, VAR_HH) + of_statistics,
                       columns, present, form)  # fmt: skip
    if form.IH:
        x = normalized(x, mask, count, address(table, MEAN_IH) + of_statistics, address(table, VAR_IH) + of_statistics,
                       columns, present, form)  # fmt: skip
    if form.KEEP:
        tl.store(address(table, U) + at + here, u, mask=mask)
        if form.IH:
            tl.debug_barrier()  # the memory may be that of x, which another thread may not have loaded yet
            tl.store(address(table, NORMAL_X) + at + here, x, mask=mask)
    return x, u


@no_type_check
@triton.jit
def _forward_step(table, t, form: tl.constexpr):
    B = tl.load(table + BATCH_SIZE).to(tl.int32)
    rows, units = tl.arange(0, form.TILE), tl.program_id(0) * form.J + tl.arange(0, form.J)
    columns, present = gate_columns(form)
    valid = units < form.H
    n = tl.load(address(table, RUNNING, tl.int32) + t) if form.PADDED else B
    count = B if form.ALL_COUNT else n
    of_units = rows[:, None] * form.H + units[None, :]
    running = (rows < n)[:, None] & valid[None, :]
    every = (rows < B)[:, None] & valid[None, :]
    h_prev = address(table, STATES) + t * B * form.H

    x, u = _products(table, h_prev, t, B, count, rows, columns, present, form)
    i, f, g, o = _gates(x, u, table, columns, present, form)
    if form.KEEP:
        c_prev = address(table, C) + t * B * form.H + of_units
        c_next = c_prev + B * form.H
    else:
        c_prev = address(table, C) + (t % 2) * B * form.H + of_units
        c_next = address(table, C) + ((t + 1) % 2) * B * form.H + of_units
    before = tl.load(c_prev, mask=every, other=0.0)
    c = tl.where(running, f * before + i * g, before)  # eq. 7
    tl.store(c_next, c, mask=every)
    z = c
    if form.CELL:
        counted = (rows < count)[:, None] & valid[None, :]
        z = normalized(c, counted, count, address(table, MEAN_C) + t * form.H, address(table, VAR_C) + t * form.H,
                       units, valid, form)  # fmt: skip
        z = z * vector(table, GAMMA_C, 0, units, valid)
    if form.CELL_SHIFTED:
        z = z + vector(table, BETA_C, 0, units, valid)
    h = o * tanh(tl.where(running, z, 0.0))  # eq. 8
    if form.PADDED:  # a finished sequence keeps its state
        h = tl.where(running, h, tl.load(h_prev + of_units, mask=every, other=0.0))
    tl.store(h_prev + B * form.H + of_units, h, mask=every)
    if not form.FUSED:
        tl.store(address(table, STATE, form.LOW) + of_units, h.to(form.LOW), mask=every)


@no_type_check
@triton.jit
def _gradient_of_h(table, t, T, B, rows, units, valid, form: tl.constexpr):
    """The gradient of h[t + 1]. That of a finished sequence passes through unchanged."""
    every = (rows < B)[:, None] & valid[None, :]
    here = rows[:, None] * form.H + units[None, :]
    if form.FUSED:
        left = address(table, U) + (t + 1) * B * form.G
        count = tl.where(t + 1 < T, B, 0)
        dh = product(left, rows, count, address(table, WEIGHT, form.LOW), units, valid, form.G, form.J, form)
    else:
        dh = tl.load(address(table, PRODUCT, form.LOW) + here, mask=every, other=0.0).to(tl.float32)
    dh += tl.load(address(table, DY) + t * B * form.H + here, mask=every, other=0.0)
    if form.PADDED:
        n_next = tl.load(address(table, RUNNING, tl.int32) + t + 1)
        dh += tl.load(address(table, DH) + here, mask=every & (rows >= n_next)[:, None], other=0.0)
    return dh


@no_type_check
@triton.jit
def _through_output(dh, o, c, table, narrow, count, running, counted, units, valid, form: tl.constexpr):
    """Backpropagate through eq. 8: the gradients of c and of the output gate's pre-activation."""
    z = c
    if form.CELL:
        mean, var = vector(table, MEAN_C, narrow, units, valid), vector(table, VAR_C, narrow, units, valid)
        c = (c - mean) / tl.sqrt(var + form.EPS)
        z = c * vector(table, GAMMA_C, 0, units, valid)
    if form.CELL_SHIFTED:
        z = z + vector(table, BETA_C, 0, units, valid)
    z = tanh(tl.where(running, z, 0.0))
    dz = tl.where(running, dh * o * (1.0 - z * z), 0.0)
    of_o = dh * z * o * (1.0 - o)
    total = tl.sum(dz, axis=0)
    if form.CELL_SHIFTED:
        add(address(table, DBETA_C), units, valid, total)
    if form.CELL:
        dz = through_norm(dz, total, c, counted, count, address(table, GAMMA_C), address(table, DGAMMA_C),
                          address(table, VAR_C) + narrow, units, valid, form)  # fmt: skip
    return dz, of_o


@no_type_check
@triton.jit
def _through_products(da, x, u, table, t, count, mask, columns, present, form: tl.constexpr):
    """Backpropagate through eq. 6: the gradients of the input product and of the recurrent one."""
    wide, du, dx = t * form.G, da, da
    total = tl.sum(da, axis=0)
    if form.SHIFTED:
        add(address(table, DBIAS), columns, present, total)
    if form.HH:
        du = through_norm(da, total, u, mask, count, address(table, GAMMA_HH), address(table, DGAMMA_HH),
                          address(table, VAR_HH) + wide, columns, present, form)  # fmt: skip
    if form.IH:
        dx = through_norm(da, total, x, mask, count, address(table, GAMMA_IH), address(table, DGAMMA_IH),
                          address(table, VAR_IH) + wide, columns, present, form)  # fmt: skip
    return dx, du


@no_type_check
@triton.jit
def _backward_step(table, t, form: tl.constexpr):
    T, B = tl.load(table + STEPS), tl.load(table + BATCH_SIZE).to(tl.int32)
    rows, units = tl.arange(0, form.TILE), tl.program_id(0) * form.J + tl.arange(0, form.J)
    columns, present = gate_columns(form)
    valid = units < form.H
    n = tl.load(address(table, RUNNING, tl.int32) + t) if form.PADDED else B
    count = B if form.ALL_COUNT else n
    at = t * B * form.G
    of_gates = rows[:, None] * form.G + columns[None, :]
    of_units = rows[:, None] * form.H + units[None, :]
    every = (rows < B)[:, None] & valid[None, :]
    counted = (rows < count)[:, None] & valid[None, :]
    all_gates, counted_gates = (rows < B)[:, None] & present[None, :], (rows < count)[:, None] & present[None, :]
    running = (rows < n)[:, None] & valid[None, :]

    dh = _gradient_of_h(table, t, T, B, rows, units, valid, form)
    u = tl.load(address(table, U) + at + of_gates, mask=counted_gates, other=0.0)
    x = tl.load(address(table, NORMAL_X) + at + of_gates, mask=counted_gates, other=0.0)
    i, f, g, o = _gates(x, u, table, columns, present, form)
    c_prev = address(table, C) + t * B * form.H + of_units
    c = tl.load(c_prev + B * form.H, mask=counted, other=0.0)
    before = tl.load(c_prev, mask=running, other=0.0)

    dz, of_o = _through_output(dh, o, c, table, t * form.H, count, running, counted, units, valid, form)
    # Through eq. 7 to the gates.
    dc = address(table, DC) + of_units
    d = tl.load(dc, mask=counted, other=0.0) + dz
    da = join_gates(d * g * i * (1.0 - i), d * before * f * (1.0 - f), d * i * (1.0 - g * g), of_o, form)
    da = tl.where((rows < n)[:, None] & present[None, :], da, 0.0)
    dx, du = _through_products(da, x, u, table, t, count, counted_gates, columns, present, form)
    tl.debug_barrier()  # all threads have loaded what is overwritten now
    tl.store(dc, tl.where(running, d * f, d), mask=counted)
    tl.store(address(table, U) + at + of_gates, du, mask=all_gates)
    tl.store(address(table, DX) + at + of_gates, dx, mask=all_gates)
    if form.PADDED:
        tl.store(address(table, DH) + of_units, dh, mask=every & (rows >= n)[:, None])
    if not form.FUSED:
        tl.store(address(table, STATE, form.LOW) + of_gates, du.to(form.LOW), mask=all_gates)


@no_type_check
@triton.jit(do_not_specialize=["offset"])
def forward_steps(table, offset, form: tl.constexpr):
    """Forward step clock + offset: write u, the normalized x, c, h and the statistics.

    Without KEEP, only h and the last c are kept. With WHOLE, all steps from this one on are computed, and the programs
    wait for each other after each step: all of them must be resident.
    """
    t = tl.load(table + CLOCK) + offset
    if form.WHOLE:
        arrived, T, target = address(table, ARRIVED, tl.int32), tl.load(table + STEPS), tl.num_programs(0)
        while t < T:
            _forward_step(table, t, form)
            wait_for_all(arrived, target)
            target += tl.num_programs(0)
            t += 1
    else:
        _forward_step(table, t, form)


@no_type_check
@triton.jit(do_not_specialize=["offset"])
def backward_steps(table, offset, form: tl.constexpr):
    """Backward step clock - offset: overwrite u with its gradient and dc with that of c[t]; write dx.

    Adds to the gradients of the parameters. dx may have the memory of normal_x. WHOLE is as in `forward_steps`.
    """
    t = tl.load(table + CLOCK) - offset
    if form.WHOLE:
        arrived, target = address(table, ARRIVED, tl.int32), tl.num_programs(0)
        while t >= 0:
            _backward_step(table, t, form)
            wait_for_all(arrived, target)
            target += tl.num_programs(0)
            t -= 1
    else:
        _backward_step(table, t, form)
