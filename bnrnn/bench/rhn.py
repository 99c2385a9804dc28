"""Measures the speed of a training step of a batch-normalized recurrent highway network against a naive loop."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.bench.layers import step
from bnrnn.bench.timing import NAIVE, Case, engines, fastest
from bnrnn.layers.bn_rhn import BNRHN

T, B, H, D = 20, 64, 512, 3
TARGETS = {"cpu": 1 / 2.2, "cuda": 1 / 20}  # target ratios to the time of the naive loop


class NaiveBNRHN(nn.Module):
    """A straightforward BN-RHN: a loop of products and F.batch_norm with running statistics."""

    def __init__(self, layer: BNRHN) -> None:
        super().__init__()
        assert layer.bn_x is not None and layer.bn_s is not None and layer.bn_s.beta is not None
        self.layer = layer
        zeros, ones = layer.bias.new_zeros, layer.bias.new_ones
        sizes = [layer.bn_x.gamma.numel(), *[layer.hidden_size] * layer.depth]
        self.running = [[(zeros(n), ones(n)) for _ in range(layer.bn_x.t_max)] for n in sizes]

    def forward(self, x: Float[Tensor, "T B I"]) -> tuple[Float[Tensor, "T B H"], Any]:
        layer, of_x, of_s = self.layer, self.layer.bn_x, self.layer.bn_s
        assert of_x is not None and of_s is not None and of_s.beta is not None
        s, ys = x.new_zeros(x.shape[1], layer.hidden_size), []
        gammas, betas = (v.view(layer.depth, -1) for v in (of_s.gamma, of_s.beta))
        for t, x_t in enumerate(x):
            u = F.batch_norm(x_t @ layer.weight_ih.T, *self.running[0][t], of_x.gamma, None, True, eps=of_x.eps)
            for d in range(layer.depth):
                v = F.batch_norm(s, *self.running[1 + d][t], gammas[d], betas[d], True, eps=of_s.eps)
                a = v @ layer.weight_hh[d].T + layer.bias[d] + (u if d == 0 else 0.0)
                h, transform, carry = a.chunk(3, dim=1)
                s = h.tanh() * transform.sigmoid() + s * carry.sigmoid()
            ys.append(s)
        return torch.stack(ys), None


def rhn_case(device: torch.device) -> Case:
    """A step by every engine and by the naive loop."""
    torch.manual_seed(0)
    layer = BNRHN(H, H, T, depth=D).to(device)
    x, dy = torch.randn(T, B, H, device=device, requires_grad=True), torch.randn(T, B, H, device=device)
    models = {NAIVE: NaiveBNRHN(layer), **dict.fromkeys(engines(device), layer)}
    runs = {name: partial(step, name, model, x, dy) for name, model in models.items()}
    name = f"BN-RHN, T {T}, B {B}, I and H {H}, depth {D}"
    gflop = 2 * T * B * 3 * H * (3 * H + 3 * D * H) / 1e9
    return Case("Recurrent highway networks", name, runs, NAIVE, {fastest(device): TARGETS[device.type]}, gflop)
