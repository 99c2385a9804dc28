"""The recurrence on a GPU: one fused Triton kernel per time step and direction, replayed from a captured CUDA graph.

The kernel of a step also computes the recurrent product if it is small, so a step is one launch. cuBLAS computes large
products, because every program of the kernel would have to read all of h. Signature and equations are those of
fused.py. Products use TF32 if torch allows it (torch.set_float32_matmul_precision), or bfloat16 or float16 if
requested; all other values are float32.

Memory layout: the first axis is time, the second the replicas. c and h have T + 1 steps; step 0 is the initial state.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from bnrnn.scan.arguments import only_once
from bnrnn.scan.lstm.fused import PARAMETERS
from bnrnn.scan.lstm.reference import Statistics
from bnrnn.scan.lstm.triton_kernels import backward_step, forward_step
from bnrnn.scan.triton_shared import workspace
from bnrnn.scan.triton_shared.workspace import UNITS, Lease, Workspace, options, product


@dataclass(frozen=True)
class Kind(workspace.Kind):
    """The description of an LSTM workspace; `shape` is T, R, B, H."""

    ended_count: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        T, R, B, H = self.shape
        steps = T if self.with_grad else 1
        shapes = {"x": (T, R, B, 4 * H), "u": (steps, R, B, 4 * H), "c": (T + 1, R, B, H), "h": (T + 1, R, B, H),
                  "weight": (R, 4 * H, H)}  # fmt: skip
        for name, size in (("ih", 4 * H), ("hh", 4 * H), ("c", H)):
            if f"gamma_{name}" in self.given:
                shapes |= {f"mean_{name}": (T, R, size), f"var_{name}": (T, R, size)}
        sizes = {name: (R, H if name.endswith("_c") else 4 * H) for name in self.given}
        shapes |= sizes
        if self.with_grad:
            shapes |= {f"d{name}": size for name, size in sizes.items()}
            shapes |= {"dy": (T, R, B, H), "da": (R, B, 4 * H)}
            shapes |= {name: (R, B, H) for name in ("product", "dh", "dc", "dz")}
        return shapes

    def step_constants(self, left_size: int) -> dict[str, Any]:
        """Compile-time constants of the two kernels; `left_size` is the number of elements of the left factor."""
        _, R, B, H = self.shape
        return self.constants(B, left_size) | {"R": R, "B": B, "H": H, "ALL_COUNT": self.ended_count or not self.padded}


def _forward_steps(ws: Workspace) -> None:
    T, R, B, H = ws.kind.shape
    constants = ws.kind.step_constants(B * H)
    low = ws.kind.low or torch.float32
    weight = ws.buffers["weight"].transpose(1, 2).to(low)
    arguments = ws.get("x", "u", "c", "h", "weight", *PARAMETERS, *Statistics._fields, "running")
    for t in range(T):
        u = ws.buffers["u"][t if ws.kind.with_grad else 0]
        if not constants["FUSED"]:
            product(ws.buffers["h"][t], weight, u)
        forward_step[(triton.cdiv(H, UNITS), R)](
            t, **arguments, eps=ws.kind.eps, U_STEPS=ws.kind.with_grad, **constants
        )  # fmt: skip


def _backward_steps(ws: Workspace) -> None:
    T, R, B, H = ws.kind.shape
    constants = ws.kind.step_constants(4 * B * H)
    low = ws.kind.low or torch.float32
    weight, u, back = ws.buffers["weight"].to(low), ws.buffers["u"], ws.buffers["product"]
    names = ("x", "u", "c", "weight", *PARAMETERS, "var_ih", "var_hh", "mean_c", "var_c", "running", "dy", "product",
             "dh", "dc", "dz", "da", *(f"d{name}" for name in PARAMETERS))  # fmt: skip
    arguments = ws.get(*names)
    for name in ws.kind.given:
        ws.buffers[f"d{name}"].zero_()
    for t in reversed(range(T)):
        if t < T - 1 and not constants["FUSED"]:
            product(u[t + 1], weight, back)
        backward_step[(triton.cdiv(H, UNITS), R)](t, **arguments, eps=ws.kind.eps, LAST=t == T - 1, **constants)
    product(u[0], weight, back)
    dh = ws.buffers["dh"]
    if ws.kind.padded:
        dh *= torch.arange(B, device=dh.device)[:, None] >= ws.buffers["running"][0]
        dh += back
    else:
        dh.copy_(back)


class _TritonScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lease: Lease, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        ws = lease.workspace
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
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        _ = ctx.saved_tensors  # autograd raises an error here if the weights were changed after the forward pass
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
    overwrite: bool = False,  # ignored: the workspace has its own memory
    **parameters: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Statistics]:
    """`lstm_scan` of reference.py in float32. Every tensor has a leading axis R of replicas.

    A second backward pass through the same scan raises RuntimeError.
    """
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
        eps=eps,
        **options(inputs, product_dtype),
    )
    lease = Lease(kind)
    ws = lease.workspace
    b = ws.buffers
    statistics = (population or Statistics())._asdict()
    timed = {"x": x_proj, **statistics}  # their time axis comes first in the buffers
    ws.fill(
        batch_sizes, weight=weight_hh, **given, **{k: v if v is None else v.transpose(0, 1) for k, v in timed.items()}
    )
    with torch.no_grad():
        b["h"][0], b["c"][0] = h, c
    y, c = _TritonScan.apply(lease, *inputs)
    used = Statistics(*(b[name].transpose(0, 1).clone() if name in b else None for name in Statistics._fields))
    return y, (y[:, -1], c), used
