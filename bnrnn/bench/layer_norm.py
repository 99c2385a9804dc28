"""Measures layer normalization in an LSTM against Python loops, as public repositories have them."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.bench.gru import step
from bnrnn.bench.layers import SHAPES, draw
from bnrnn.bench.timing import LAYER_NORM, Case, Plan
from bnrnn.layers.ln_lstm import LNLSTM

SECTION, PAPER, SUM = "Layer norm: loops", "a loop of the paper's equations", "a loop as in torchaudio"
NAMES = ("S1", "speech")  # of SHAPES


class LayerNormLoop(nn.Module):
    """A layer-normalized LSTM as a Python loop, with the parameters of `LNLSTM`.

    Args:
        over_sum: False for Ba et al. 2016 (arXiv:1607.06450), eqs. 20-22, which haste documents too. True for the layer
            of torchaudio's transducers: one normalization of the sum of both products, and the normalized cell is
            passed on to the next step.
    """

    def __init__(self, layer: LNLSTM, over_sum: bool) -> None:
        super().__init__()
        self.layer, self.over_sum = layer, over_sum

    def forward(self, x: Float[Tensor, "T B I"]) -> tuple[Float[Tensor, "T B H"], tuple[Tensor, Tensor]]:
        layer, H = self.layer, self.layer.hidden_size
        assert layer.bias is not None
        product, ys = x @ layer.weight_ih.T, []
        if not self.over_sum:
            product = F.layer_norm(product, (4 * H,), layer.gamma_ih, layer.beta_ih, layer.eps)
        h = c = x.new_zeros(x.shape[1], H)
        for of_x in product:
            of_h = h @ layer.weight_hh.T + (of_x if self.over_sum else 0)
            gates = F.layer_norm(of_h, (4 * H,), layer.gamma_hh, layer.beta_hh, layer.eps)
            i, f, g, o = (gates + layer.bias + (0 if self.over_sum else of_x)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            normalized = F.layer_norm(c, (H,), layer.gamma_c, layer.beta_c, layer.eps)
            h = o.sigmoid() * normalized.tanh()
            c = normalized if self.over_sum else c
            ys.append(h)
        return torch.stack(ys), (h, c)


def layer_norm_cases(device: torch.device, plan: Plan) -> Iterator[Case]:
    """A training step of one layer on the engine that `auto` selects, and of both loops."""
    for key in NAMES:
        shape = SHAPES[key]
        T = shape.T if plan.full_length else shape.quick_T
        ours, (x, dy) = LNLSTM(shape.I, shape.H).to(device), draw(shape, T, device)
        models = {PAPER: LayerNormLoop(ours, over_sum=False), SUM: LayerNormLoop(ours, over_sum=True), LAYER_NORM: ours}
        runs = {name: partial(step, model, x, dy) for name, model in models.items()}
        yield Case(SECTION, f"{key}, T {T}", runs, PAPER)
