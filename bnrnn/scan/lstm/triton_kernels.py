"""The Triton kernels of one time step, forward and backward.

A program computes J units with their four gates, for the whole batch of one replica. It can therefore compute the batch
statistics of its units without data of other programs. Equation numbers are those of Cooijmans et al. 2016; fused.py
has the equations of the backward pass.
"""

from typing import no_type_check

import triton
import triton.language as tl

from bnrnn.scan.triton_shared.blocks import add, product_tile, standardize, statistics, tanh, through_norm


@no_type_check
@triton.jit
def _gate(u, x, row, rows, columns, mask, valid, gamma_hh, gamma_ih, bias):
    """The pre-activation (eq. 6) of one gate for a tile."""
    here = rows[:, None] * row + columns[None, :]
    a = tl.load(u + here, mask=mask, other=0.0)
    if gamma_hh is not None:
        a *= tl.load(gamma_hh + columns, mask=valid, other=0.0)[None, :]
    b = tl.load(x + here, mask=mask, other=0.0)
    if gamma_ih is not None:
        b *= tl.load(gamma_ih + columns, mask=valid, other=0.0)[None, :]
    if bias is not None:
        b += tl.load(bias + columns, mask=valid, other=0.0)[None, :]
    return a + b


@no_type_check
@triton.jit(do_not_specialize=["t"])
def forward_step(t, x, u, c, h, weight, gamma_ih, gamma_hh, bias, gamma_c, beta_c, mean_ih, var_ih, mean_hh, var_hh,
             mean_c, var_c, running, eps, R: tl.constexpr, B: tl.constexpr, H: tl.constexpr, J: tl.constexpr,
             TILE: tl.constexpr, K: tl.constexpr, U_STEPS: tl.constexpr, BATCH: tl.constexpr, ALL_COUNT: tl.constexpr,
             FUSED: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Forward step t: normalize x in place, write u, c[t + 1], h[t + 1] and the statistics.

    Without FUSED, u contains the recurrent product on entry.
    """
    replica = tl.program_id(1)
    units = tl.program_id(0) * J + tl.arange(0, J)
    valid = units < H
    n = tl.load(running + t) if running is not None else B
    count = B if ALL_COUNT else n
    at = (t.to(tl.int64) * R + replica) * B
    x += at * 4 * H
    u += (at * 4 * H) if U_STEPS else replica * B * 4 * H
    c_prev, h_prev = c + at * H, h + at * H
    c, h = c_prev + R * B * H, h_prev + R * B * H
    wide, narrow = (t.to(tl.int64) * R + replica) * 4 * H, (t.to(tl.int64) * R + replica) * H
    gamma_ih = gamma_ih + replica * 4 * H if gamma_ih is not None else gamma_ih
    gamma_hh = gamma_hh + replica * 4 * H if gamma_hh is not None else gamma_hh
    bias = bias + replica * 4 * H if bias is not None else bias
    gamma_c = gamma_c + replica * H if gamma_c is not None else gamma_c
    beta_c = beta_c + replica * H if beta_c is not None else beta_c

    if FUSED:
        weight += replica * 4 * H * H
        for first in range(0, B, TILE):
            rows = first + tl.arange(0, TILE)
            for gate in tl.static_range(4):
                total = product_tile(h_prev, H, rows, count, weight, 1, H, gate * H + units, valid, H, J, TILE, K, LOW,
                                     WIDEN, PRECISION)  # fmt: skip
                mask = (rows < count)[:, None] & valid[None, :]
                tl.store(u + rows[:, None] * 4 * H + gate * H + units[None, :], total, mask=mask)
        tl.debug_barrier()  # other threads may read the values that a thread has written
    for gate in tl.static_range(4):
        columns = gate * H + units
        if gamma_hh is not None:
            standardize(u, 4 * H, columns, valid, count, mean_hh + wide, var_hh + wide, eps, BATCH, B, TILE, J)
        if gamma_ih is not None:
            standardize(x, 4 * H, columns, valid, count, mean_ih + wide, var_ih + wide, eps, BATCH, B, TILE, J)
    tl.debug_barrier()
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        all_rows = (rows < B)[:, None] & valid[None, :]
        mask = (rows < n)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        i = tl.sigmoid(_gate(u, x, 4 * H, rows, units, mask, valid, gamma_hh, gamma_ih, bias))
        f = tl.sigmoid(_gate(u, x, 4 * H, rows, H + units, mask, valid, gamma_hh, gamma_ih, bias))
        g = tanh(_gate(u, x, 4 * H, rows, 2 * H + units, mask, valid, gamma_hh, gamma_ih, bias))
        before = tl.load(c_prev + here, mask=all_rows, other=0.0)
        tl.store(c + here, tl.where(mask, f * before + i * g, before), mask=all_rows)  # eq. 7
    tl.debug_barrier()
    mean = tl.zeros([J], tl.float32)
    scale = tl.full([J], 1.0, tl.float32)
    shift = tl.zeros([J], tl.float32)
    if gamma_c is not None:
        mean, rstd = statistics(c, H, units, valid, count, mean_c + narrow, var_c + narrow, eps, BATCH, B, TILE, J)
        scale = rstd * tl.load(gamma_c + units, mask=valid, other=0.0)
    if beta_c is not None:
        shift = tl.load(beta_c + units, mask=valid, other=0.0)
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        all_rows = (rows < B)[:, None] & valid[None, :]
        mask = (rows < n)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        o = tl.sigmoid(_gate(u, x, 4 * H, rows, 3 * H + units, mask, valid, gamma_hh, gamma_ih, bias))
        z = (tl.load(c + here, mask=mask, other=0.0) - mean[None, :]) * scale[None, :] + shift[None, :]
        z = tl.where(mask, z, 0.0)  # if one sequence runs, the variance is 0 and rstd would make the others overflow
        before = tl.load(h_prev + here, mask=all_rows, other=0.0)
        tl.store(h + here, tl.where(mask, o * tanh(z), before), mask=all_rows)  # eq. 8


@no_type_check
@triton.jit(do_not_specialize=["t"])
def backward_step(t, x, u, c, weight, gamma_ih, gamma_hh, bias, gamma_c, beta_c, var_ih, var_hh, mean_c, var_c, running,
              eps, dy, product, dh, dc, dz, da, dgamma_ih, dgamma_hh, dbias, dgamma_c, dbeta_c, R: tl.constexpr,
              B: tl.constexpr, H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
              LAST: tl.constexpr, BATCH: tl.constexpr, ALL_COUNT: tl.constexpr, FUSED: tl.constexpr,
              LOW: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Backward step t: overwrite x and u with their gradients and dc with that of c[t]; add to those of the parameters.

    On entry, dh is the complete gradient of h[t + 2] and, without FUSED, `product` is du[t + 1] W_hh. On return, dh is
    the complete gradient of h[t + 1]. LAST marks the last step: it has no product, and dh is the gradient of the last
    state. dz (R, B, H) and da (R, B, 4H) are scratch memory.
    """
    replica = tl.program_id(1)
    units = tl.program_id(0) * J + tl.arange(0, J)
    valid = units < H
    n = tl.load(running + t) if running is not None else B
    count = B if ALL_COUNT else n
    at = (t.to(tl.int64) * R + replica) * B
    u_next = u + (at + R * B) * 4 * H
    x += at * 4 * H
    u += at * 4 * H
    dy += at * H
    c_prev = c + at * H
    c = c_prev + R * B * H
    wide, narrow = (t.to(tl.int64) * R + replica) * 4 * H, (t.to(tl.int64) * R + replica) * H
    dh += replica * B * H
    dc += replica * B * H
    dz += replica * B * H
    da += replica * B * 4 * H
    gamma_ih = gamma_ih + replica * 4 * H if gamma_ih is not None else gamma_ih
    gamma_hh = gamma_hh + replica * 4 * H if gamma_hh is not None else gamma_hh
    dgamma_ih = dgamma_ih + replica * 4 * H if dgamma_ih is not None else dgamma_ih
    dgamma_hh = dgamma_hh + replica * 4 * H if dgamma_hh is not None else dgamma_hh
    bias = bias + replica * 4 * H if bias is not None else bias
    dbias = dbias + replica * 4 * H if dbias is not None else dbias
    gamma_c = gamma_c + replica * H if gamma_c is not None else gamma_c
    dgamma_c = dgamma_c + replica * H if dgamma_c is not None else dgamma_c
    beta_c = beta_c + replica * H if beta_c is not None else beta_c
    dbeta_c = dbeta_c + replica * H if dbeta_c is not None else dbeta_c
    var_ih = var_ih + wide if var_ih is not None else var_ih
    var_hh = var_hh + wide if var_hh is not None else var_hh

    # Compute the complete gradient of h[t + 1].
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        all_rows = (rows < B)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        grad = tl.load(dy + here, mask=all_rows, other=0.0)
        if LAST:
            grad += tl.load(dh + here, mask=all_rows, other=0.0)
        else:
            if FUSED:
                grad += product_tile(u_next, 4 * H, rows, B, weight + replica * 4 * H * H, H, 1, units, valid, 4 * H,
                                     J, TILE, K, LOW, WIDEN, PRECISION)  # fmt: skip
            else:
                grad += tl.load(product + replica * B * H + here, mask=all_rows, other=0.0)
            if running is not None:  # the gradient of a finished sequence passes through unchanged
                ended = (rows >= tl.load(running + t + 1))[:, None] & all_rows
                grad += tl.load(dh + here, mask=ended, other=0.0)
        tl.store(dh + here, grad, mask=all_rows)
    tl.debug_barrier()

    # Backpropagate through eq. 8.
    mean, rstd = tl.zeros([J], tl.float32), tl.full([J], 1.0, tl.float32)
    gamma, shift = tl.full([J], 1.0, tl.float32), tl.zeros([J], tl.float32)
    if gamma_c is not None:
        mean = tl.load(mean_c + narrow + units, mask=valid, other=0.0)
        rstd = 1.0 / tl.sqrt(tl.load(var_c + narrow + units, mask=valid, other=1.0) + eps)
        gamma = tl.load(gamma_c + units, mask=valid, other=0.0)
    if beta_c is not None:
        shift = tl.load(beta_c + units, mask=valid, other=0.0)
    sum_dz, sum_dzc = tl.zeros([J], tl.float32), tl.zeros([J], tl.float32)
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < n)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        o = tl.sigmoid(_gate(u, x, 4 * H, rows, 3 * H + units, mask, valid, gamma_hh, gamma_ih, bias))
        c_hat = (tl.load(c + here, mask=mask, other=0.0) - mean[None, :]) * rstd[None, :]
        z = tanh(tl.where(mask, gamma[None, :] * c_hat + shift[None, :], 0.0))
        grad = tl.load(dh + here, mask=mask, other=0.0)
        d = tl.where(mask, grad * o * (1.0 - z * z), 0.0)
        sum_dz += tl.sum(d, axis=0)
        sum_dzc += tl.sum(d * c_hat, axis=0)
        tl.store(dz + here, d, mask=(rows < B)[:, None] & valid[None, :])
        wide_here = rows[:, None] * 4 * H + 3 * H + units[None, :]
        tl.store(da + wide_here, tl.where(mask, grad * z * o * (1.0 - o), 0.0),
                 mask=(rows < B)[:, None] & valid[None, :])  # fmt: skip
    if beta_c is not None:
        add(dbeta_c, units, valid, sum_dz)
    if gamma_c is not None:
        add(dgamma_c, units, valid, sum_dzc)
        inverse = 1.0 / count if BATCH else 0.0
        sum_dz *= inverse
        sum_dzc *= inverse
    else:
        sum_dz *= 0.0
        sum_dzc *= 0.0
    tl.debug_barrier()

    # Backpropagate through eq. 7 to the gates.
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < n)[:, None] & valid[None, :]
        counted = (rows < count)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        i = tl.sigmoid(_gate(u, x, 4 * H, rows, units, mask, valid, gamma_hh, gamma_ih, bias))
        f = tl.sigmoid(_gate(u, x, 4 * H, rows, H + units, mask, valid, gamma_hh, gamma_ih, bias))
        g = tanh(_gate(u, x, 4 * H, rows, 2 * H + units, mask, valid, gamma_hh, gamma_ih, bias))
        c_hat = (tl.load(c + here, mask=counted, other=0.0) - mean[None, :]) * rstd[None, :]
        through = tl.load(dz + here, mask=counted, other=0.0) - sum_dz[None, :] - c_hat * sum_dzc[None, :]
        d = tl.load(dc + here, mask=counted, other=0.0) + (gamma * rstd)[None, :] * through
        tl.store(dc + here, tl.where(mask, d * f, d), mask=counted)
        all_rows = (rows < B)[:, None] & valid[None, :]
        before = tl.load(c_prev + here, mask=mask, other=0.0)
        wide_here = rows[:, None] * 4 * H + units[None, :]
        tl.store(da + wide_here, tl.where(mask, d * g * i * (1.0 - i), 0.0), mask=all_rows)
        tl.store(da + wide_here + H, tl.where(mask, d * before * f * (1.0 - f), 0.0), mask=all_rows)
        tl.store(da + wide_here + 2 * H, tl.where(mask, d * i * (1.0 - g * g), 0.0), mask=all_rows)
    tl.debug_barrier()

    # Backpropagate through eq. 6.
    for gate in tl.static_range(4):
        columns = gate * H + units
        if bias is not None:
            total = tl.zeros([J], tl.float32)
            for first in range(0, B, TILE):
                rows = first + tl.arange(0, TILE)
                mask = (rows < n)[:, None] & valid[None, :]
                total += tl.sum(tl.load(da + rows[:, None] * 4 * H + columns[None, :], mask=mask, other=0.0), axis=0)
            add(dbias, columns, valid, total)
        through_norm(u, da, 4 * H, columns, valid, count, gamma_hh, dgamma_hh, var_hh, eps, BATCH, B, TILE, J)
        through_norm(x, da, 4 * H, columns, valid, count, gamma_ih, dgamma_ih, var_ih, eps, BATCH, B, TILE, J)
