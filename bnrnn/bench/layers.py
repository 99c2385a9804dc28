"""Measures the speed of a training step of a BN-LSTM against torch.nn.LSTM and a naive loop over time.

A training step here is a forward and a backward pass with a given gradient of the output. It computes the gradients of
all parameters, and that of the input if there would be a layer below.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.bench.timing import (
    LAYER_NORM,
    NAIVE,
    NN_LSTM,
    NO_NORM,
    TRAINING,
    ZONEOUT,
    Case,
    Plan,
    engines,
    fastest,
    set_precision,
)
from bnrnn.layers.base import State
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.stack import LSTM
from bnrnn.scan import BACKENDS, set_backend

CLEAR_REFS = Path("/proc/self/clear_refs")  # without this file (macOS), the peak memory of one step cannot be measured
ON_GPU = {"S1": 1.5, "S2": 1.1, "S3": 1.05, "S4": 0.8}  # target ratios of BN-LSTM to nn.LSTM


@dataclass(frozen=True)
class Shape:
    """The sizes of the layers of a task.

    Args:
        quick_T: a smaller T for quick measurements; time is linear in T.
        target: the ratio that the time of BN-LSTM to that of nn.LSTM should have at most, on one thread of a CPU.
        layer_target: the same with layer normalization.
    """

    title: str
    T: int
    quick_T: int
    B: int
    I: int
    H: int
    num_layers: int = 1
    norm: str = "batch"
    one_hot: bool = False
    input_gradient: bool = False
    target: float | None = None
    layer_target: float | None = None

    @property
    def about(self) -> str:
        layers = f", {self.num_layers} layers" if self.num_layers > 1 else ""
        return f"{self.title} (B {self.B}, I {self.I}, H {self.H}{layers})"

    def gflop(self, T: int) -> float:
        """10^9 operations of the matrix products of a step: three per weight, without unneeded input gradients."""
        of_h = 3 * self.H * self.num_layers
        of_x = self.I * (3 if self.input_gradient else 2) + 3 * self.H * (self.num_layers - 1)
        return 2 * T * self.B * 4 * self.H * (of_h + of_x) / 1e9


# fmt: off
SHAPES = {
    "S1": Shape("sequential MNIST", 784, 196, 64, 1, 100, target=0.95, layer_target=0.85),
    "S1b": Shape("sequential MNIST, the paper's batch", 784, 196, 100, 1, 100, target=0.95),
    "S2": Shape("char-PTB", 100, 16, 64, 50, 1000, one_hot=True, target=1.0, layer_target=1.1),
    "S3": Shape("text8, a third of its 180 steps", 60, 6, 128, 27, 2000, one_hot=True, target=1.0),
    "S4": Shape("word-PTB", 35, 35, 32, 650, 650, num_layers=2, input_gradient=True, target=1.05, layer_target=0.95),
    "S4i": Shape("word-PTB, BN of the input product alone", 35, 35, 32, 650, 650, num_layers=2, norm="input_batch",
                 input_gradient=True),
    "S5": Shape("RHN stand-in, a BN-LSTM of its size", 20, 20, 64, 512, 512, input_gradient=True, target=1.05,
                layer_target=1.0),
    "reader": Shape("a direction of the attentive reader", 150, 49, 40, 240, 240, input_gradient=True, target=1.05),
    "speech": Shape("a direction of the speech models", 500, 100, 24, 250, 250, input_gradient=True, target=1.05,
                    layer_target=1.0),
}
# fmt: on
WITHOUT_NORM, TWO_THREADS = 0.95, 1.15  # target ratios for all shapes


class NaiveLSTM(nn.Module):
    """A normalized LSTM as public repositories write it: a loop with products and F.batch_norm, running statistics."""

    def __init__(self, lstm: LSTM) -> None:
        super().__init__()
        self.lstm = lstm
        self.running: dict[SequenceBatchNorm, tuple[Tensor, Tensor]] = {}

    def _norm(self, norm: SequenceBatchNorm | None, x: Float[Tensor, "B F"], t: int) -> Float[Tensor, "B F"]:
        if norm is None:
            return x
        if norm not in self.running:
            self.running[norm] = (torch.zeros_like(norm.pop_mean), torch.ones_like(norm.pop_var))
        mean, var = self.running[norm]
        return F.batch_norm(x, mean[t], var[t], norm.gamma, norm.beta, self.training, eps=norm.eps)

    def _layer(self, layer: Any, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bn_hh, bn_c = getattr(layer, "bn_hh", None), getattr(layer, "bn_c", None)
        ys = []
        for t, x_t in enumerate(x):
            of_x = self._norm(layer.bn_ih, x_t @ layer.weight_ih.T, t)
            i, f, g, o = (self._norm(bn_hh, h @ layer.weight_hh.T, t) + of_x + layer.bias).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * self._norm(bn_c, c, t).tanh()
            ys.append(h)
        return torch.stack(ys), h, c

    def forward(
        self, x: Float[Tensor, "T B I"], state: State | None = None
    ) -> tuple[Float[Tensor, "T B H"], tuple[Float[Tensor, "L B H"], Float[Tensor, "L B H"]]]:
        hs, cs = state or [x.new_zeros(len(self.lstm.layers), x.shape[1], self.lstm.hidden_size)] * 2
        lasts = []
        for layer, h, c in zip(self.lstm.layers, hs, cs, strict=True):
            x, *last = self._layer(layer, x, h, c)
            lasts.append(last)
        h, c = (torch.stack(values) for values in zip(*lasts, strict=True))
        return x, (h, c)


def build(variant: str, shape: Shape, T: int, device: torch.device) -> nn.Module:
    """The layer of a variant. For one shape, all variants except nn.LSTM have the same initial weights."""
    torch.manual_seed(0)
    if variant == NN_LSTM:
        return nn.LSTM(shape.I, shape.H, shape.num_layers).to(device)
    norm = {NO_NORM: None, ZONEOUT: None, LAYER_NORM: "layer"}.get(variant, shape.norm)
    zoneout = (0.15, 0.15) if variant == ZONEOUT else None
    lstm = LSTM(shape.I, shape.H, shape.num_layers, norm=norm, t_max=T, zoneout=zoneout)
    return (NaiveLSTM(lstm) if variant == NAIVE else lstm).to(device)


def draw(shape: Shape, T: int, device: torch.device) -> tuple[Float[Tensor, "T B I"], Float[Tensor, "T B H"]]:
    """A random input, and a random gradient of the output."""
    torch.manual_seed(1)
    if shape.one_hot:
        x = F.one_hot(torch.randint(shape.I, (T, shape.B)), shape.I).float()
    else:
        x = torch.randn(T, shape.B, shape.I)
    return x.to(device).requires_grad_(shape.input_gradient), torch.randn(T, shape.B, shape.H).to(device)


def step(variant: str, layer: nn.Module, x: Float[Tensor, "T B I"], dy: Float[Tensor, "T B H"]) -> tuple[Tensor, ...]:
    """One forward and backward pass, which is timed."""
    set_backend(variant if variant in BACKENDS else "auto")
    y, _ = layer(x)
    return torch.autograd.grad(y, [*layer.parameters(), *([x] if x.requires_grad else [])], dy.to(y.dtype))


def relative_errors(variants: list[str], shape: Shape, T: int, device: torch.device) -> dict[str, float]:
    """||a - exact|| / ||exact||, the largest over y, h, c and all gradients; exact is the reference in float64."""
    x, dy = draw(shape, T, device)
    h, c, dh, dc = torch.randn(4, shape.num_layers, shape.B, shape.H, device=device).unbind(0)

    def run(variant: str, dtype: torch.dtype) -> list[Tensor]:
        if variant in BACKENDS:
            set_backend(variant)
        layer = build(variant, shape, T, device).to(dtype)
        given = [v.detach().to(dtype).requires_grad_() for v in (x, h, c)]
        y, state = layer(given[0], tuple(given[1:]))
        gradients = [v.to(dtype) for v in (dy, dh, dc)]
        return [y, *state, *torch.autograd.grad((y, *state), [*layer.parameters(), *given], gradients)]

    with torch.autocast(device.type, enabled=False):
        exact = run("reference", torch.float64)

    def worst(variant: str) -> float:
        pairs = zip(run(variant, torch.float32), exact, strict=True)
        return torch.stack([(a - e).norm() / e.norm() for a, e in pairs]).max().item()  # NaN stays NaN

    return {variant: worst(variant) for variant in variants}


def _resident(field: str) -> float:
    """The memory of this process in MiB: VmRSS is the present one, VmHWM the largest since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def memory_growth(variant: str, shape: Shape, T: int, device: torch.device, precision: str) -> float:
    """The MiB that one step adds, at its peak, to the memory of layer and data. Call it in a new process."""
    # keep_heap is not used here: a heap that keeps freed memory also counts its gaps, a quarter more with nn.LSTM.
    set_precision(device, precision)
    torch.set_num_threads(1)
    small = replace(shape, B=2, H=8)  # first let libraries allocate their own memory
    step(variant, build(variant, small, 2, device), *draw(small, 2, device))
    if device.type == "cuda":  # and let the Triton engine try its kernels, which needs memory only once
        step(variant, build(variant, shape, 2, device), *draw(shape, 2, device))
    layer, (x, dy) = build(variant, shape, T, device), draw(shape, T, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step(variant, layer, x, dy)
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    CLEAR_REFS.write_text("5")  # resets VmHWM
    before = _resident("VmRSS")
    step(variant, layer, x, dy)
    return _resident("VmHWM") - before


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a new process. Returns None if that process dies, for example because memory is short."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool:
            return None


def training_cases(shapes: dict[str, Shape], device: torch.device, plan: Plan) -> Iterator[Case]:
    """One case per shape: a training step by every engine."""
    best, one_thread = fastest(device), torch.get_num_threads() == 1
    variants = [NN_LSTM, NAIVE, *engines(device), NO_NORM, LAYER_NORM, ZONEOUT]
    if not plan.thorough:
        variants = [name for name in variants if name not in ("reference", LAYER_NORM, ZONEOUT)]
    for key, shape in shapes.items():
        T = shape.T if plan.full_length else shape.quick_T
        x, dy = draw(shape, T, device)
        steps = {name: partial(step, name, build(name, shape, T, device), x, dy) for name in variants}
        if device.type == "cuda":
            targets = {best: ON_GPU[key]} if key in ON_GPU else {}
        elif not one_thread:
            targets = {best: TWO_THREADS}
        else:
            targets = {best: shape.target} if shape.target else {}
            targets[NO_NORM] = WITHOUT_NORM
            targets |= {LAYER_NORM: shape.layer_target} if shape.layer_target else {}
        yield Case(TRAINING, f"{key}, T {T}", steps, NN_LSTM, targets, shape.gflop(T))
