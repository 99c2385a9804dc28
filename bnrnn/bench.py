"""How fast a training step of a BN-LSTM is, beside torch.nn.LSTM and beside a naive loop over time.

A step is forward and backward with a given gradient of the output: gradients of all parameters, and of the input where
a layer lies below. scripts/bench.py puts the measurements together, stores and prints them.
"""

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.base import State
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.stack import LSTM
from bnrnn.scan import BACKENDS, backend, lstm_scan, set_backend

NN_LSTM, NAIVE = "nn.LSTM", "naive"  # the variants that are no engine
REPLICAS = 16
MEMORY_TARGET = 0.75  # of what nn.LSTM adds
CLEAR_REFS = Path("/proc/self/clear_refs")  # without it (macOS) the peak of one step cannot be told
_BEGUN = time.monotonic()


@dataclass(frozen=True)
class Shape:
    """Layers of a task; `quick_T` is a shorter T, in which time is linear; `targets` are for best / nn.LSTM."""

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
    targets: dict[str, float] = field(default_factory=dict)


# fmt: off
SHAPES = {
    "S1": Shape("sequential MNIST", 784, 196, 64, 1, 100, targets={"cpu": 1.25, "cuda": 1.5}),
    "S2": Shape("char-PTB", 100, 16, 64, 50, 1000, one_hot=True, targets={"cpu": 1.12, "cuda": 1.1}),
    "S3": Shape("text8, a third of its 180 steps", 60, 8, 128, 27, 2000, one_hot=True,
                targets={"cpu": 1.05, "cuda": 1.05}),
    "S4": Shape("word-PTB", 35, 35, 32, 650, 650, num_layers=2, input_gradient=True,
                targets={"cpu": 1.12, "cuda": 0.8}),
    "S4i": Shape("word-PTB, BN of the input product alone", 35, 35, 32, 650, 650, num_layers=2, norm="input_batch",
                 input_gradient=True),
    "S5": Shape("RHN stand-in, a BN-LSTM of its size", 20, 20, 64, 512, 512, input_gradient=True),
}
# fmt: on


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    name: str
    full_length: bool
    memory: bool
    threads: tuple[int, ...]
    error_T: int  # at most
    seconds: float  # of rounds, for every shape and number of threads


QUICK = Plan("quick", full_length=False, memory=False, threads=(1,), error_T=20, seconds=8.0)
FULL = Plan("full", full_length=True, memory=True, threads=(1, 2), error_T=50, seconds=30.0)
MIN_ROUNDS, MAX_ROUNDS = 3, 25  # whatever the seconds


class NaiveLSTM(nn.Module):
    """A normalized LSTM as public repositories write it: products, F.batch_norm and its running statistics by step."""

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


def say(text: str) -> None:
    """A line of progress, with the time since the start."""
    print(f"[{time.monotonic() - _BEGUN:5.0f} s] {text}", file=sys.stderr, flush=True)


def set_precision(device: torch.device, precision: str) -> None:
    """Of products, on both sides of a ratio. Raises BnrnnError for what the device does not have."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.rnn.fp32_precision = "tf32" if precision == "tf32" else "ieee"  # pyright: ignore
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", precision == "bfloat16")
    elif precision != "float32":
        raise BnrnnError(f"precision={precision} needs a GPU: use float32 on {device}")


def engines(device: torch.device) -> list[str]:
    """The engines that can run float32 on this device; says why another cannot."""
    able = []
    for name in BACKENDS:
        try:
            set_backend(name)
            if name != "auto" and backend(device, torch.float32) == name:
                able.append(name)
        except BnrnnError as error:
            say(f"without {name}: {error}")
    set_backend("auto")
    return able


def build(variant: str, shape: Shape, T: int, device: torch.device) -> nn.Module:
    """The layer of a variant; all but nn.LSTM's of one shape start with the same weights."""
    torch.manual_seed(0)
    if variant == NN_LSTM:
        return nn.LSTM(shape.I, shape.H, shape.num_layers).to(device)
    lstm = LSTM(shape.I, shape.H, shape.num_layers, norm=shape.norm, t_max=T)
    return (NaiveLSTM(lstm) if variant == NAIVE else lstm).to(device)


def draw(shape: Shape, T: int, device: torch.device) -> tuple[Float[Tensor, "T B I"], Float[Tensor, "T B H"]]:
    """An input, and a gradient of the output."""
    torch.manual_seed(1)
    if shape.one_hot:
        x = F.one_hot(torch.randint(shape.I, (T, shape.B)), shape.I).float()
    else:
        x = torch.randn(T, shape.B, shape.I)
    return x.to(device).requires_grad_(shape.input_gradient), torch.randn(T, shape.B, shape.H).to(device)


def step(variant: str, layer: nn.Module, x: Float[Tensor, "T B I"], dy: Float[Tensor, "T B H"]) -> tuple[Tensor, ...]:
    """Forward and backward: what is timed."""
    if variant in BACKENDS:
        set_backend(variant)
    y, _ = layer(x)
    return torch.autograd.grad(y, [*layer.parameters(), *([x] if x.requires_grad else [])], dy.to(y.dtype))


def relative_errors(variants: list[str], shape: Shape, T: int, device: torch.device) -> dict[str, float]:
    """||a - exact|| / ||exact||, the worst over y, h, c and every gradient; exact is the reference in float64."""
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


def time_in_turn(runs: dict[str, Callable[[], Any]], device: torch.device, plan: Plan) -> dict[str, list[float]]:
    """Milliseconds of every run: a warm-up each, then one of each in turn, so that all see the same machine."""
    cuda = device.type == "cuda"
    # One thread's own time, because what else runs on the machine must not count; it says nothing of two.
    clock = time.process_time if not cuda and torch.get_num_threads() == 1 else time.perf_counter

    def milliseconds(run: Callable[[], Any]) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        start = clock()
        run()
        if cuda:
            torch.cuda.synchronize(device)
        return round(1000 * (clock() - start), 4)

    for name, run in runs.items():
        say(f"  warm-up of {name}: {milliseconds(run):.4g} ms")
    times: dict[str, list[float]] = {name: [] for name in runs}
    rounds, end = 0, time.monotonic() + plan.seconds
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.monotonic() < end):
        for name, run in runs.items():
            times[name].append(milliseconds(run))
        rounds += 1
    say(f"  {rounds} rounds, ms: " + ", ".join(f"{name} {statistics.median(t):.4g}" for name, t in times.items()))
    return times


def time_variants(
    variants: list[str], shape: Shape, T: int, device: torch.device, plan: Plan
) -> dict[str, list[float]]:
    """Milliseconds of a step of every variant, on the same data."""
    x, dy = draw(shape, T, device)
    layers = {variant: build(variant, shape, T, device) for variant in variants}
    return time_in_turn({name: partial(step, name, layer, x, dy) for name, layer in layers.items()}, device, plan)


def judge(figures: dict[str, float | None], best: str, target: float | None) -> dict[str, Any]:
    """The ratio of every variant to nn.LSTM, and whether that of the fastest engine meets the target."""
    base = figures[NN_LSTM]
    ratios = {name: figure / base if figure and base else None for name, figure in figures.items()}
    reached = ratios[best]
    met = None if reached is None or target is None else reached <= target
    return {"ratio": ratios, "best": best, "target": target, "met": met}


def judge_times(times: dict[str, list[float]], target: float | None) -> dict[str, Any]:
    """Medians and minima, and what `judge` says of the medians."""
    medians = {name: statistics.median(t) for name, t in times.items()}
    best = min((name for name in medians if name not in (NN_LSTM, NAIVE)), key=lambda name: medians[name])
    minima = {name: min(t) for name, t in times.items()}
    naive_over_best = medians[NAIVE] / medians[best]
    judged = judge({**medians}, best, target)
    return {"ms": times, "median_ms": medians, "min_ms": minima, "naive_over_best": naive_over_best, **judged}


def _resident(field: str) -> float:
    """A figure of this process in MiB: VmRSS, resident now, or VmHWM, the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def memory_growth(variant: str, shape: Shape, T: int, device: torch.device, precision: str) -> float:
    """MiB by which the peak of one step exceeds what layer and data take; to be called in a fresh process."""
    # Without keep_heap: a heap that returns nothing counts its gaps too, with nn.LSTM a quarter more.
    set_precision(device, precision)
    torch.set_num_threads(1)
    small = replace(shape, B=2, H=8)  # libraries take their own share first
    step(variant, build(variant, small, 2, device), *draw(small, 2, device))
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
    """What the function returns in a process of its own; None if that process dies, as for want of memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool:
            return None


def replica_cost(engine: str, shape: Shape, device: torch.device, plan: Plan) -> dict[str, Any]:
    """The recurrence of R replicas with weights of their own: in one scan, in R scans, and one replica alone."""
    set_backend(engine)
    T, B, H, G = shape.quick_T, shape.B, shape.H, 4 * shape.H
    sizes = {"x_proj": (T, B, G), "h": (B, H), "c": (B, H), "weight_hh": (G, H), "gamma_ih": (G,), "gamma_hh": (G,),
             "bias": (G,), "gamma_c": (H,), "beta_c": (H,)}  # fmt: skip
    every = {name: 0.1 * torch.randn(REPLICAS, *size, device=device) for name, size in sizes.items()}
    dy = torch.randn(REPLICAS, T, B, H, device=device)
    each = [({name: value[r].clone() for name, value in every.items()}, dy[r]) for r in range(REPLICAS)]

    def scan(given: dict[str, Any], dy: Tensor) -> None:
        y, _, _ = lstm_scan(**{name: value.requires_grad_() for name, value in given.items()})
        torch.autograd.grad(y, list(given.values()), dy)

    def scan_each() -> None:
        for given, dy_r in each:
            scan(given, dy_r)

    together, calls = f"R={REPLICAS}", f"{REPLICAS} calls"
    runs = {"R=1": partial(scan, *each[0]), together: partial(scan, every, dy), calls: scan_each}
    times = time_in_turn(runs, device, plan)
    median = {name: statistics.median(t) for name, t in times.items()}
    ratios = {"over_one": median[together] / median["R=1"], "calls_over_together": median[calls] / median[together]}
    return {"T": T, "R": REPLICAS, "engine": engine, "ms": times, **ratios}
