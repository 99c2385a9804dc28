"""The recurrence on a GPU: one fused Triton kernel a time step and direction, replayed from a captured CUDA graph.

A program owns J units with their four gates, for the whole batch of one replica: batch statistics need no other
program's data. Small recurrent products are fused into the step (one launch a step); large ones are cuBLAS's, because
every program would read all of h. Signature and algebra are those of bnrnn.scan.lstm_fused; products are in TF32 if
torch is set to allow it (torch.set_float32_matmul_precision), in bfloat16 if asked for; everything else is float32.

Layout: time first, then replicas. c and h have T + 1 steps, of which step 0 is the state before the first.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bnrnn.scan.lstm import Statistics
from bnrnn.scan.lstm_fused import PARAMETERS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run in Python, on CPU tensors
UNITS = 16  # J
DEPTH = 32  # of a product's tile
# Elements of the left factor up to which a product is fused into the step: an estimate from bandwidths, unmeasured.
FUSED_UP_TO = 2**17


@no_type_check
@triton.jit
def _moments(at, row, columns, valid, count, B: tl.constexpr, TILE: tl.constexpr, J: tl.constexpr):
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
def _statistics(at, row, columns, valid, count, means, vars, eps, BATCH: tl.constexpr, B: tl.constexpr,
                TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Mean and 1 / sqrt(var + eps): of the batch, and then stored, or as stored."""
    if BATCH:
        mean, var = _moments(at, row, columns, valid, count, B, TILE, J)
        tl.store(means + columns, mean, mask=valid)
        tl.store(vars + columns, var, mask=valid)
    else:
        mean = tl.load(means + columns, mask=valid, other=0.0)
        var = tl.load(vars + columns, mask=valid, other=1.0)
    return mean, 1.0 / tl.sqrt(var + eps)


@no_type_check
@triton.jit
def _standardize(at, row, columns, valid, count, means, vars, eps, BATCH: tl.constexpr, B: tl.constexpr,
                 TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Normalize the first `count` rows in place."""
    mean, rstd = _statistics(at, row, columns, valid, count, means, vars, eps, BATCH, B, TILE, J)
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < count)[:, None] & valid[None, :]
        here = at + rows[:, None] * row + columns[None, :]
        tl.store(here, (tl.load(here, mask=mask, other=0.0) - mean[None, :]) * rstd[None, :], mask=mask)


@no_type_check
@triton.jit
def _gate(u, x, row, rows, columns, mask, valid, gamma_hh, gamma_ih, bias):
    """One gate's pre-activation (eq. 6) of a tile."""
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
@triton.jit
def _lowered(x, LOW: tl.constexpr, WIDEN: tl.constexpr):
    x = x.to(LOW)
    return x.to(tl.float32) if WIDEN else x  # the interpreter has no products of bfloat16


@no_type_check
@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@no_type_check
@triton.jit
def _offset(pointer, by):
    if pointer is None:
        return None
    else:
        return pointer + by


@no_type_check
@triton.jit(do_not_specialize=["t"])
def _forward(t, x, u, c, h, weight, gamma_ih, gamma_hh, bias, gamma_c, beta_c, mean_ih, var_ih, mean_hh, var_hh,
             mean_c, var_c, running, eps, R: tl.constexpr, B: tl.constexpr, H: tl.constexpr, J: tl.constexpr,
             TILE: tl.constexpr, K: tl.constexpr, U_STEPS: tl.constexpr, BATCH: tl.constexpr, ALL_COUNT: tl.constexpr,
             FUSED: tl.constexpr, LOW: tl.constexpr, WIDEN: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Step t: x normalized, u, c[t + 1], h[t + 1] and statistics. Without FUSED, u holds the product already."""
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
    gamma_ih, gamma_hh = _offset(gamma_ih, replica * 4 * H), _offset(gamma_hh, replica * 4 * H)
    bias = _offset(bias, replica * 4 * H)
    gamma_c, beta_c = _offset(gamma_c, replica * H), _offset(beta_c, replica * H)

    if FUSED:
        weight += replica * 4 * H * H
        for first in range(0, B, TILE):
            rows = first + tl.arange(0, TILE)
            for gate in tl.static_range(4):
                total = tl.zeros([TILE, J], tl.float32)
                for k in range(0, H, K):
                    depth = k + tl.arange(0, K)
                    left = tl.load(h_prev + rows[:, None] * H + depth[None, :],
                                   mask=(rows < count)[:, None] & (depth < H)[None, :], other=0.0)  # fmt: skip
                    right = tl.load(weight + (gate * H + units)[None, :] * H + depth[:, None],
                                    mask=valid[None, :] & (depth < H)[:, None], other=0.0)  # fmt: skip
                    total += tl.dot(_lowered(left, LOW, WIDEN), _lowered(right, LOW, WIDEN), input_precision=PRECISION)
                mask = (rows < count)[:, None] & valid[None, :]
                tl.store(u + rows[:, None] * 4 * H + gate * H + units[None, :], total, mask=mask)
        tl.debug_barrier()  # what follows may be read by other threads than wrote it
    for gate in tl.static_range(4):
        columns = gate * H + units
        if gamma_hh is not None:
            _standardize(u, 4 * H, columns, valid, count, mean_hh + wide, var_hh + wide, eps, BATCH, B, TILE, J)
        if gamma_ih is not None:
            _standardize(x, 4 * H, columns, valid, count, mean_ih + wide, var_ih + wide, eps, BATCH, B, TILE, J)
    tl.debug_barrier()
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        all_rows = (rows < B)[:, None] & valid[None, :]
        mask = (rows < n)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        i = tl.sigmoid(_gate(u, x, 4 * H, rows, units, mask, valid, gamma_hh, gamma_ih, bias))
        f = tl.sigmoid(_gate(u, x, 4 * H, rows, H + units, mask, valid, gamma_hh, gamma_ih, bias))
        g = _tanh(_gate(u, x, 4 * H, rows, 2 * H + units, mask, valid, gamma_hh, gamma_ih, bias))
        before = tl.load(c_prev + here, mask=all_rows, other=0.0)
        tl.store(c + here, tl.where(mask, f * before + i * g, before), mask=all_rows)  # eq. 7
    tl.debug_barrier()
    mean = tl.zeros([J], tl.float32)
    scale = tl.full([J], 1.0, tl.float32)
    shift = tl.zeros([J], tl.float32)
    if gamma_c is not None:
        mean, rstd = _statistics(c, H, units, valid, count, mean_c + narrow, var_c + narrow, eps, BATCH, B, TILE, J)
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
        z = tl.where(mask, z, 0.0)  # a single sequence has variance 0, and others at its scale would overflow
        before = tl.load(h_prev + here, mask=all_rows, other=0.0)
        tl.store(h + here, tl.where(mask, o * _tanh(z), before), mask=all_rows)  # eq. 8


@no_type_check
@triton.jit
def _add(pointer, columns, valid, value):
    tl.store(pointer + columns, tl.load(pointer + columns, mask=valid, other=0.0) + value, mask=valid)


@no_type_check
@triton.jit
def _through_norm(at, da, row, columns, valid, count, gamma, dgamma, var, eps, BATCH: tl.constexpr, B: tl.constexpr,
                  TILE: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Turn normalized values into the gradient of what was normalized, 0 beyond the first `count` rows."""
    mean, mean_v, scale = tl.zeros([J], tl.float32), tl.zeros([J], tl.float32), tl.full([J], 1.0, tl.float32)
    if gamma is not None:
        for first in range(0, B, TILE):
            rows = first + tl.arange(0, TILE)
            mask = (rows < count)[:, None] & valid[None, :]
            here = rows[:, None] * row + columns[None, :]
            d = tl.load(da + here, mask=mask, other=0.0)
            mean += tl.sum(d, axis=0)
            mean_v += tl.sum(d * tl.load(at + here, mask=mask, other=0.0), axis=0)
        _add(dgamma, columns, valid, mean_v)
        scale = tl.load(gamma + columns, mask=valid, other=0.0)
        scale /= tl.sqrt(tl.load(var + columns, mask=valid, other=1.0) + eps)
        inverse = 1.0 / count if BATCH else 0.0  # population statistics send no gradient back
        mean *= inverse
        mean_v *= inverse
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < count)[:, None] & valid[None, :]
        here = rows[:, None] * row + columns[None, :]
        d = tl.load(da + here, mask=mask, other=0.0)
        if gamma is not None:
            d = scale[None, :] * (d - mean[None, :] - tl.load(at + here, mask=mask, other=0.0) * mean_v[None, :])
        tl.store(at + here, tl.where(mask, d, 0.0), mask=(rows < B)[:, None] & valid[None, :])


@no_type_check
@triton.jit(do_not_specialize=["t"])
def _backward(t, x, u, c, weight, gamma_ih, gamma_hh, bias, gamma_c, beta_c, var_ih, var_hh, mean_c, var_c, running,
              eps, dy, product, dh, dc, dz, da, dgamma_ih, dgamma_hh, dbias, dgamma_c, dbeta_c, R: tl.constexpr,
              B: tl.constexpr, H: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
              LAST: tl.constexpr, BATCH: tl.constexpr, ALL_COUNT: tl.constexpr, FUSED: tl.constexpr,
              LOW: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Step t: x and u into their gradients, dc into that of c[t], the parameters' added to.

    dh is the whole gradient of h[t + 2] on entry and of h[t + 1] on return; `product` = du[t + 1] W_hh unless FUSED.
    LAST is the last step, with no product and dh given. dz (R, B, H) and da (R, B, 4H) are scratch.
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
    gamma_ih, gamma_hh = _offset(gamma_ih, replica * 4 * H), _offset(gamma_hh, replica * 4 * H)
    dgamma_ih, dgamma_hh = _offset(dgamma_ih, replica * 4 * H), _offset(dgamma_hh, replica * 4 * H)
    bias, dbias = _offset(bias, replica * 4 * H), _offset(dbias, replica * 4 * H)
    gamma_c, dgamma_c = _offset(gamma_c, replica * H), _offset(dgamma_c, replica * H)
    beta_c, dbeta_c = _offset(beta_c, replica * H), _offset(dbeta_c, replica * H)
    var_ih, var_hh = _offset(var_ih, wide), _offset(var_hh, wide)

    # The whole gradient of h[t + 1].
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        all_rows = (rows < B)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        grad = tl.load(dy + here, mask=all_rows, other=0.0)
        if LAST:
            grad += tl.load(dh + here, mask=all_rows, other=0.0)
        else:
            if FUSED:
                total = tl.zeros([TILE, J], tl.float32)
                for k in range(0, 4 * H, K):
                    depth = k + tl.arange(0, K)
                    left = tl.load(u_next + rows[:, None] * 4 * H + depth[None, :],
                                   mask=(rows < B)[:, None] & (depth < 4 * H)[None, :], other=0.0)  # fmt: skip
                    right = tl.load(weight + (replica * 4 * H + depth)[:, None] * H + units[None, :],
                                    mask=(depth < 4 * H)[:, None] & valid[None, :], other=0.0)  # fmt: skip
                    total += tl.dot(_lowered(left, LOW, WIDEN), _lowered(right, LOW, WIDEN), input_precision=PRECISION)
                grad += total
            else:
                grad += tl.load(product + replica * B * H + here, mask=all_rows, other=0.0)
            if running is not None:  # sequences that had ended hand their gradient on
                ended = (rows >= tl.load(running + t + 1))[:, None] & all_rows
                grad += tl.load(dh + here, mask=ended, other=0.0)
        tl.store(dh + here, grad, mask=all_rows)
    tl.debug_barrier()

    # Through eq. 8.
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
        tanh = _tanh(tl.where(mask, gamma[None, :] * c_hat + shift[None, :], 0.0))
        grad = tl.load(dh + here, mask=mask, other=0.0)
        d = tl.where(mask, grad * o * (1.0 - tanh * tanh), 0.0)
        sum_dz += tl.sum(d, axis=0)
        sum_dzc += tl.sum(d * c_hat, axis=0)
        tl.store(dz + here, d, mask=(rows < B)[:, None] & valid[None, :])
        wide_here = rows[:, None] * 4 * H + 3 * H + units[None, :]
        tl.store(da + wide_here, tl.where(mask, grad * tanh * o * (1.0 - o), 0.0),
                 mask=(rows < B)[:, None] & valid[None, :])  # fmt: skip
    if beta_c is not None:
        _add(dbeta_c, units, valid, sum_dz)
    if gamma_c is not None:
        _add(dgamma_c, units, valid, sum_dzc)
        inverse = 1.0 / count if BATCH else 0.0
        sum_dz *= inverse
        sum_dzc *= inverse
    else:
        sum_dz *= 0.0
        sum_dzc *= 0.0
    tl.debug_barrier()

    # Through eq. 7, to the gates.
    for first in range(0, B, TILE):
        rows = first + tl.arange(0, TILE)
        mask = (rows < n)[:, None] & valid[None, :]
        counted = (rows < count)[:, None] & valid[None, :]
        here = rows[:, None] * H + units[None, :]
        i = tl.sigmoid(_gate(u, x, 4 * H, rows, units, mask, valid, gamma_hh, gamma_ih, bias))
        f = tl.sigmoid(_gate(u, x, 4 * H, rows, H + units, mask, valid, gamma_hh, gamma_ih, bias))
        g = _tanh(_gate(u, x, 4 * H, rows, 2 * H + units, mask, valid, gamma_hh, gamma_ih, bias))
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

    # Through eq. 6.
    for gate in tl.static_range(4):
        columns = gate * H + units
        if bias is not None:
            total = tl.zeros([J], tl.float32)
            for first in range(0, B, TILE):
                rows = first + tl.arange(0, TILE)
                mask = (rows < n)[:, None] & valid[None, :]
                total += tl.sum(tl.load(da + rows[:, None] * 4 * H + columns[None, :], mask=mask, other=0.0), axis=0)
            _add(dbias, columns, valid, total)
        _through_norm(u, da, 4 * H, columns, valid, count, gamma_hh, dgamma_hh, var_hh, eps, BATCH, B, TILE, J)
        _through_norm(x, da, 4 * H, columns, valid, count, gamma_ih, dgamma_ih, var_ih, eps, BATCH, B, TILE, J)


@dataclass(frozen=True)
class Kind:
    """What a workspace is made for."""

    device: torch.device
    shape: tuple[int, int, int, int]  # T, R, B, H
    given: tuple[str, ...]  # the parameters that are there
    batch: bool
    padded: bool
    ended_count: bool
    with_grad: bool
    eps: float
    low: torch.dtype | None
    tf32: bool


@dataclass
class Workspace:
    """Buffers at fixed addresses for one scan at a time, and the graphs captured over them."""

    kind: Kind
    buffers: dict[str, Tensor] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = self.kind
        T, R, B, H = kind.shape
        steps = T if kind.with_grad else 1
        shapes = {"x": (T, R, B, 4 * H), "u": (steps, R, B, 4 * H), "c": (T + 1, R, B, H), "h": (T + 1, R, B, H),
                  "weight": (R, 4 * H, H)}  # fmt: skip
        for name, size in (("ih", 4 * H), ("hh", 4 * H), ("c", H)):
            if f"gamma_{name}" in kind.given:
                shapes |= {f"mean_{name}": (T, R, size), f"var_{name}": (T, R, size)}
        sizes = {name: (R, H if name.endswith("_c") else 4 * H) for name in kind.given}
        shapes |= sizes
        if kind.with_grad:
            shapes |= {f"d{name}": size for name, size in sizes.items()}
            shapes |= {"dy": (T, R, B, H), "da": (R, B, 4 * H)}
            shapes |= {name: (R, B, H) for name in ("product", "dh", "dc", "dz")}
        self.buffers = {name: torch.empty(shape, device=kind.device) for name, shape in shapes.items()}
        if kind.padded:
            self.buffers["running"] = torch.empty(T, dtype=torch.int32, device=kind.device)

    def run(self, name: str, steps: Callable[["Workspace"], None]) -> None:
        """Launch the steps: plainly the first time, which compiles them; as a captured graph from the second on."""
        self.uses[name] = self.uses.get(name, 0) + 1
        if self.kind.device.type != "cuda" or self.uses[name] == 1:
            return steps(self)
        if name not in self.graphs:
            self.graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[name], capture_error_mode="thread_local"):
                steps(self)
        self.graphs[name].replay()

    def get(self, *names: str) -> dict[str, Tensor | None]:
        return {name: self.buffers.get(name) for name in names}

    def constants(self, left_size: int) -> dict[str, Any]:
        """What the two kernels share; `left_size`: elements of the left factor of the product."""
        kind = self.kind
        _, R, B, H = kind.shape
        return {
            "R": R, "B": B, "H": H, "J": UNITS, "K": DEPTH,
            "TILE": min(64, max(16, triton.next_power_of_2(B))),
            "BATCH": kind.batch, "ALL_COUNT": kind.ended_count or not kind.padded,
            "FUSED": left_size <= FUSED_UP_TO,
            "LOW": {None: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[kind.low],
            "WIDEN": INTERPRETED,
            "PRECISION": "tf32" if kind.tf32 else "ieee",
        }  # fmt: skip


_free: dict[Kind, list[Workspace]] = {}
MAX_FREE = 16  # workspaces kept for later, all kinds together; the oldest kind goes first


class Lease:
    """A workspace in use; given back by `release`, or when nobody holds the lease any more."""

    def __init__(self, kind: Kind) -> None:
        free = _free.get(kind)
        self.workspace: Workspace | None = free.pop() if free else Workspace(kind)

    def release(self) -> None:
        if self.workspace is None:
            return
        kind, workspace = self.workspace.kind, self.workspace
        self.workspace = None
        _free[kind] = [*_free.pop(kind, []), workspace]
        while sum(map(len, _free.values())) > MAX_FREE:
            oldest = next(iter(_free))
            _free[oldest] = _free[oldest][1:]
            if not _free[oldest]:
                del _free[oldest]

    __del__ = release


def _forward_steps(ws: Workspace) -> None:
    T, R, B, H = ws.kind.shape
    constants = ws.constants(B * H)
    low = ws.kind.low or torch.float32
    weight = ws.buffers["weight"].transpose(1, 2).to(low)
    arguments = ws.get("x", "u", "c", "h", "weight", *PARAMETERS, *Statistics._fields, "running")
    for t in range(T):
        u = ws.buffers["u"][t if ws.kind.with_grad else 0]
        if not constants["FUSED"]:
            _product(ws.buffers["h"][t], weight, u)
        _forward[(triton.cdiv(H, UNITS), R)](
            t, **arguments, eps=ws.kind.eps, U_STEPS=ws.kind.with_grad, **constants
        )  # fmt: skip


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    if right.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left.to(right.dtype), right))


def _backward_steps(ws: Workspace) -> None:
    T, R, B, H = ws.kind.shape
    constants = ws.constants(4 * B * H)
    low = ws.kind.low or torch.float32
    weight, u, product = ws.buffers["weight"].to(low), ws.buffers["u"], ws.buffers["product"]
    names = ("x", "u", "c", "weight", *PARAMETERS, "var_ih", "var_hh", "mean_c", "var_c", "running", "dy", "product",
             "dh", "dc", "dz", "da", *(f"d{name}" for name in PARAMETERS))  # fmt: skip
    arguments = ws.get(*names)
    for name in ws.kind.given:
        ws.buffers[f"d{name}"].zero_()
    for t in reversed(range(T)):
        if t < T - 1 and not constants["FUSED"]:
            _product(u[t + 1], weight, product)
        _backward[(triton.cdiv(H, UNITS), R)](t, **arguments, eps=ws.kind.eps, LAST=t == T - 1, **constants)
    _product(u[0], weight, product)
    dh = ws.buffers["dh"]
    if ws.kind.padded:
        dh *= torch.arange(B, device=dh.device)[:, None] >= ws.buffers["running"][0]
        dh += product
    else:
        dh.copy_(product)


class _TritonScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lease: Lease, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        ws = lease.workspace
        assert ws is not None
        ws.run("forward", _forward_steps)
        ctx.save_for_backward(inputs[3])
        ctx.lease = lease
        ctx.has = [v is not None for v in inputs]
        y = ws.buffers["h"][1:].transpose(0, 1).clone()
        c = ws.buffers["c"][-1].clone()
        if not ws.kind.with_grad:
            lease.release()
        return y, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        _ = ctx.saved_tensors  # autograd raises here if the weights were changed in between
        if ctx.lease.workspace is None:
            raise RuntimeError("this scan was run backward before and its buffers are spent: run it forward again")
        ws: Workspace = ctx.lease.workspace
        b = ws.buffers
        b["dy"].copy_(grads[0].transpose(0, 1))
        b["dc"].copy_(grads[1])
        b["dh"].zero_()
        ws.run("backward", _backward_steps)
        low = ws.kind.low or torch.float32
        left = b["u"].transpose(0, 1).flatten(1, 2).transpose(1, 2).to(low)  # (R, 4H, TB)
        dweight = (left @ b["h"][:-1].transpose(0, 1).flatten(1, 2).to(low)).float()
        parameters = (b[f"d{name}"].clone() if name in ws.kind.given else None for name in PARAMETERS)
        result = (b["x"].transpose(0, 1).clone(), b["dh"].clone(), b["dc"].clone(), dweight, *parameters)
        ctx.lease.release()
        return None, *result


def triton_scan(
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    *,
    eps: float = 1e-5,
    population: Statistics | None = None,
    batch_sizes: list[int] | None = None,
    ended_count: bool = False,
    product_dtype: torch.dtype | None = None,
    overwrite: bool = False,  # the workspace has its own memory
    **parameters: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Statistics]:
    """bnrnn.scan.lstm.lstm_scan in float32, with a leading axis R of replicas on every tensor."""
    R, T, B, G = x_proj.shape
    given = {name: parameters.get(name) for name in PARAMETERS}
    inputs = (x_proj, h, c, weight_hh, *given.values())
    kind = Kind(
        device=x_proj.device,
        shape=(T, R, B, G // 4),
        given=tuple(name for name, p in given.items() if p is not None),
        batch=population is None,
        padded=batch_sizes is not None,
        ended_count=ended_count,
        with_grad=torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs),
        eps=eps,
        low=product_dtype if product_dtype != torch.float32 else None,
        tf32=torch.get_float32_matmul_precision() != "highest",
    )
    lease = Lease(kind)
    assert lease.workspace is not None
    b = lease.workspace.buffers
    with torch.no_grad():
        b["x"].copy_(x_proj.transpose(0, 1))
        b["h"][0], b["c"][0] = h, c
        b["weight"].copy_(weight_hh)
        for name, p in given.items():
            if p is not None:
                b[name].copy_(p)
        if batch_sizes is not None:
            b["running"].copy_(torch.tensor(batch_sizes, dtype=torch.int32))
        if population is not None:
            for name, values in population._asdict().items():
                if values is not None and name in b:
                    b[name].copy_(values.transpose(0, 1))
    y, c = _TritonScan.apply(lease, *inputs)
    used = Statistics(*(b[name].transpose(0, 1).clone() if name in b else None for name in Statistics._fields))
    return y, (y[:, -1], c), used
