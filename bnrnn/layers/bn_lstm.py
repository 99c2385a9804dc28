"""Batch-normalized LSTM, Cooijmans et al. 2016, *Recurrent Batch Normalization* (arXiv:1603.09025), eqs. 6-8.

    i, f, g, o = BN(W_hh h_{t-1}; γ_hh, 0) + BN(W_ih x_t; γ_ih, 0) + b        (6)
    c_t = σ(f) c_{t-1} + σ(i) tanh(g)                                         (7)
    h_t = σ(o) tanh(BN(c_t; γ_c, β_c))                                        (8)

The two products are normalized separately. Each has its own scale; neither has a shift, because b shifts their sum. The
cell state c_t itself stays unnormalized: only its copy in eq. 8 is normalized. Each BN uses the statistics of its own
time step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from bnrnn.errors import BnrnnError, check_size
from bnrnn.layers.base import State
from bnrnn.layers.noisy_lstm import NoisyLSTM
from bnrnn.layers.norm import SequenceBatchNorm, check_batch, check_modes, t_max_of_input
from bnrnn.scan import lstm_scan
from bnrnn.scan.lstm.reference import Statistics


class BNLSTM(NoisyLSTM):
    """`y, (h, c) = BNLSTM(input_size, hidden_size, t_max)(x, state=None)`.

    Training normalizes with the batch's statistics at every time step. Before evaluation, call
    `bnrnn.estimate_population_statistics(model, training_inputs)` once.

    Args:
        t_max: length of the training sequences. Evaluation uses the statistics of the last of these steps for all later
            steps.
        gamma_init: initial γ_ih, γ_hh and γ_c. The paper uses 0.1; with values close to 1 gradients vanish (Figs. 1,
            6).
        eps: added to each variance.
        bias: whether the layer has the bias b.
        input_statistics: "frame" normalizes the input product over the batch at each time step. "sequence" normalizes
            it over batch and time, without padding, as the paper's BN-e* and BN-e** readers do (section 5.4).
        input_eps: eps of the input product with input_statistics="sequence"; None uses `eps`.
        ended_count: whether finished sequences of a padded batch count in the statistics, with the state that they
            keep, as in the code released for section 5.4. By default they do not count.
        statistics, momentum: kind of population statistics; see bnrnn.layers.norm.SequenceBatchNorm.
        zoneout, recurrent_dropout: see bnrnn.layers.noisy_lstm. The cell of eq. 8 is the one before zoneout.

    Raises BnrnnError for a t_max below 1, unknown input_statistics, input_eps with input_statistics="frame", and in
    training for a batch of one sequence.
    """

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
        zoneout: Sequence[float] | None = None,
        recurrent_dropout: float = 0.0,
    ) -> None:
        if input_eps is not None and input_statistics == "frame":
            raise BnrnnError(f"input_eps={input_eps} needs input_statistics='sequence': use eps instead")
        super().__init__(input_size, hidden_size, zoneout, recurrent_dropout)
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size)) if bias else None
        self.ended_count = ended_count
        check_size("t_max", t_max)
        over = t_max_of_input(input_statistics, t_max)
        norm = partial(SequenceBatchNorm, statistics=statistics, momentum=momentum)
        self.bn_ih = norm(4 * hidden_size, over, gamma_init, eps if input_eps is None else input_eps)
        self.bn_hh = norm(4 * hidden_size, t_max, gamma_init, eps)
        self.bn_c = norm(hidden_size, t_max, gamma_init, eps, beta=True)
        self.reset_parameters()

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        h, c = state
        check_modes(self.bn_ih, self.bn_hh, self.bn_c)
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
            noise=self.noise(),
        )
        self.bn_ih.collect(t_start, used.mean_ih, used.var_ih, batch_sizes)
        self.bn_hh.collect(t_start, used.mean_hh, used.var_hh, batch_sizes)
        self.bn_c.collect(t_start, used.mean_c, used.var_c, batch_sizes)
        return y, state
