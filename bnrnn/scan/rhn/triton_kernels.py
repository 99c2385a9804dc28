"""The Triton kernels of one highway layer of one time step, forward and backward.

A program computes J units with their gates for the whole batch, as in lstm/triton_kernels.py. The kernel of a layer
also normalizes the state that enters the next layer, because it has just computed that state; the backward kernels are
split in the same way. fused.py has the equations.

`place` numbers the layers of the whole sequence: place t D + d is layer d of step t.
"""

from typing import no_type_check

import triton
import triton.language as tl

from bnrnn.scan.triton_shared.blocks import add, norm_terms, product_tile, standardize, tanh, through_norm


@no_type_check
@triton.jit
def _scaled(v, row, rows, columns, mask, valid, gamma, bias):
    """gamma v + bias for a tile."""
    v = tl.load(v + rows[:, None] * row + columns[None, :], mask=mask, other=0.0)
    if gamma is not None:
        v *= tl.load(gamma + columns, mask=valid, other=0.0)[None, :]
    if bias is not None:
        v += tl.load(bias + columns, mask=valid, other=0.0)[None, :]
    return v


@no_type_check
@triton.jit
def _enter(state, normal, entering, units, valid, count, gamma, beta, mean, var, eps, BATCH: tl.constexpr,
           B: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """For the first `count` rows, write the normalized state to `normal` and its scaled value to `entering`."""
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        here = rows[:, None] * H + units[None, :]
        mask = (rows < count)[:, None] & valid[None, :]  # other rows must be 0: they are multiplied with gradients of 0
        tl.store(normal + here, tl.load(state + here, mask=mask, other=0.0), mask=(rows < B)[:, None] & valid[None, :])
    tl.debug_barrier()
    standardize(normal, H, units, valid, count, mean, var, eps, BATCH, B, TILE, J)
    tl.debug_barrier()
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < count)[:, None] & valid[None, :]
        v = _scaled(normal, H, rows, units, mask, valid, gamma, beta)
        tl.store(entering + rows[:, None] * H + units[None, :], v, mask=mask)


@no_type_check
@triton.jit
def enter_first(states, normal, entering, gamma_s, beta_s, mean_s, var_s, running, eps, B: tl.constexpr,
                H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """Normalize the initial state, which enters the first layer of the first step."""
    units = tl.program_id(0) * J + tl.arange(0, J)
    count = tl.load(running) if running is not None else B
    _enter(states, normal, entering, units, units < H, count, gamma_s, beta_s, mean_s, var_s, eps, BATCH, B, H, TILE, J)


@no_type_check
@triton.jit(do_not_specialize=["t", "d"])
def forward_layer(t, d, x, a, states, normal, entering, weight, bias, gamma_x, gamma_s, beta_s, gamma_z, mean_x, var_x,
                  mean_s, var_s, mean_z, var_z, running, eps, B: tl.constexpr, H: tl.constexpr, Q: tl.constexpr,
                  D: tl.constexpr, L: tl.constexpr, FIRST: tl.constexpr, ENTERED: tl.constexpr,
                  NEXT_ENTERS: tl.constexpr, TOP: tl.constexpr, KEEP: tl.constexpr, J: tl.constexpr,
                  TILE: tl.constexpr, K: tl.constexpr, BATCH: tl.constexpr, FUSED: tl.constexpr, LOW: tl.constexpr,
                  WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Forward pass of layer d of step t: write a and states[place + 1], and, if NEXT_ENTERS, normalize the latter.

    There are Q gates, and the first L layers normalize the state that enters them. FIRST means d = 0, TOP means
    d = D - 1, ENTERED means d < L. Without KEEP, all layers share one a and one normal. Without FUSED, a contains the
    recurrent product on entry.
    """
    units = tl.program_id(0) * J + tl.arange(0, J)
    valid = units < H
    G: tl.constexpr = Q * H
    n = tl.load(running + t) if running is not None else B
    t, place = t.to(tl.int64), t.to(tl.int64) * D + d
    x += t * B * G
    if KEEP:
        a += place * B * G
    before = states + place * B * H
    state = before + B * H
    gamma_z = gamma_z + d * G if gamma_z is not None else gamma_z
    bias = bias + d * G if bias is not None else bias

    if FUSED:
        left = entering + (place % 2) * B * H if ENTERED else before
        weight += d * G * H
        for first in range(0, B, TILE):
            rows = first + tl.arange(0, TILE)
            for gate in tl.static_range(Q):
                total = product_tile(left, H, rows, n, weight, 1, H, gate * H + units, valid, H, J, TILE, K, LOW, WIDEN,
                                     PRECISION)  # fmt: skip
                mask = (rows < n)[:, None] & valid[None, :]
                tl.store(a + rows[:, None] * G + gate * H + units[None, :], total, mask=mask)
        tl.debug_barrier()  # other threads may read the values that a thread has written
    if FIRST:
        for gate in tl.static_range(Q):
            columns = gate * H + units
            if gamma_x is not None:
                standardize(x, G, columns, valid, n, mean_x + t * G, var_x + t * G, eps, BATCH, B, TILE, J)
        tl.debug_barrier()
        for first in range(0, B, TILE):
            rows = first + tl.arange(0, TILE)
            mask = (rows < n)[:, None] & valid[None, :]
            for gate in tl.static_range(Q):
                columns = gate * H + units
                here = rows[:, None] * G + columns[None, :]
                of_x = _scaled(x, G, rows, columns, mask, valid, gamma_x, None)
                tl.store(a + here, tl.load(a + here, mask=mask, other=0.0) + of_x, mask=mask)
        tl.debug_barrier()
    if gamma_z is not None:
        for gate in tl.static_range(Q):
            columns = gate * H + units
            standardize(a, G, columns, valid, n, mean_z + place * G, var_z + place * G, eps, BATCH, B, TILE, J)
        tl.debug_barrier()
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        all_rows = (rows < B)[:, None] & valid[None, :]
        mask = (rows < n)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        h = tanh(_scaled(a, G, rows, units, mask, valid, gamma_z, bias))
        transform = tl.sigmoid(_scaled(a, G, rows, H + units, mask, valid, gamma_z, bias))
        carry = 1.0 - transform
        if Q == 3:
            carry = tl.sigmoid(_scaled(a, G, rows, 2 * H + units, mask, valid, gamma_z, bias))
        now = tl.load(before + here, mask=all_rows, other=0.0)
        tl.store(state + here, tl.where(mask, h * transform + now * carry, now), mask=all_rows)
    if NEXT_ENTERS:
        tl.debug_barrier()
        if TOP:
            t_next, d_next = t + 1, d - d
        else:
            t_next, d_next = t, d + 1
        count = tl.load(running + t_next) if running is not None else B
        at = t_next * L + d_next
        if KEEP:
            normal += at * B * H
        beta_s = beta_s + d_next * H if beta_s is not None else beta_s
        _enter(state, normal, entering + ((place + 1) % 2) * B * H, units, valid, count, gamma_s + d_next * H,
               beta_s, mean_s + at * H, var_s + at * H, eps, BATCH, B, H, TILE, J)  # fmt: skip


@no_type_check
@triton.jit
def _leave(ds, dv, normal, units, valid, count, gamma, dgamma, dbeta, var, eps, NORMALIZED: tl.constexpr,
           BATCH: tl.constexpr, B: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Backpropagate dv (B, H) through the normalization of an entering state and add the result to ds."""
    if NORMALIZED:
        scale, mean, mean_v = norm_terms(normal, dv, H, units, valid, count, gamma, dgamma, var, eps, BATCH, B, TILE, J)
    total = tl.zeros([J], tl.float32)
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < count)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        back = tl.load(dv + here, mask=mask, other=0.0)
        total += tl.sum(back, axis=0)
        if NORMALIZED:
            back = scale[None, :] * (
                back - mean[None, :] - tl.load(normal + here, mask=mask, other=0.0) * mean_v[None, :]
            )
        tl.store(ds + here, tl.load(ds + here, mask=mask, other=0.0) + back, mask=mask)
    if NORMALIZED:  # noqa: SIM102 -- Triton evaluates both at compile time, and needs separate branches
        if dbeta is not None:
            add(dbeta, units, valid, total)


@no_type_check
@triton.jit
def leave_first(normal, gamma_s, beta_s, var_s, running, dv, ds, dgamma_s, dbeta_s, eps, B: tl.constexpr,
                H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, ENTERED: tl.constexpr,
                BATCH: tl.constexpr):  # fmt: skip
    """Complete ds, the gradient of the initial state, by the contribution of dv (B, H)."""
    units = tl.program_id(0) * J + tl.arange(0, J)
    count = tl.load(running) if running is not None else B
    _leave(ds, dv, normal, units, units < H, count, gamma_s, dgamma_s, dbeta_s, var_s, eps, ENTERED, BATCH, B, H, TILE,
           J)  # fmt: skip


@no_type_check
@triton.jit(do_not_specialize=["t", "d"])
def backward_layer(t, d, x, a, states, normal, weight, bias, gamma_x, gamma_s, beta_s, gamma_z, var_x, var_s, var_z,
                   running, eps, dy, ds, dv, da, dbias, dgamma_x, dgamma_s, dbeta_s, dgamma_z, B: tl.constexpr,
                   H: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, L: tl.constexpr, FIRST: tl.constexpr,
                   TOP: tl.constexpr, LAST: tl.constexpr, NEXT_ENTERED: tl.constexpr, J: tl.constexpr,
                   TILE: tl.constexpr, K: tl.constexpr, BATCH: tl.constexpr, FUSED: tl.constexpr, LOW: tl.constexpr,
                   WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Backward pass of layer d of step t: overwrite a (and x, if FIRST) with gradients; add to those of the parameters.

    On entry, ds is the gradient of the layer's output without the part that flows through R of the next layer; without
    FUSED, dv contains the gradient of the input of that R. At the LAST place, ds is complete. On return, ds is the
    gradient of the layer's input without the part that flows through R of this layer. da (B, Q H) is scratch memory.
    """
    units = tl.program_id(0) * J + tl.arange(0, J)
    valid = units < H
    G: tl.constexpr = Q * H
    n = tl.load(running + t) if running is not None else B
    t, place = t.to(tl.int64), t.to(tl.int64) * D + d
    before = states + place * B * H
    a += place * B * G

    if not LAST:
        if TOP:
            t_next, d_next = t + 1, d - d
        else:
            t_next, d_next = t, d + 1
        count = tl.load(running + t_next) if running is not None else B
        if FUSED:
            a_next = a + B * G
            for first in range(0, B, TILE):
                rows = first + tl.arange(0, TILE)
                total = product_tile(a_next, G, rows, count, weight + d_next * G * H, H, 1, units, valid, G, J, TILE, K,
                                     LOW, WIDEN, PRECISION)  # fmt: skip
                mask = (rows < B)[:, None] & valid[None, :]
                tl.store(dv + rows[:, None] * H + units[None, :], total, mask=mask)
            tl.debug_barrier()
        at = t_next * L + d_next
        normal = normal + at * B * H if normal is not None else normal
        gamma_s = gamma_s + d_next * H if gamma_s is not None else gamma_s
        dgamma_s = dgamma_s + d_next * H if dgamma_s is not None else dgamma_s
        dbeta_s = dbeta_s + d_next * H if dbeta_s is not None else dbeta_s
        var_s = var_s + at * H if var_s is not None else var_s
        _leave(ds, dv, normal, units, valid, count, gamma_s, dgamma_s, dbeta_s, var_s, eps, NEXT_ENTERED, BATCH, B, H,
               TILE, J)  # fmt: skip
        tl.debug_barrier()

    gamma_z = gamma_z + d * G if gamma_z is not None else gamma_z
    bias = bias + d * G if bias is not None else bias
    dgamma_z = dgamma_z + d * G if dgamma_z is not None else dgamma_z
    dbias = dbias + d * G if dbias is not None else dbias
    var_z = var_z + place * G if var_z is not None else var_z
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        all_rows = (rows < B)[:, None] & valid[None, :]
        mask = (rows < n)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        grad = tl.load(ds + here, mask=all_rows, other=0.0)
        if TOP:
            grad += tl.load(dy + t * B * H + here, mask=all_rows, other=0.0)
        h = tanh(_scaled(a, G, rows, units, mask, valid, gamma_z, bias))
        transform = tl.sigmoid(_scaled(a, G, rows, H + units, mask, valid, gamma_z, bias))
        now = tl.load(before + here, mask=mask, other=0.0)
        wide = rows[:, None] * G + units[None, :]
        slope = grad * transform * (1.0 - transform)
        tl.store(da + wide, tl.where(mask, grad * transform * (1.0 - h * h), 0.0), mask=all_rows)
        if Q == 3:
            carry = tl.sigmoid(_scaled(a, G, rows, 2 * H + units, mask, valid, gamma_z, bias))
            tl.store(da + wide + H, tl.where(mask, slope * h, 0.0), mask=all_rows)
            tl.store(da + wide + 2 * H, tl.where(mask, grad * now * carry * (1.0 - carry), 0.0), mask=all_rows)
        else:
            carry = 1.0 - transform
            tl.store(da + wide + H, tl.where(mask, slope * (h - now), 0.0), mask=all_rows)
        tl.store(ds + here, tl.where(mask, grad * carry, grad), mask=all_rows)
    tl.debug_barrier()
    for gate in tl.static_range(Q):
        columns = gate * H + units
        if bias is not None:
            total = tl.zeros([J], tl.float32)
            for first in range(0, B, TILE):
                rows = first + tl.arange(0, TILE)
                mask = (rows < n)[:, None] & valid[None, :]
                total += tl.sum(tl.load(da + rows[:, None] * G + columns[None, :], mask=mask, other=0.0), axis=0)
            add(dbias, columns, valid, total)
        through_norm(a, da, G, columns, valid, n, gamma_z, dgamma_z, var_z, eps, BATCH, B, TILE, J)
    if FIRST:
        x += t * B * G
        var_x = var_x + t * G if var_x is not None else var_x
        tl.debug_barrier()
        for gate in tl.static_range(Q):
            through_norm(x, a, G, gate * H + units, valid, n, gamma_x, dgamma_x, var_x, eps, BATCH, B, TILE, J)
