"""LSTM with batch normalization of the input product only, Laurent et al. 2015 (arXiv:1510.01378), eq. 18.

    i, f, g, o = W_hh h_{t-1} + BN(W_ih x_t; γ, β)

Frame-wise normalization takes statistics over the batch, separately at every time step. Sequence-wise normalization
(eqs. 20-21) takes them over batch and time, without padding. β is the layer's bias.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from bnrnn.layers.base import State
from bnrnn.layers.noisy_lstm import NoisyLSTM
from bnrnn.layers.norm import SequenceBatchNorm, check_batch, t_max_of_input
from bnrnn.scan import lstm_scan
from bnrnn.scan.lstm.reference import Statistics


class InputBNLSTM(NoisyLSTM):
    """`y, (h, c) = InputBNLSTM(input_size, hidden_size, t_max)(x, state=None)`.

    Args:
        t_max: length of the training sequences; input_statistics="sequence" needs none.
        gamma_init: initial γ. The paper gives no value; 1 is the one of Ioffe and Szegedy 2015.
        cell_bias: whether the cell output has a trainable shift β_c, as in LSTM.
        input_statistics: "frame" or "sequence", see above.
        eps, statistics, momentum: as in BNLSTM.
        zoneout, recurrent_dropout: see bnrnn.layers.noisy_lstm.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        t_max: int | None,
        gamma_init: float = 1.0,
        eps: float = 1e-5,
        cell_bias: bool = False,
        input_statistics: Literal["frame", "sequence"] = "frame",
        statistics: str = "exact",
        momentum: float = 0.1,
        zoneout: Sequence[float] | None = None,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(input_size, hidden_size, zoneout, recurrent_dropout)
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size))
        over = t_max_of_input(input_statistics, t_max)
        self.bn_ih = SequenceBatchNorm(4 * hidden_size, over, gamma_init, eps, statistics=statistics, momentum=momentum)
        self.beta_c = nn.Parameter(torch.zeros(hidden_size)) if cell_bias else None
        self.reset_parameters()

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        h, c = state
        x, weight_ih, gamma, bias, of_ih = self.bn_ih.before_scan(x, self.weight_ih, self.bias, t_start, batch_sizes)
        if of_ih is None and gamma is not None:
            check_batch(x.shape[1])
        y, state, used = lstm_scan(
            x,
            h,
            c,
            self.weight_hh,
            weight_ih=weight_ih,
            gamma_ih=gamma,
            bias=bias,
            beta_c=self.beta_c,
            eps=self.bn_ih.eps,
            population=of_ih and Statistics(*of_ih),
            batch_sizes=batch_sizes,
            overwrite=weight_ih is None,
            noise=self.noise(),
        )
        self.bn_ih.collect(t_start, used.mean_ih, used.var_ih, batch_sizes)
        return y, state
