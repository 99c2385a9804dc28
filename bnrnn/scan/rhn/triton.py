"""Recurrent highway networks on a GPU: one fused Triton kernel per highway layer, time step and direction.

As in lstm/triton.py, the launches are replayed from a captured CUDA graph, and the kernel also computes small products.
Signature and equations are those of fused.py. The first axis is time. `states` has T D + 1 entries; the first is the
initial state.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from bnrnn.scan.arguments import only_once
from bnrnn.scan.rhn.fused import PARAMETERS
from bnrnn.scan.rhn.reference import RHNStatistics
from bnrnn.scan.rhn.triton_kernels import backward_layer, enter_first, forward_layer, leave_first
from bnrnn.scan.triton_shared import workspace
from bnrnn.scan.triton_shared.workspace import UNITS, Lease, Workspace, options, product


@dataclass(frozen=True)
class Kind(workspace.Kind):
    """The description of an RHN workspace; `shape` is T, B, H, Q, D, L.

    Each of the D highway layers has Q gates. The first L of them normalize the state that enters.
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        T, B, H, Q, D, L = self.shape
        G, layers, entered = Q * H, T * D if self.with_grad else 1, T * L if self.with_grad else min(L, 1)
        shapes = {"x": (T, B, G), "a": (layers, B, G), "states": (T * D + 1, B, H), "weight": (D, G, H)}
        sizes = {"bias": (D, G), "gamma_x": (G,), "gamma_s": (L, H), "beta_s": (L, H), "gamma_z": (D, G)}
        sizes = {name: size for name, size in sizes.items() if name in self.given}
        shapes |= sizes
        if L:
            shapes |= {"normal": (entered, B, H), "entering": (2, B, H)}
        for name, size in (("x", (T, G)), ("s", (T, L, H)), ("z", (T, D, G))):
            if f"gamma_{name}" in self.given:
                shapes |= {f"mean_{name}": size, f"var_{name}": size}
        if self.with_grad:
            shapes |= {f"d{name}": size for name, size in sizes.items()}
            shapes |= {"dy": (T, B, H), "ds": (B, H), "dv": (1, B, H), "da": (B, G)}
        return shapes

    def layer_constants(self, left_size: int) -> dict[str, Any]:
        _, B, H, Q, D, L = self.shape
        return self.constants(B, left_size) | {"B": B, "H": H, "Q": Q, "D": D, "L": L}

    def edge_constants(self) -> dict[str, Any]:
        """Compile-time constants of the kernels for the initial state, which compute no product."""
        _, B, H, *_ = self.shape
        constants = self.constants(B, 0)
        return {"B": B, "H": H, **{name: constants[name] for name in ("J", "TILE", "BATCH")}}


def _forward_layers(ws: Workspace) -> None:
    T, B, H, _, D, L = ws.kind.shape
    constants = ws.kind.layer_constants(B * H)
    b, eps, grid = ws.buffers, ws.kind.eps, (triton.cdiv(H, UNITS),)
    weight = b["weight"].transpose(1, 2).to(ws.kind.low or torch.float32)
    arguments = ws.get(
        "x", "a", "states", "normal", "entering", "weight", *PARAMETERS, *RHNStatistics._fields, "running"
    )
    if L:
        names = ("states", "normal", "entering", "gamma_s", "beta_s", "mean_s", "var_s", "running")
        enter_first[grid](**ws.get(*names), eps=eps, **ws.kind.edge_constants())
    for place in range(T * D):
        t, d = divmod(place, D)
        if not constants["FUSED"]:
            left = b["entering"][place % 2] if d < L else b["states"][place]
            at = place if ws.kind.with_grad else 0
            product(left[None], weight[d : d + 1], b["a"][at : at + 1])
        forward_layer[grid](
            t, d, **arguments, eps=eps, FIRST=d == 0, ENTERED=d < L, TOP=d == D - 1,
            NEXT_ENTERS=place + 1 < T * D and (d + 1) % D < L, KEEP=ws.kind.with_grad, **constants,
        )  # fmt: skip


def _backward_layers(ws: Workspace) -> None:
    T, B, H, Q, D, L = ws.kind.shape
    constants = ws.kind.layer_constants(B * Q * H)
    b, eps, grid = ws.buffers, ws.kind.eps, (triton.cdiv(H, UNITS),)
    weight = b["weight"].to(ws.kind.low or torch.float32)
    names = ("x", "a", "states", "normal", "weight", *PARAMETERS, "var_x", "var_s", "var_z", "running", "dy", "ds",
             "dv", "da", *(f"d{name}" for name in PARAMETERS))  # fmt: skip
    arguments = ws.get(*names)
    for name in ws.kind.given:
        b[f"d{name}"].zero_()
    for place in reversed(range(T * D)):
        t, d = divmod(place, D)
        after, last = (d + 1) % D, place == T * D - 1
        if not last and not constants["FUSED"]:
            product(b["a"][place + 1 : place + 2], weight[after : after + 1], b["dv"])
        backward_layer[grid](
            t, d, **arguments, eps=eps, FIRST=d == 0, TOP=d == D - 1, LAST=last, NEXT_ENTERED=after < L, **constants
        )  # fmt: skip
    product(b["a"][:1], weight[:1], b["dv"])
    names = ("normal", "gamma_s", "beta_s", "var_s", "running", "dv", "ds", "dgamma_s", "dbeta_s")
    leave_first[grid](**ws.get(*names), eps=eps, ENTERED=L > 0, **ws.kind.edge_constants())


class _TritonScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lease: Lease, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        ws = lease.workspace
        ws.run("forward", _forward_layers)
        ctx.lease = lease
        D, states = ws.kind.shape[4], ws.buffers["states"]
        ctx.save_for_backward(*(v for v in inputs[2:] if v is not None))
        y, s = states[D::D].clone(), states[-1].clone()
        if not ws.kind.with_grad:
            lease.release()
        return y, s

    @staticmethod
    @only_once
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        _ = ctx.saved_tensors  # autograd raises an error here if the weights were changed after the forward pass
        ws: Workspace = ctx.lease.workspace
        b = ws.buffers
        b["dy"].copy_(given[0])
        b["ds"].copy_(given[1])
        ws.run("backward", _backward_layers)
        parameters = (b[f"d{name}"].clone() if name in ws.kind.given else None for name in PARAMETERS)
        result = (b["x"].clone(), b["ds"].clone(), _weight_gradient(ws), *parameters)
        ctx.lease.release()
        return None, *result


def _weight_gradient(ws: Workspace) -> Tensor:
    """The gradient of the recurrent weights (D, G, H), after the backward pass: one batched product over all steps."""
    T, B, H, _, D, L = ws.kind.shape
    b, low = ws.buffers, ws.kind.low or torch.float32
    entering = b["states"][:-1].view(T, D, B, H).transpose(0, 1)  # (D, T, B, H)
    if L:
        scaled = b["normal"].view(T, L, B, H).transpose(0, 1) * b["gamma_s"][:, None, None]
        if "beta_s" in b:
            scaled = scaled + b["beta_s"][:, None, None]
        entering = torch.cat([scaled, entering[L:]])
    da = b["a"].view(T, D, B, -1).transpose(0, 1).flatten(1, 2)  # (D, TB, G)
    return (da.transpose(1, 2).to(low) @ entering.flatten(1, 2).to(low)).float()


def rhn_triton_scan(
    x_proj: Tensor,
    s: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    population: RHNStatistics | None = None,
    batch_sizes: list[int] | None = None,
    product_dtype: torch.dtype | None = None,
    **parameters: Tensor | None,
) -> tuple[Tensor, Tensor, RHNStatistics]:
    """`rhn_scan` of reference.py in float32. A second backward pass through the same scan raises RuntimeError."""
    (T, B, G), (D, _, H) = x_proj.shape, weight.shape
    given = {name: parameters.get(name) for name in PARAMETERS}
    gamma_s = given["gamma_s"]
    inputs = (x_proj, s, weight, *given.values())
    kind = Kind(
        device=x_proj.device,
        shape=(T, B, H, G // H, D, 0 if gamma_s is None else len(gamma_s)),
        given=tuple(name for name, p in given.items() if p is not None),
        batch=population is None,
        padded=batch_sizes is not None,
        eps=eps,
        **options(inputs, product_dtype),
    )
    lease = Lease(kind)
    ws = lease.workspace
    statistics = (population or RHNStatistics())._asdict()
    ws.fill(batch_sizes, x=x_proj, weight=weight, **given, **statistics)
    with torch.no_grad():
        ws.buffers["states"][0] = s
    y, s = _TritonScan.apply(lease, *inputs)
    used = (ws.buffers[name].clone() if name in ws.buffers else None for name in RHNStatistics._fields)
    return y, s, RHNStatistics(*used)
