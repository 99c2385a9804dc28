"""Measures a training step of GRUs and light GRUs against nn.GRU, and against a Python loop as SpeechBrain has it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.bench.layers import SHAPES
from bnrnn.bench.timing import NAIVE, Case, Plan
from bnrnn.layers.gru_stack import GRU, LiGRU
from bnrnn.layers.ligru import LiGRU as SingleLiGRU

SECTION, NN_GRU, LIGRU = "GRU and light GRU", "nn.GRU", "LiGRU"
NAMES = ("S1", "S5", "speech")  # of SHAPES
T = 500  # steps of the sequences for the loop, whose time grows faster than their length
TARGET, OVER_LOOP = 0.9, 0.1  # target ratios of LiGRU to nn.GRU, and to the loop


class NaiveLiGRU(nn.Module):
    """A light GRU as SpeechBrain computes it: batch norm of the input product, then a loop that slices it."""

    def __init__(self, layer: SingleLiGRU) -> None:
        super().__init__()
        self.layer = layer
        for name, value in (("mean", 0.0), ("var", 1.0)):
            self.register_buffer(name, torch.full((2 * layer.hidden_size,), value))

    def forward(self, x: Float[Tensor, "T B I"]) -> tuple[Float[Tensor, "T B H"], Float[Tensor, "B H"]]:
        layer, norm = self.layer, self.layer.bn_ih
        assert norm is not None
        product = (x @ layer.weight_ih.T).flatten(0, 1)
        w = F.batch_norm(product, self.mean, self.var, norm.gamma, layer.bias, True, norm.momentum, norm.eps)  # pyright: ignore
        w, h, ys = w.view(*x.shape[:2], -1), x.new_zeros(x.shape[1], layer.hidden_size), []
        for t in range(len(x)):
            z, candidate = (w[t] + h @ layer.weight_hh.T).chunk(2, 1)
            z = torch.sigmoid(z)
            h = z * h + (1 - z) * torch.relu(candidate)
            ys.append(h)
        return torch.stack(ys), h


def step(model: nn.Module, x: Tensor, dy: Tensor) -> None:
    """One forward and backward pass, also of a loop that does not use all parameters of its layer."""
    wanted = [*model.parameters(), *([x] if x.requires_grad else [])]
    torch.autograd.grad(model(x)[0], wanted, dy, allow_unused=True)


def variants(I: int, H: int, num_steps: int) -> dict[str, nn.Module]:
    """The modules by name; nn.GRU comes first."""
    return {NN_GRU: nn.GRU(I, H), "GRU": GRU(I, H), "input_batch": GRU(I, H, norm="input_batch", t_max=num_steps),
            "layer": GRU(I, H, norm="layer"), LIGRU: LiGRU(I, H), "SLiGRU": LiGRU(I, H, norm="layer")}  # fmt: skip


def gru_cases(device: torch.device, plan: Plan) -> Iterator[Case]:
    """A step on the engine that `auto` selects: one case for each shape, and one against the loop."""

    def runs_of(models: dict[str, Any], x: Tensor, H: int) -> dict[str, Any]:
        dy = torch.randn(*x.shape[:2], H, device=device)
        return {name: partial(step, model.to(device), x, dy) for name, model in models.items()}

    torch.manual_seed(0)
    for key in NAMES:
        shape = SHAPES[key]
        num_steps = shape.T if plan.full_length else shape.quick_T
        x = torch.randn(num_steps, shape.B, shape.I, device=device).requires_grad_(shape.input_gradient)
        runs = runs_of(variants(shape.I, shape.H, num_steps), x, shape.H)
        targets = {LIGRU: TARGET} if device.type == "cpu" else {}
        yield Case(SECTION, f"{key}, T {num_steps}", runs, NN_GRU, targets)
    shape = SHAPES["speech"]
    x, layer = torch.randn(T, shape.B, shape.I, device=device), SingleLiGRU(shape.I, shape.H)
    runs = runs_of({NAIVE: NaiveLiGRU(layer), LIGRU: layer}, x, shape.H)
    yield Case(f"{SECTION}: a loop", f"speech, T {T}", runs, NAIVE, {LIGRU: OVER_LOOP} if device.type == "cpu" else {})
