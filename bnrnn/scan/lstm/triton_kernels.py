"""The Triton kernels of one time step, forward and backward, and of a whole sequence.

A program computes J units with their four gates, for the whole batch of one replica: one loop over the depth of the
recurrent product, whose tile (TILE, 4J) stays in registers until h is written. Equation numbers are those of Cooijmans
et al. 2016; fused.py has the equations of the backward pass.

The arrays of a scan, by the entries of the table that has their addresses. T, B, H as everywhere; R replicas:
    running (T + 1): number of sequences that run at each step, then 0; only with PADDED
    x, normal_x, u, dx (R, T, B, 4H); dy (R, T, B, H); h (R, T + 1, B, H)
    c (R, T + 1, B, H), or (R, 2, B, H) without KEEP: steps take turns
    weight (R, 4H, H), for the backward pass (R, H, 4H), in the precision of products
    state, product: without FUSED, the left factor of the next product, and the product, in that precision
    arrived (R): the number of programs that have computed their steps, in the kernels of whole sequences; 0 at first
    dh, dc (R, B, H); parameters and their gradients (R, 4H) or (R, H); statistics (R, T, 4H) or (R, T, H)
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


@no_type_check
@triton.jit
def _gates(x, u, table, wide, columns, present, IH: tl.constexpr, HH: tl.constexpr, SHIFTED: tl.constexpr,
           TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Input gate, forget gate, candidate and output gate (eq. 6), from the values before scale and shift."""
    if IH:
        x = x * vector(table, GAMMA_IH, wide, columns, present)
    if SHIFTED:
        x = x + vector(table, BIAS, wide, columns, present)
    if HH:
        u = u * vector(table, GAMMA_HH, wide, columns, present)
    i, f, g, o = split_gates(x + u, TILE, J)
    return tl.sigmoid(i), tl.sigmoid(f), tanh(g), tl.sigmoid(o)


@no_type_check
@triton.jit
def _products(table, h_prev, replica, step, B, count, rows, columns, present, eps, H: tl.constexpr, J: tl.constexpr,
              TILE: tl.constexpr, K: tl.constexpr, IH: tl.constexpr, HH: tl.constexpr, BATCH: tl.constexpr,
              KEEP: tl.constexpr, FUSED: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """The input product and the recurrent one, normalized. Without FUSED, cuBLAS has computed the latter."""
    here = rows[:, None] * 4 * H + columns[None, :]
    mask = (rows < count)[:, None] & present[None, :]
    if FUSED:
        u = product(h_prev, rows, count, address(table, WEIGHT, LOW) + replica * 4 * H * H, columns, present, H, 4 * J,
                    TILE, K, LOW, WIDEN, PRECISION)  # fmt: skip
    else:
        u = tl.load(address(table, PRODUCT, LOW) + replica * B * 4 * H + here, mask=mask, other=0.0).to(tl.float32)
    at, of_statistics = step * B * 4 * H, step * 4 * H
    x = tl.load(address(table, X) + at + here, mask=mask, other=0.0)
    if HH:
        u = normalized(u, mask, count, address(table, MEAN_HH) + of_statistics, address(table, VAR_HH) + of_statistics,
                       columns, present, eps, BATCH)  # fmt: skip
    if IH:
        x = normalized(x, mask, count, address(table, MEAN_IH) + of_statistics, address(table, VAR_IH) + of_statistics,
                       columns, present, eps, BATCH)  # fmt: skip
    if KEEP:
        tl.store(address(table, U) + at + here, u, mask=mask)
        if IH:
            tl.debug_barrier()  # the memory may be that of x, which another thread may not have loaded yet
            tl.store(address(table, NORMAL_X) + at + here, x, mask=mask)
    return x, u


@no_type_check
@triton.jit
def _forward(table, t, eps, H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, IH: tl.constexpr,
             HH: tl.constexpr, SHIFTED: tl.constexpr, CELL: tl.constexpr, CELL_SHIFTED: tl.constexpr,
             BATCH: tl.constexpr, PADDED: tl.constexpr, ALL_COUNT: tl.constexpr, KEEP: tl.constexpr,
             FUSED: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    T, B = tl.load(table + STEPS), tl.load(table + BATCH_SIZE).to(tl.int32)
    replica = tl.program_id(1).to(tl.int64)
    rows, units = tl.arange(0, TILE), tl.program_id(0) * J + tl.arange(0, J)
    columns, present = gate_columns(tl.program_id(0) * J, H, 4, 4, J)
    valid = units < H
    n = tl.load(address(table, RUNNING, tl.int32) + t) if PADDED else B
    count = B if ALL_COUNT else n
    narrow = (replica * T + t) * H
    of_units = rows[:, None] * H + units[None, :]
    running = (rows < n)[:, None] & valid[None, :]
    every = (rows < B)[:, None] & valid[None, :]
    h_prev = address(table, STATES) + (replica * (T + 1) + t) * B * H

    x, u = _products(table, h_prev, replica, replica * T + t, B, count, rows, columns, present, eps, H, J, TILE, K, IH,
                     HH, BATCH, KEEP, FUSED, LOW, WIDEN, PRECISION)  # fmt: skip
    i, f, g, o = _gates(x, u, table, replica * 4 * H, columns, present, IH, HH, SHIFTED, TILE, J)
    if KEEP:
        c_prev = address(table, C) + (replica * (T + 1) + t) * B * H + of_units
        c_next = c_prev + B * H
    else:
        c_prev = address(table, C) + (replica * 2 + t % 2) * B * H + of_units
        c_next = address(table, C) + (replica * 2 + (t + 1) % 2) * B * H + of_units
    before = tl.load(c_prev, mask=every, other=0.0)
    c = tl.where(running, f * before + i * g, before)  # eq. 7
    tl.store(c_next, c, mask=every)
    z = c
    if CELL:
        counted = (rows < count)[:, None] & valid[None, :]
        z = normalized(c, counted, count, address(table, MEAN_C) + narrow, address(table, VAR_C) + narrow, units, valid,
                       eps, BATCH)  # fmt: skip
        z = z * vector(table, GAMMA_C, replica * H, units, valid)
    if CELL_SHIFTED:
        z = z + vector(table, BETA_C, replica * H, units, valid)
    h = o * tanh(tl.where(running, z, 0.0))  # eq. 8
    if PADDED:  # a finished sequence keeps its state
        h = tl.where(running, h, tl.load(h_prev + of_units, mask=every, other=0.0))
    tl.store(h_prev + B * H + of_units, h, mask=every)
    if not FUSED:
        tl.store(address(table, STATE, LOW) + replica * B * H + of_units, h.to(LOW), mask=every)


@no_type_check
@triton.jit
def _gradient_of_h(table, t, replica, T, B, rows, units, valid, H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr,
                   K: tl.constexpr, PADDED: tl.constexpr, FUSED: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """The gradient of h[t + 1]. That of a finished sequence passes through unchanged."""
    every = (rows < B)[:, None] & valid[None, :]
    here = rows[:, None] * H + units[None, :]
    if FUSED:
        left = address(table, U) + (replica * T + t + 1) * B * 4 * H
        right = address(table, WEIGHT, LOW) + replica * 4 * H * H
        count = tl.where(t + 1 < T, B, 0)
        dh = product(left, rows, count, right, units, valid, 4 * H, J, TILE, K, LOW, WIDEN, PRECISION)
    else:
        dh = address(table, PRODUCT, LOW) + replica * B * H + here
        dh = tl.load(dh, mask=every, other=0.0).to(tl.float32)
    dh += tl.load(address(table, DY) + (replica * T + t) * B * H + here, mask=every, other=0.0)
    if PADDED:
        n_next = tl.load(address(table, RUNNING, tl.int32) + t + 1)
        passed = address(table, DH) + replica * B * H + here
        dh += tl.load(passed, mask=every & (rows >= n_next)[:, None], other=0.0)
    return dh


@no_type_check
@triton.jit
def _through_output(dh, o, c, table, replica, narrow, count, running, counted, units, valid, eps, H: tl.constexpr,
                    CELL: tl.constexpr, CELL_SHIFTED: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """Backpropagate through eq. 8: the gradients of c and of the output gate's pre-activation."""
    z = c
    if CELL:
        mean, var = vector(table, MEAN_C, narrow, units, valid), vector(table, VAR_C, narrow, units, valid)
        c = (c - mean) / tl.sqrt(var + eps)
        z = c * vector(table, GAMMA_C, replica * H, units, valid)
    if CELL_SHIFTED:
        z = z + vector(table, BETA_C, replica * H, units, valid)
    z = tanh(tl.where(running, z, 0.0))
    dz = tl.where(running, dh * o * (1.0 - z * z), 0.0)
    of_o = dh * z * o * (1.0 - o)
    total = tl.sum(dz, axis=0)
    if CELL_SHIFTED:
        add(address(table, DBETA_C) + replica * H, units, valid, total)
    if CELL:
        dz = through_norm(dz, total, c, counted, count, address(table, GAMMA_C) + replica * H,
                          address(table, DGAMMA_C) + replica * H, address(table, VAR_C) + narrow, units, valid, eps,
                          BATCH)  # fmt: skip
    return dz, of_o


@no_type_check
@triton.jit
def _through_products(da, x, u, table, replica, step, count, mask, columns, present, eps, H: tl.constexpr,
                      IH: tl.constexpr, HH: tl.constexpr, SHIFTED: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """Backpropagate through eq. 6: the gradients of the input product and of the recurrent one."""
    wide, parameters = step * 4 * H, replica * 4 * H
    du, dx = da, da
    total = tl.sum(da, axis=0)
    if SHIFTED:
        add(address(table, DBIAS) + parameters, columns, present, total)
    if HH:
        du = through_norm(da, total, u, mask, count, address(table, GAMMA_HH) + parameters,
                          address(table, DGAMMA_HH) + parameters, address(table, VAR_HH) + wide, columns, present, eps,
                          BATCH)  # fmt: skip
    if IH:
        dx = through_norm(da, total, x, mask, count, address(table, GAMMA_IH) + parameters,
                          address(table, DGAMMA_IH) + parameters, address(table, VAR_IH) + wide, columns, present, eps,
                          BATCH)  # fmt: skip
    return dx, du


@no_type_check
@triton.jit
def _backward(table, t, eps, H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, IH: tl.constexpr,
              HH: tl.constexpr, SHIFTED: tl.constexpr, CELL: tl.constexpr, CELL_SHIFTED: tl.constexpr,
              BATCH: tl.constexpr, PADDED: tl.constexpr, ALL_COUNT: tl.constexpr, FUSED: tl.constexpr,
              LOW: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    T, B = tl.load(table + STEPS), tl.load(table + BATCH_SIZE).to(tl.int32)
    replica = tl.program_id(1).to(tl.int64)
    rows, units = tl.arange(0, TILE), tl.program_id(0) * J + tl.arange(0, J)
    columns, present = gate_columns(tl.program_id(0) * J, H, 4, 4, J)
    valid = units < H
    n = tl.load(address(table, RUNNING, tl.int32) + t) if PADDED else B
    count = B if ALL_COUNT else n
    step = (replica * T + t) * B
    of_gates = rows[:, None] * 4 * H + columns[None, :]
    of_units = rows[:, None] * H + units[None, :]
    every = (rows < B)[:, None] & valid[None, :]
    counted = (rows < count)[:, None] & valid[None, :]
    all_gates, counted_gates = (rows < B)[:, None] & present[None, :], (rows < count)[:, None] & present[None, :]
    running = (rows < n)[:, None] & valid[None, :]

    dh = _gradient_of_h(table, t, replica, T, B, rows, units, valid, H, J, TILE, K, PADDED, FUSED, LOW, WIDEN,
                        PRECISION)  # fmt: skip
    u = tl.load(address(table, U) + step * 4 * H + of_gates, mask=counted_gates, other=0.0)
    x = tl.load(address(table, NORMAL_X) + step * 4 * H + of_gates, mask=counted_gates, other=0.0)
    i, f, g, o = _gates(x, u, table, replica * 4 * H, columns, present, IH, HH, SHIFTED, TILE, J)
    c_prev = address(table, C) + (replica * (T + 1) + t) * B * H + of_units
    c = tl.load(c_prev + B * H, mask=counted, other=0.0)
    before = tl.load(c_prev, mask=running, other=0.0)

    dz, of_o = _through_output(dh, o, c, table, replica, (replica * T + t) * H, count, running, counted, units, valid,
                               eps, H, CELL, CELL_SHIFTED, BATCH)  # fmt: skip
    # Through eq. 7 to the gates.
    dc = address(table, DC) + replica * B * H + of_units
    d = tl.load(dc, mask=counted, other=0.0) + dz
    da = join_gates(d * g * i * (1.0 - i), d * before * f * (1.0 - f), d * i * (1.0 - g * g), of_o, TILE, J)
    da = tl.where((rows < n)[:, None] & present[None, :], da, 0.0)
    dx, du = _through_products(da, x, u, table, replica, replica * T + t, count, counted_gates, columns, present, eps,
                               H, IH, HH, SHIFTED, BATCH)  # fmt: skip
    tl.debug_barrier()  # all threads have loaded what is overwritten now
    tl.store(dc, tl.where(running, d * f, d), mask=counted)
    tl.store(address(table, U) + step * 4 * H + of_gates, du, mask=all_gates)
    tl.store(address(table, DX) + step * 4 * H + of_gates, dx, mask=all_gates)
    if PADDED:
        passed = address(table, DH) + replica * B * H + of_units
        tl.store(passed, dh, mask=every & (rows >= n)[:, None])
    if not FUSED:
        tl.store(address(table, STATE, LOW) + replica * B * 4 * H + of_gates, du.to(LOW), mask=all_gates)


@no_type_check
@triton.jit(do_not_specialize=["offset"])
def forward_step(table, offset, eps, H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
                 IH: tl.constexpr, HH: tl.constexpr, SHIFTED: tl.constexpr, CELL: tl.constexpr,
                 CELL_SHIFTED: tl.constexpr, BATCH: tl.constexpr, PADDED: tl.constexpr, ALL_COUNT: tl.constexpr,
                 KEEP: tl.constexpr, FUSED: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Forward step clock + offset: write u, the normalized x, c, h and the statistics.

    IH, HH and CELL say which parts are normalized (see Statistics), SHIFTED and CELL_SHIFTED whether the gates and the
    cell output are shifted. With BATCH, the batch's statistics are used, to which with ALL_COUNT finished sequences
    count too. Without KEEP, only h and the last c are kept.
    """
    _forward(table, tl.load(table + CLOCK) + offset, eps, H, J, TILE, K, IH, HH, SHIFTED, CELL, CELL_SHIFTED, BATCH,
             PADDED, ALL_COUNT, KEEP, FUSED, LOW, WIDEN, PRECISION)  # fmt: skip


@no_type_check
@triton.jit(do_not_specialize=["offset"])
def backward_step(table, offset, eps, H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
                  IH: tl.constexpr, HH: tl.constexpr, SHIFTED: tl.constexpr, CELL: tl.constexpr,
                  CELL_SHIFTED: tl.constexpr, BATCH: tl.constexpr, PADDED: tl.constexpr, ALL_COUNT: tl.constexpr,
                  FUSED: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Backward step clock - offset: overwrite u with its gradient and dc with that of c[t]; write dx.

    Adds to the gradients of the parameters. dx may have the memory of normal_x.
    """
    _backward(table, tl.load(table + CLOCK) - offset, eps, H, J, TILE, K, IH, HH, SHIFTED, CELL, CELL_SHIFTED, BATCH,
              PADDED, ALL_COUNT, FUSED, LOW, WIDEN, PRECISION)  # fmt: skip


@no_type_check
@triton.jit
def forward_sequence(table, eps, H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
                     IH: tl.constexpr, HH: tl.constexpr, SHIFTED: tl.constexpr, CELL: tl.constexpr,
                     CELL_SHIFTED: tl.constexpr, BATCH: tl.constexpr, PADDED: tl.constexpr, ALL_COUNT: tl.constexpr,
                     KEEP: tl.constexpr, FUSED: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    """`forward_step` for all steps. The programs of a replica wait for each other after each: all must be resident."""
    arrived, t, T = address(table, ARRIVED, tl.int32) + tl.program_id(1), tl.load(table + CLOCK), tl.load(table + STEPS)
    passed = tl.num_programs(0)
    while t < T:
        _forward(table, t, eps, H, J, TILE, K, IH, HH, SHIFTED, CELL, CELL_SHIFTED, BATCH, PADDED, ALL_COUNT, KEEP,
                 FUSED, LOW, WIDEN, PRECISION)  # fmt: skip
        wait_for_all(arrived, passed)
        passed += tl.num_programs(0)
        t += 1


@no_type_check
@triton.jit
def backward_sequence(table, eps, H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
                      IH: tl.constexpr, HH: tl.constexpr, SHIFTED: tl.constexpr, CELL: tl.constexpr,
                      CELL_SHIFTED: tl.constexpr, BATCH: tl.constexpr, PADDED: tl.constexpr, ALL_COUNT: tl.constexpr,
                      FUSED: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr,
                      PRECISION: tl.constexpr):  # fmt: skip
    """`backward_step` for all steps, as in `forward_sequence`."""
    arrived, t = address(table, ARRIVED, tl.int32) + tl.program_id(1), tl.load(table + CLOCK)
    passed = tl.num_programs(0)
    while t >= 0:
        _backward(table, t, eps, H, J, TILE, K, IH, HH, SHIFTED, CELL, CELL_SHIFTED, BATCH, PADDED, ALL_COUNT, FUSED,
                  LOW, WIDEN, PRECISION)  # fmt: skip
        wait_for_all(arrived, passed)
        passed += tl.num_programs(0)
        t -= 1
