"""The recurrence on a GPU: one fused Triton kernel per time step and direction, replayed from captured CUDA graphs.

The kernel of a step also computes the recurrent product, or cuBLAS does, where that is faster (see tuning.py).
Signature and equations are those of fused.py. Products use TF32 if torch allows it
(torch.set_float32_matmul_precision), or bfloat16 or float16 if requested; all other values are float32.

All arrays begin with the axis of replicas, then time. triton_kernels.py lists them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bnrnn.scan.arguments import only_once
from bnrnn.scan.lstm.fused import PARAMETERS
from bnrnn.scan.lstm.reference import Statistics
from bnrnn.scan.lstm.triton_kernels import ENTRIES, backward_step, forward_step
from bnrnn.scan.triton_shared import tuning
from bnrnn.scan.triton_shared.launches import INTERPRETED, Launches, launches, ready, upload
from bnrnn.scan.triton_shared.tuning import Division, Size, microseconds

LOW = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Form:
    """All on which the kernels depend, beside the division of their work."""

    device: torch.device
    num_replicas: int
    hidden_size: int
    tile: int  # rows of a tile
    given: tuple[str, ...]  # names of the parameters that are not None
    batch: bool  # whether to use batch statistics
    padded: bool
    ended_count: bool
    keep: bool  # whether a backward pass follows
    eps: float
    low: torch.dtype  # precision of products
    tf32: bool

    def constants(self) -> dict[str, Any]:
        """Compile-time constants of both kernels."""
        return {
            "H": self.hidden_size, "TILE": self.tile, "IH": "gamma_ih" in self.given, "HH": "gamma_hh" in self.given,
            "SHIFTED": "bias" in self.given, "CELL": "gamma_c" in self.given, "CELL_SHIFTED": "beta_c" in self.given,
            "BATCH": self.batch, "PADDED": self.padded, "ALL_COUNT": self.ended_count or not self.padded,
            "LOW": LOW[self.low], "WIDEN": INTERPRETED, "PRECISION": "tf32" if self.tf32 else "ieee",
        }  # fmt: skip

    def size(self, direction: str) -> Size:
        """What the best division of a step depends on."""
        forward, precision = direction == "forward", str(self.low).removeprefix("torch.")
        return Size(
            f"lstm {direction}", self.num_replicas, self.tile, 4, self.hidden_size,
            depth=self.hidden_size * (1 if forward else 4),
            precision="tf32" if self.tf32 and precision == "float32" else precision,
        )  # fmt: skip


@dataclass
class Steps:
    """The arrays of a scan, by the names of triton_kernels.ENTRIES, and its form."""

    form: Form
    arrays: dict[str, Tensor | None]

    def run(self, direction: str, division: Division | None = None) -> None:
        """Launch all steps in this direction."""
        x, weight = self.arrays["x"], self.arrays["weight"]
        assert x is not None and weight is not None
        _, T, B, _ = x.shape
        division = division or tuning.division(
            self.form.size(direction), x.device, partial(_measure, self.form, B, direction)
        )
        forward = direction == "forward"
        key = (self.form, direction, division, None if division.fused else B)
        of_form = launches(key, partial(_launches, self.form, B, direction, division))
        low = weight.to(self.form.low)
        if division.fused:
            self.arrays["weight"] = low if forward else low.transpose(1, 2).contiguous()
        else:
            of_form.fixed["weight"].copy_(low)
            if forward:
                of_form.fixed["state"].copy_(self.arrays["h"][:, 0])  # pyright: ignore[reportOptionalSubscript]
            else:
                of_form.fixed["state"].zero_()  # after the last step
        of_form.run(T, {**self.arrays, "clock": 0 if forward else T - 1, "steps": T, "batch_size": B})
        self.arrays["weight"] = weight


def _launches(form: Form, B: int, direction: str, division: Division) -> Launches:
    """The launches of one direction. Those with cuBLAS have fixed buffers for its factors and its result."""
    R, H = form.num_replicas, form.hidden_size
    forward = direction == "forward"
    constants = form.constants() | division.constants() | ({"KEEP": form.keep} if forward else {})
    kernel, grid = forward_step if forward else backward_step, (triton.cdiv(H, division.units), R)
    fixed: dict[str, Tensor] = {}
    if not division.fused:
        shapes = {"weight": (R, 4 * H, H), "state": (R, B, H if forward else 4 * H),
                  "product": (R, B, 4 * H if forward else H)}  # fmt: skip
        fixed = {name: torch.empty(shape, dtype=form.low, device=form.device) for name, shape in shapes.items()}

    def step(table: Tensor, offset: int) -> None:
        if fixed:
            weight = fixed["weight"]
            torch.bmm(fixed["state"], weight.transpose(1, 2) if forward else weight, out=fixed["product"])
        kernel[grid](table, offset, form.eps, **constants)

    return Launches(form.device, ENTRIES, step, 1 if forward else -1, fixed)


class _TritonScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: Steps, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        steps.run("forward")
        a, T = steps.arrays, inputs[0].shape[1]  # pyright: ignore[reportOptionalMemberAccess]
        assert a["h"] is not None and a["c"] is not None
        y, c = a["h"][:, 1:].detach(), a["c"][:, T if steps.form.keep else T % 2].clone()
        ctx.save_for_backward(y, inputs[3])  # autograd raises an error if one is changed before the backward pass
        ctx.steps = steps
        return y, c

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        _ = ctx.saved_tensors
        steps = ctx.steps
        if steps is None:
            raise RuntimeError("this scan was already run backward, which freed its buffers: run it forward again")
        ctx.steps = None
        return None, *_gradients(steps, *grads)


def _gradients(steps: Steps, dy: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients with respect to the arguments of `triton_scan`, in the order of the autograd function."""
    form, a = steps.form, steps.arrays
    given = {f"d{name}": torch.zeros_like(a[name]) for name in form.given}  # pyright: ignore
    a |= {"dy": ready(dy), "dc": dc.clone(memory_format=torch.contiguous_format), **given}
    if a.get("dx") is None:
        a["dx"] = torch.empty_like(a["x"])  # pyright: ignore
    if form.padded:
        a["dh"] = torch.zeros_like(a["dc"])  # pyright: ignore
    steps.run("backward")
    du, h, weight, running, dx = (a.get(name) for name in ("u", "h", "weight", "running", "dx"))
    assert du is not None and h is not None and weight is not None
    first = du[:, 0].to(form.low) @ weight.to(form.low)
    dh = first.float()
    if running is not None:  # sequences without a single step
        ended = torch.arange(du.shape[2], device=du.device)[:, None] >= running[0]
        dh += a["dh"] * ended  # pyright: ignore
    left, right = du.flatten(1, 2).to(form.low), h[:, :-1].flatten(1, 2).to(form.low)
    dweight = (left.transpose(1, 2) @ right).float()
    return dx, dh, a["dc"], dweight, *(given.get(f"d{name}") for name in PARAMETERS)


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

    A second backward pass through the same scan raises RuntimeError.
    """
    R, _, B, G = x_proj.shape
    given = {name: parameters.get(name) for name in PARAMETERS}
    inputs = (x_proj, h, c, weight_hh, *given.values())
    form = Form(
        device=x_proj.device,
        num_replicas=R,
        hidden_size=G // 4,
        tile=tuning.tile_of(B),
        given=tuple(name for name, p in given.items() if p is not None),
        batch=population is None,
        padded=batch_sizes is not None,
        ended_count=ended_count,
        keep=torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs),
        eps=eps,
        low=product_dtype or torch.float32,
        tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",  # torch.set_float32_matmul_precision sets it
    )
    with torch.no_grad():
        steps = Steps(form, _arrays(form, x_proj, h, c, weight_hh, given, population, batch_sizes, overwrite))
    y, c = _TritonScan.apply(steps, *inputs)
    used = Statistics(*(steps.arrays.get(name) for name in Statistics._fields))
    return y, (y[:, -1], c), used


def _arrays(
    form: Form, x_proj: Tensor, h: Tensor, c: Tensor, weight_hh: Tensor, given: dict[str, Tensor | None],
    population: Statistics | None, batch_sizes: list[int] | None, overwrite: bool,
) -> dict[str, Tensor | None]:  # fmt: skip
    """The arrays of a scan with these arguments."""
    R, T, B, G = x_proj.shape
    H, x = G // 4, ready(x_proj.detach())
    assert x is not None
    arrays: dict[str, Tensor | None] = {name: ready(None if p is None else p.detach()) for name, p in given.items()}
    states = {"h": x.new_empty(R, T + 1, B, H), "c": x.new_empty(R, T + 1 if form.keep else 2, B, H)}
    states["h"][:, 0], states["c"][:, 0] = h, c
    arrays |= {"x": x, "weight": ready(weight_hh.detach()), **states}
    sizes = {"ih": G, "hh": G, "c": H}
    for name, value in (population or Statistics())._asdict().items():
        kind = name.partition("_")[2]
        if given[f"gamma_{kind}"] is not None:
            arrays[name] = x.new_empty(R, T, sizes[kind]) if value is None else ready(value.detach())
    if batch_sizes is not None:
        running = torch.empty(T + 1, dtype=torch.int32, device=x.device)
        upload([*batch_sizes, 0], running)
        arrays["running"] = running
    if form.keep:
        arrays |= {"u": torch.empty_like(x), "normal_x": x}
        if overwrite or x.data_ptr() != x_proj.data_ptr():
            arrays["dx"] = x
        elif "gamma_ih" in form.given:
            arrays["normal_x"] = arrays["dx"] = torch.empty_like(x)
    return arrays


def _measure(form: Form, B: int, direction: str, division: Division) -> float:
    """Microseconds of a step with this division, on random data."""
    R, T, H = form.num_replicas, 32, form.hidden_size

    generator = torch.Generator(form.device).manual_seed(0)  # not the one that a training draws from

    def draw(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, device=form.device, generator=generator)

    given = {name: draw(R, H if name.endswith("_c") else 4 * H) for name in form.given}
    population = None if form.batch else Statistics(*(draw(R, T, n).abs() for n in (4 * H,) * 4 + (H,) * 2))
    given = {name: given.get(name) for name in PARAMETERS}
    arrays = _arrays(form, draw(R, T, B, 4 * H), draw(R, B, H), draw(R, B, H), draw(R, 4 * H, H), given, population,
                     [B] * T if form.padded else None, True)  # fmt: skip
    arrays |= {f"d{name}": torch.zeros_like(p) for name, p in given.items() if p is not None}
    arrays |= {"dy": draw(R, T, B, H), "dc": draw(R, B, H), "dh": draw(R, B, H)}
    steps = Steps(form, arrays)
    return microseconds(partial(steps.run, direction, division)) / T
