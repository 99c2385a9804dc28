"""LSTM without normalization: the baseline of Cooijmans et al. 2016 and of Laurent et al. 2015."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bnrnn.layers.base import State
from bnrnn.layers.noisy_lstm import NoisyLSTM
from bnrnn.scan import lstm_scan


class LSTM(NoisyLSTM):
    """`y, (h, c) = LSTM(input_size, hidden_size)(x, state=None)`.

        i, f, g, o = W_ih x_t + W_hh h_{t-1} + b
        c_t = σ(f) c_{t-1} + σ(i) tanh(g)
        h_t = σ(o) tanh(c_t + β_c)

    Without β_c this is torch.nn.LSTM, whose two biases are here one.

    Args:
        t_max: ignored, because the layer keeps no statistics. It exists so that all layers take the same arguments.
        cell_bias: whether the cell output has a trainable shift β_c, as in the baseline of the released code (D6).
        zoneout, recurrent_dropout: see bnrnn.layers.noisy_lstm.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        t_max: int | None = None,
        bias: bool = True,
        cell_bias: bool = False,
        zoneout: Sequence[float] | None = None,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(input_size, hidden_size, zoneout, recurrent_dropout)
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size)) if bias else None
        self.beta_c = nn.Parameter(torch.zeros(hidden_size)) if cell_bias else None
        self.reset_parameters()

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        h, c = state
        y, state, _ = lstm_scan(
            x,
            h,
            c,
            self.weight_hh,
            weight_ih=self.weight_ih,
            bias=self.bias,
            beta_c=self.beta_c,
            batch_sizes=batch_sizes,
            noise=self.noise(),
        )
        return y, state
