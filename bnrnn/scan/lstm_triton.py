"""The recurrence on a GPU: one fused Triton kernel a time step and direction, replayed from a captured CUDA graph.

Small recurrent products are fused into the step (one launch a step); large ones are cuBLAS's, because every program of
a step would read all of h. Signature and algebra are those of bnrnn.scan.lstm_fused; products are in TF32 if torch is
set to allow it (torch.set_float32_matmul_precision), in bfloat16 if asked for; everything else is float32.

Layout: time first, then replicas. c and h have T + 1 steps, of which step 0 is the state before the first.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bnrnn.scan.lstm import Statistics
from bnrnn.scan.lstm_fused import PARAMETERS
from bnrnn.scan.lstm_triton_kernels import backward_step, forward_step

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run in Python, on CPU tensors
UNITS = 16  # J
DEPTH = 32  # of a product's tile
# Elements of the left factor up to which a product is fused into the step: an estimate from bandwidths, unmeasured.
FUSED_UP_TO = 2**17


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
        """Launch the steps: plainly the first time, which compiles them; as a captured graph from the second on.

        Inside a graph that somebody else captures they are launched plainly into that one.
        """
        self.uses[name] = self.uses.get(name, 0) + 1
        on_gpu = self.kind.device.type == "cuda"
        if not on_gpu or self.uses[name] == 1 or torch.cuda.is_current_stream_capturing():
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
        forward_step[(triton.cdiv(H, UNITS), R)](
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
        backward_step[(triton.cdiv(H, UNITS), R)](t, **arguments, eps=ws.kind.eps, LAST=t == T - 1, **constants)
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
        tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",  # what torch.set_float32_matmul_precision sets too
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
