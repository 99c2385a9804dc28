"""Light gated recurrent unit, Ravanelli et al. 2018 (arXiv:1803.10225), and its stabilized form.

    z   = σ(BN(W_ih x_t; γ, b) + W_hh h_{t-1})                for its gate
    n   = μ ⊙ act(BN(W_ih x_t; γ, b) + W_hh h_{t-1})          for the candidate; act is ReLU by default
    h_t = z ⊙ h_{t-1} + (1 - z) ⊙ n

BN takes its statistics over batch and time, without padding, and normalizes the product for both gates. μ is a mask of
recurrent dropout (Moon et al. 2015), which is drawn once for each sequence. The stabilized form (SLi-GRU, Moumen and
Parcollet 2023, arXiv:2302.10144) replaces W_hh h_{t-1} by its layer normalization, without scale and shift.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnrnn.errors import BnrnnError, check_number
from bnrnn.layers.base import RecurrentLayer, State
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.scan import gru_scan, linear
from bnrnn.scan.gru.reference import NONLINEARITIES


class LiGRU(RecurrentLayer):
    """`y, (h,) = LiGRU(input_size, hidden_size)(x, state=None)`.

    Args:
        t_max: ignored, because no statistics differ by time step. It exists so that all layers take the same arguments.
        bias: whether there is the bias b.
        norm: "input_batch" for BN of the input product, "layer" for BN of the input product and layer normalization of
            the recurrent one (SLi-GRU), None for neither.
        nonlinearity: of the candidate, "relu" or "tanh".
        recurrent_dropout: probability with which a unit's candidate is set to 0 in training, in all steps of a call.
        statistics, momentum: kind of population statistics; see bnrnn.layers.norm.SequenceBatchNorm. The defaults are
            those of SpeechBrain.

    Raises BnrnnError for an unknown norm or nonlinearity, and for numbers out of range.
    """

    num_gates = 2
    state_names = ("h",)
    engines = ("reference", "fused", "cpu")
    gamma_hh: Tensor | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        t_max: int | None = None,
        bias: bool = True,
        norm: str | None = "input_batch",
        nonlinearity: str = "relu",
        recurrent_dropout: float = 0.0,
        statistics: str = "running",
        momentum: float = 0.05,
    ) -> None:
        if norm not in (None, "input_batch", "layer"):
            raise BnrnnError(f"norm={norm!r} is unknown: use 'input_batch', 'layer' or None")
        if nonlinearity not in NONLINEARITIES:
            raise BnrnnError(f"nonlinearity={nonlinearity!r} is unknown: use 'relu' or 'tanh'")
        check_number("recurrent_dropout", recurrent_dropout, low=0.0, high=1.0)
        super().__init__(input_size, hidden_size)
        self.nonlinearity, self.recurrent_dropout = nonlinearity, recurrent_dropout
        self.bias = nn.Parameter(torch.empty(2 * hidden_size)) if bias else None
        self.bn_ih = None
        if norm is not None:
            self.bn_ih = SequenceBatchNorm(2 * hidden_size, None, 1.0, statistics=statistics, momentum=momentum)
        gamma_hh = torch.ones(2 * hidden_size) if norm == "layer" else None
        self.register_buffer("gamma_hh", gamma_hh, persistent=False)  # not learned
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in the paper: W_ih Glorot-uniform, W_hh orthogonal, b 0. Also resets the norm."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.weight_ih)
        nn.init.orthogonal_(self.weight_hh)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        x_proj = linear(x, self.weight_ih, self.bias if self.bn_ih is None else None)  # (T, B, 2H)
        if self.bn_ih is not None:
            x_proj = self.bn_ih(x_proj, t_start, self.bias, batch_sizes).to(x_proj.dtype)
        mask = None
        if self.recurrent_dropout and self.training:
            mask = F.dropout(torch.ones_like(state[0]), self.recurrent_dropout)
        y, h = gru_scan(
            x_proj,
            state[0],
            self.weight_hh,
            gamma_hh=self.gamma_hh,
            mask=mask,
            nonlinearity=self.nonlinearity,
            batch_sizes=batch_sizes,
            overwrite=True,
        )
        return y, (h,)
