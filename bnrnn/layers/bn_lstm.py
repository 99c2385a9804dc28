"""Batch-normalized LSTM, Cooijmans et al. 2016, *Recurrent Batch Normalization* (arXiv:1603.09025), eqs. 6-8.

    i, f, g, o = BN(W_hh h_{t-1}; γ_hh, 0) + BN(W_ih x_t; γ_ih, 0) + b        (6)
    c_t = σ(f) c_{t-1} + σ(i) tanh(g)                                         (7)
    h_t = σ(o) tanh(BN(c_t; γ_c, β_c))                                        (8)

The two products are normalized apart, each with a scale and neither with a shift (b is one for both); the cell that is
carried on is the unnormalized c_t. Each BN uses the statistics of its own time step.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.base import RecurrentLayer, State
from bnrnn.layers.norm import SequenceBatchNorm, check_batch
from bnrnn.scan import lstm_scan
from bnrnn.scan.lstm.reference import Statistics


class BNLSTM(RecurrentLayer):
    """`y, (h, c) = BNLSTM(input_size, hidden_size, t_max)(x, state=None)`.

    Training normalizes with the batch's statistics at every time step. Before evaluation, call
    `bnrnn.estimate_population_statistics(model, training_inputs)` once.

    Args:
        t_max: length of the training sequences; later steps are evaluated with the statistics of the last.
        gamma_init: start of γ_ih, γ_hh and γ_c. 0.1 is the paper's; towards 1 the gradients vanish (its Fig. 1, 6).
        eps: added to each variance.
        bias: whether there is a b.
        input_statistics: "sequence" normalizes the input product over batch and time, of unpadded steps alone, as the
            paper's BN-e* and BN-e** readers do (section 5.4).
        input_eps: eps of the input product where its statistics are "sequence"; None for the same as elsewhere.
        statistics, momentum: of the population, see bnrnn.layers.norm.SequenceBatchNorm.
        ended_count: whether, in a padded batch, sequences that have ended still count in the statistics with the state
            that they keep, as in the code released for section 5.4; by default they do not.
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
        input_statistics: Literal["frame", "sequence"] = "frame",
        ended_count: bool = False,
        input_eps: float | None = None,
        statistics: str = "exact",
        momentum: float = 0.1,
    ) -> None:
        if input_eps is not None and input_statistics == "frame":
            raise BnrnnError(f"input_eps={input_eps} is for input_statistics='sequence': use eps")
        super().__init__(input_size, hidden_size)
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size)) if bias else None
        self.ended_count = ended_count
        over = t_max if input_statistics == "frame" else None
        norm = partial(SequenceBatchNorm, statistics=statistics, momentum=momentum)
        self.bn_ih = norm(4 * hidden_size, over, gamma_init, eps if input_eps is None else input_eps)
        self.bn_hh = norm(4 * hidden_size, t_max, gamma_init, eps)
        self.bn_c = norm(hidden_size, t_max, gamma_init, eps, beta=True)
        self.reset_parameters()

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        h, c = state
        of_hh, of_c = (norm.population(t_start, len(x)) for norm in (self.bn_hh, self.bn_c))
        if of_hh is None or of_c is None:
            check_batch(x.shape[1])
        x, weight_ih, gamma_ih, bias, of_ih = self.bn_ih.before_scan(x, self.weight_ih, self.bias, t_start, batch_sizes)
        y, state, used = lstm_scan(
            x,
            h,
            c,
            self.weight_hh,
            weight_ih=weight_ih,
            gamma_ih=gamma_ih,
            gamma_hh=self.bn_hh.gamma,
            bias=bias,
            gamma_c=self.bn_c.gamma,
            beta_c=self.bn_c.beta,
            eps=self.bn_hh.eps,
            population=Statistics(*(of_ih or (None, None)), *of_hh, *of_c) if of_hh and of_c else None,
            batch_sizes=batch_sizes,
            ended_count=self.ended_count,
            overwrite=weight_ih is None,
        )
        self.bn_ih.collect(t_start, used.mean_ih, used.var_ih, batch_sizes)
        self.bn_hh.collect(t_start, used.mean_hh, used.var_hh, batch_sizes)
        self.bn_c.collect(t_start, used.mean_c, used.var_c, batch_sizes)
        return y, state
