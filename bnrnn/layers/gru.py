"""Gated recurrent unit, Cho et al. 2014 (arXiv:1406.1078), in the form of torch.nn.GRU, with optional normalization.

    r, z = σ(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)                           for their gates
    n    = tanh(W_ih x_t + b_ih + r ⊙ (W_hh h_{t-1} + b_hh))                  for the candidate
    h_t  = (1 - z) ⊙ n + z ⊙ h_{t-1}

"input_batch" replaces W_ih x_t + b_ih by BN(W_ih x_t; γ, b_ih), as Laurent et al. 2015 (arXiv:1510.01378, eq. 18) do in
an LSTM. "layer" replaces the two products by LN(W_ih x_t; γ_ih, b_ih) and LN(W_hh h_{t-1}; γ_hh, b_hh), as in the GRU
of the supplementary material of Ba et al. 2016 (arXiv:1607.06450): r and z are normalized together, and n for itself.
"""

import torch
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.base import RecurrentLayer, State
from bnrnn.layers.norm import SequenceBatchNorm, t_max_of_input
from bnrnn.scan import gru_scan, linear
from bnrnn.scan.gru.reference import standardize

EPS = 1e-5  # added to the variances of layer normalization


class GRU(RecurrentLayer):
    """`y, (h,) = GRU(input_size, hidden_size)(x, state=None)`.

    Args:
        t_max: length of the training sequences; only norm="input_batch" with input_statistics="frame" needs it.
        bias: whether there are b_ih and b_hh. A norm requires them, because they are its shifts.
        norm: None, "input_batch" or "layer", see above.
        input_statistics: of "input_batch", "frame" or "sequence", as in bnrnn.layers.input_bn_lstm.
        statistics, momentum: of "input_batch"; see bnrnn.layers.norm.SequenceBatchNorm.

    Raises BnrnnError for an unknown norm, for a norm without bias, and for a missing t_max.
    """

    num_gates = 3
    state_names = ("h",)
    engines = ("reference", "fused", "cpu")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        t_max: int | None = None,
        bias: bool = True,
        norm: str | None = None,
        input_statistics: str = "frame",
        statistics: str = "exact",
        momentum: float = 0.1,
    ) -> None:
        if norm not in (None, "input_batch", "layer"):
            raise BnrnnError(f"norm={norm!r} is unknown: use None, 'input_batch' or 'layer'")
        if norm is not None and not bias:
            raise BnrnnError(f"norm={norm!r} needs bias=True: the biases are the shifts of the normalization")
        super().__init__(input_size, hidden_size)
        G, self.norm, self.bn_ih = 3 * hidden_size, norm, None
        self.bias_ih, self.bias_hh = (nn.Parameter(torch.empty(G)) if bias else None for _ in range(2))
        self.gamma_ih, self.gamma_hh = (nn.Parameter(torch.empty(G)) if norm == "layer" else None for _ in range(2))
        if norm == "input_batch":
            over = t_max_of_input(input_statistics, t_max)
            self.bn_ih = SequenceBatchNorm(G, over, 1.0, statistics=statistics, momentum=momentum)
        self.reset_parameters()

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        product = x_proj = linear(x, self.weight_ih, self.bias_ih if self.norm is None else None)  # (T, B, 3H)
        if self.bn_ih is not None:
            x_proj = self.bn_ih(product, t_start, self.bias_ih, batch_sizes)
        elif self.gamma_ih is not None and self.bias_ih is not None:
            x_proj = torch.addcmul(self.bias_ih, standardize(product, self.hidden_size, EPS), self.gamma_ih)
        y, h = gru_scan(
            x_proj.to(product.dtype),
            state[0],
            self.weight_hh,
            gamma_hh=self.gamma_hh,
            bias_hh=self.bias_hh,
            eps=EPS,
            batch_sizes=batch_sizes,
            overwrite=True,
        )
        return y, (h,)
