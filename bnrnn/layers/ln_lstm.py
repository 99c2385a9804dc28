"""Layer-normalized LSTM, Ba et al. 2016, *Layer Normalization* (arXiv:1607.06450), eqs. 20-22.

    f, i, o, g = LN(W_hh h_{t-1}; γ_hh, β_hh) + LN(W_ih x_t; γ_ih, β_ih) + b      (20)
    c_t = σ(f) c_{t-1} + σ(i) tanh(g)                                             (21)
    h_t = σ(o) tanh(LN(c_t; γ_c, β_c))                                            (22)

Mean and variance of a row are those of its units: of all four gates together in eq. 20. No sequence depends on another,
nor on its time step, so training and evaluation compute the same. The order of the gates is torch's, i f g o.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bnrnn.errors import check_number
from bnrnn.layers.base import State
from bnrnn.layers.noisy_lstm import WITHOUT_TRITON, NoisyLSTM
from bnrnn.scan import lstm_scan


class LNLSTM(NoisyLSTM):
    """`y, (h, c) = LNLSTM(input_size, hidden_size)(x, state=None)`.

    Args:
        t_max: ignored, because the layer keeps no statistics. It exists so that all layers take the same arguments.
        eps: added to each variance.
        gamma_init: initial γ_ih and γ_hh.
        cell_gamma_init: initial γ_c; None means gamma_init.
        per_gate: whether each of the four gates has a mean and variance of its own in eq. 20.
        bias: whether the layer has the bias b. β_ih and β_hh, which are always there, have the same effect.
        zoneout, recurrent_dropout: see bnrnn.layers.noisy_lstm.

    Raises BnrnnError for an eps below 0, and for an initial γ that is not a finite number.
    """

    engines = WITHOUT_TRITON

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        t_max: int | None = None,
        eps: float = 1e-5,
        gamma_init: float = 1.0,
        cell_gamma_init: float | None = None,
        per_gate: bool = False,
        bias: bool = True,
        zoneout: Sequence[float] | None = None,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(input_size, hidden_size, zoneout, recurrent_dropout)
        check_number("eps", eps, low=0.0)
        cell_gamma_init = gamma_init if cell_gamma_init is None else cell_gamma_init
        self.gamma_inits = {"gamma_ih": gamma_init, "gamma_hh": gamma_init, "gamma_c": cell_gamma_init}
        for name, value in self.gamma_inits.items():
            check_number("cell_gamma_init" if name == "gamma_c" else "gamma_init", value)
        self.eps, self.per_gate = eps, per_gate
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size)) if bias else None
        self.gamma_ih, self.beta_ih, self.gamma_hh, self.beta_hh = (
            nn.Parameter(torch.empty(4 * hidden_size)) for _ in range(4)
        )
        self.gamma_c, self.beta_c = (nn.Parameter(torch.empty(hidden_size)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights uniformly from ±1/sqrt(H), as torch.nn.LSTM does, and set each γ to its initial value."""
        super().reset_parameters()
        for name, value in self.gamma_inits.items():
            nn.init.constant_(getattr(self, name), value)

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        shift = self.beta_ih + self.beta_hh
        h, c = state
        y, state, _ = lstm_scan(
            x,
            h,
            c,
            self.weight_hh,
            weight_ih=self.weight_ih,
            gamma_ih=self.gamma_ih,
            gamma_hh=self.gamma_hh,
            bias=shift if self.bias is None else shift + self.bias,
            gamma_c=self.gamma_c,
            beta_c=self.beta_c,
            eps=self.eps,
            batch_sizes=batch_sizes,
            over="gate" if self.per_gate else "layer",
            noise=self.noise(),
        )
        return y, state
