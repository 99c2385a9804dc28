"""The recurrence on a GPU: one fused Triton kernel per time step and direction, replayed from captured CUDA graphs.

The kernel of a step also computes the recurrent product, or cuBLAS does, where that is faster (see tuning.py).
Signature and equations are those of fused.py. Products use TF32 if torch allows it
(torch.set_float32_matmul_precision), or bfloat16 or float16 if requested; all other values are float32.

All arrays begin with the axis of replicas, then time. triton_kernels.py lists them.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from bnrnn.scan import autograd
from bnrnn.scan.lstm.fused import PARAMETERS
from bnrnn.scan.lstm.reference import Statistics
from bnrnn.scan.lstm.triton_kernels import ENTRIES, backward_sequence, backward_step, forward_sequence, forward_step
from bnrnn.scan.triton_shared import form, tuning
from bnrnn.scan.triton_shared.launches import INTERPRETED, Launches, launches, ready
from bnrnn.scan.triton_shared.tuning import Division, microseconds


@dataclass(frozen=True)
class Form(form.Form):
    """The form of an LSTM's scan."""

    num_replicas: int
    ended_count: bool

    def constants(self) -> dict[str, Any]:
        return super().constants() | {
            "IH": "gamma_ih" in self.given, "HH": "gamma_hh" in self.given, "SHIFTED": "bias" in self.given,
            "CELL": "gamma_c" in self.given, "CELL_SHIFTED": "beta_c" in self.given,
            "ALL_COUNT": self.ended_count or not self.padded,
        }  # fmt: skip


@dataclass
class Steps:
    """The arrays of a scan, by the names of triton_kernels.ENTRIES, and its form."""

    form: Form
    arrays: dict[str, Tensor]

    def fields(self) -> dict[str, Any]:
        return vars(self)

    def forward(self) -> None:
        self.run("forward")

    def results(self) -> tuple[Tensor, Tensor]:
        a = self.arrays
        T = a["x"].shape[1]
        return a["h"][:, 1:].detach(), a["c"][:, T if self.form.keep else T % 2].clone()

    def gradients(self, dy: Tensor, dc: Tensor) -> dict[str, Tensor | None]:
        of, a = self.form, self.arrays
        given = {f"d{name}": torch.zeros_like(a[name]) for name in of.given}
        if "dx" not in a:
            a["dx"] = torch.empty_like(a["x"])
        a |= {"dy": ready(dy), "dc": dc.clone(memory_format=torch.contiguous_format), **given}
        if of.padded:
            a["dh"] = torch.zeros_like(a["dc"])
        self.run("backward")
        du = a["u"]
        dh = (du[:, 0].to(of.low) @ a["weight"].to(of.low)).float()
        if of.padded:  # sequences without a single step
            dh += a["dh"] * (torch.arange(du.shape[2], device=du.device)[:, None] >= a["running"][0])
        left, right = du.flatten(1, 2).to(of.low), a["h"][:, :-1].flatten(1, 2).to(of.low)
        dweight = (left.transpose(1, 2) @ right).float()
        of_parameters = {name: given[f"d{name}"] for name in of.given}
        return {"x_proj": a["dx"], "h": dh, "c": a["dc"], "weight_hh": dweight, **of_parameters}

    def run(self, direction: str, division: Division | None = None) -> None:
        """Launch all steps in this direction."""
        of, a = self.form, self.arrays
        _, T, B, _ = a["x"].shape
        division = division or tuning.division(
            of.size("lstm", of.num_replicas, 4, direction), of.device, partial(_measure, of, T, B, direction)
        )
        forward = direction == "forward"
        key = (of, direction, division, None if division.fused else B)
        of_form = launches(key, of.device, partial(_launches, of, B, direction, division))
        weight = a["weight"].to(of.low)
        if division.persistent:
            of_form.fixed["arrived"].zero_()
        if division.fused:
            weight = weight if forward else weight.transpose(1, 2).contiguous()
        else:
            of_form.fixed["weight"].copy_(weight)
            if forward:
                of_form.fixed["state"].copy_(a["h"][:, 0])
            else:
                of_form.fixed["state"].zero_()  # after the last step
        clock = 0 if forward else T - 1
        of_form.run(T, {**a, "weight": weight, "clock": clock, "steps": T, "batch_size": B})


def _launches(of: Form, B: int, direction: str, division: Division) -> Launches:
    """The launches of one direction. Those with cuBLAS have fixed buffers for its factors and its result."""
    R, H = of.num_replicas, of.hidden_size
    forward = direction == "forward"
    constants = of.constants() | division.constants() | ({"KEEP": of.keep} if forward else {})
    grid, fixed = (triton.cdiv(H, division.units), R), {}
    if division.persistent:
        sequence = (forward_sequence if forward else backward_sequence)[grid]
        fixed["arrived"] = torch.zeros(R, dtype=torch.int32, device=of.device)
        # The driver refuses a cooperative launch whose programs cannot all be resident.
        together = {} if INTERPRETED else {"launch_cooperative_grid": True}

        def steps(table: Tensor, _: int) -> None:
            sequence(table, of.eps, **constants, **together)

        return Launches(of.device, ENTRIES, steps, 1 if forward else -1, fixed, persistent=True)
    kernel = (forward_step if forward else backward_step)[grid]
    if not division.fused:
        shapes = {"weight": (R, 4 * H, H), "state": (R, B, H if forward else 4 * H),
                  "product": (R, B, 4 * H if forward else H)}  # fmt: skip
        fixed = {name: torch.empty(shape, dtype=of.low, device=of.device) for name, shape in shapes.items()}

    def step(table: Tensor, offset: int) -> None:
        if not division.fused:
            weight = fixed["weight"]
            torch.bmm(fixed["state"], weight.transpose(1, 2) if forward else weight, out=fixed["product"])
        kernel(table, offset, of.eps, **constants)

    return Launches(of.device, ENTRIES, step, 1 if forward else -1, fixed)


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
    overwrite: bool = False,
    **parameters: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Statistics]:
    """`lstm_scan` of reference.py in float32. Every tensor has a leading axis R of replicas.

    With `overwrite`, the memory of x_proj is used for its normalized values and for its gradient.
    """
    given = {name: parameters.get(name) for name in PARAMETERS}
    inputs = (x_proj, h, c, weight_hh, *given.values())
    of = Form(
        hidden_size=x_proj.shape[-1] // 4,
        num_replicas=len(x_proj),
        ended_count=ended_count,
        **form.options(x_proj, inputs, given, population, batch_sizes, eps, product_dtype),
    )
    with torch.no_grad():
        steps = Steps(of, _arrays(of, x_proj, h, c, weight_hh, given, population, batch_sizes, overwrite))
    y, c = autograd.run(Steps, steps, ("x_proj", "h", "c", "weight_hh", *PARAMETERS), inputs)
    used = Statistics(*(steps.arrays.get(name) for name in Statistics._fields))
    return y, (y[:, -1].clone(), c), used


def _arrays(
    of: Form, x_proj: Tensor, h: Tensor, c: Tensor, weight_hh: Tensor, given: dict[str, Tensor | None],
    population: Statistics | None, batch_sizes: list[int] | None, overwrite: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """The arrays of a scan with these arguments."""
    R, T, B, G = x_proj.shape
    H, x = G // 4, ready(x_proj.detach())
    arrays = {name: ready(p.detach()) for name, p in given.items() if p is not None}
    states = {"h": x.new_empty(R, T + 1, B, H), "c": x.new_empty(R, T + 1 if of.keep else 2, B, H)}
    states["h"][:, 0], states["c"][:, 0] = h, c
    arrays |= {"x": x, "weight": ready(weight_hh.detach()), **states}
    sizes = {"ih": G, "hh": G, "c": H}
    for name, value in (population or Statistics())._asdict().items():
        kind = name.partition("_")[2]
        if given[f"gamma_{kind}"] is not None:
            arrays[name] = x.new_empty(R, T, sizes[kind]) if value is None else ready(value.detach())
    if batch_sizes is not None:
        arrays["running"] = form.sizes(batch_sizes, x.device)
    if of.keep:
        arrays |= {"u": torch.empty_like(x), "normal_x": x}
        if overwrite or x.data_ptr() != x_proj.data_ptr():
            arrays["dx"] = x
        elif "gamma_ih" in of.given:
            arrays["normal_x"] = arrays["dx"] = torch.empty_like(x)
    return arrays


def _measure(of: Form, T: int, B: int, direction: str, division: Division) -> float:
    """Microseconds of a step with this division, on random data; infinity for a persistent kernel that errs."""
    T = min(T, 32)
    steps = _trial(of, T, B)
    if division.persistent:
        expected = _trial(of, T, B)
        expected.run(direction, replace(division, persistent=False))
        steps.run(direction, division)
        results = ("h", "c") if direction == "forward" else ("dc", "u")
        if not all(torch.allclose(steps.arrays[n], expected.arrays[n], 1e-3, 1e-4) for n in results):
            return math.inf
    return microseconds(partial(steps.run, direction, division)) / T


def _trial(of: Form, T: int, B: int) -> Steps:
    """Steps on random data, the same at every call."""
    R, H = of.num_replicas, of.hidden_size
    generator = torch.Generator(of.device).manual_seed(0)  # not the one that a training draws from

    def draw(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, device=of.device, generator=generator)

    given = {name: draw(R, H if name.endswith("_c") else 4 * H) if name in of.given else None for name in PARAMETERS}
    population = None if of.batch else Statistics(*(draw(R, T, n).abs() for n in (4 * H,) * 4 + (H,) * 2))
    arrays = _arrays(of, draw(R, T, B, 4 * H), draw(R, B, H), draw(R, B, H), draw(R, 4 * H, H), given, population,
                     [B] * T if of.padded else None, True)  # fmt: skip
    if of.keep:  # what the forward pass would have left
        arrays["u"].copy_(draw(R, T, B, 4 * H))
        arrays["c"].copy_(draw(R, T + 1, B, H))
        for name in set(arrays).intersection(Statistics._fields):
            arrays[name].copy_(draw(*arrays[name].shape).abs())
    arrays |= {f"d{name}": torch.zeros_like(p) for name, p in given.items() if p is not None}
    return Steps(of, arrays | {"dy": draw(R, T, B, H), "dc": draw(R, B, H), "dh": draw(R, B, H)})
