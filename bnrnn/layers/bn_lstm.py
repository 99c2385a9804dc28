"""Batch-normalized LSTM, Cooijmans et al. 2016, *Recurrent Batch Normalization* (arXiv:1603.09025), eqs. 6-8.

    i, f, g, o = BN(W_hh h_{t-1}; γ_hh, 0) + BN(W_ih x_t; γ_ih, 0) + b        (6)
    c_t = σ(f) c_{t-1} + σ(i) tanh(g)                                         (7)
    h_t = σ(o) tanh(BN(c_t; γ_c, β_c))                                        (8)

The two products are normalized apart, each with a scale and neither with a shift (b is one for both); the cell that is
carried on is the unnormalized c_t. Each BN uses the statistics of its own time step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnrnn.layers.base import RecurrentLayer, State
from bnrnn.norm import SequenceBatchNorm
from bnrnn.scan import lstm_scan
from bnrnn.scan.lstm import Statistics


class BNLSTM(RecurrentLayer):
    """`y, (h, c) = BNLSTM(input_size, hidden_size, t_max)(x, state=None)`.

    Training normalizes with the batch's statistics at every time step. Before evaluation, call
    `bnrnn.norm.estimate_population_statistics(model, training_inputs)` once.

    Args:
        t_max: length of the training sequences; later steps are evaluated with the statistics of the last.
        gamma_init: start of γ_ih, γ_hh and γ_c. 0.1 is the paper's; towards 1 the gradients vanish (its Fig. 1, 6).
        eps: added to each variance.
        bias: whether there is a b.
    """

    num_gates = 4
    state_names = ("h", "c")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        t_max: int,
        gamma_init: float = 0.1,
        eps: float = 1e-5,
        bias: bool = True,
    ) -> None:
        super().__init__(input_size, hidden_size)
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size)) if bias else None
        self.bn_ih = SequenceBatchNorm(4 * hidden_size, t_max, gamma_init, eps)
        self.bn_hh = SequenceBatchNorm(4 * hidden_size, t_max, gamma_init, eps)
        self.bn_c = SequenceBatchNorm(hidden_size, t_max, gamma_init, eps, beta=True)
        self.reset_parameters()

    def scan(self, x: Tensor, state: State, t_start: int) -> tuple[Tensor, State]:
        h, c = state
        gates_x = self.bn_ih(F.linear(x, self.weight_ih), t_start, shift=self.bias)  # (T, B, 4H), x's terms of eq. 6
        of_hh, of_c = (norm.population(t_start, len(x)) for norm in (self.bn_hh, self.bn_c))
        y, state, seen = lstm_scan(
            gates_x,
            h,
            c,
            self.weight_hh,
            gamma_hh=self.bn_hh.gamma,
            gamma_c=self.bn_c.gamma,
            beta_c=self.bn_c.beta,
            eps=self.bn_hh.eps,
            population=Statistics(*of_hh, *of_c) if of_hh and of_c else None,
            collect=self.bn_hh.collecting,
        )
        self.bn_hh.collect(t_start, seen.mean_hh, seen.var_hh)
        self.bn_c.collect(t_start, seen.mean_c, seen.var_c)
        return y, state
