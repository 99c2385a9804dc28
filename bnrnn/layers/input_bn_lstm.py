"""LSTM with batch normalization of the input product only, Laurent et al. 2015 (arXiv:1510.01378), eq. 18.

    i, f, g, o = W_hh h_{t-1} + BN(W_ih x_t; γ, β)

Frame-wise: statistics over the batch, separately at every time step. β is the layer's bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnrnn.layers.base import RecurrentLayer, State
from bnrnn.norm import SequenceBatchNorm
from bnrnn.scan import lstm_scan


class InputBNLSTM(RecurrentLayer):
    """`y, (h, c) = InputBNLSTM(input_size, hidden_size, t_max)(x, state=None)`; arguments as BNLSTM.

    The paper gives no start for γ; 1 is batch normalization's own (Ioffe and Szegedy 2015).
    """

    num_gates = 4
    state_names = ("h", "c")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        t_max: int,
        gamma_init: float = 1.0,
        eps: float = 1e-5,
        cell_bias: bool = False,
    ) -> None:
        super().__init__(input_size, hidden_size)
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size))
        self.bn_ih = SequenceBatchNorm(4 * hidden_size, t_max, gamma_init, eps)
        self.beta_c = nn.Parameter(torch.zeros(hidden_size)) if cell_bias else None
        self.reset_parameters()

    def scan(self, x: Tensor, state: State, t_start: int) -> tuple[Tensor, State]:
        h, c = state
        gates_x = self.bn_ih(F.linear(x, self.weight_ih), t_start, shift=self.bias)  # (T, B, 4H)
        y, state, _ = lstm_scan(gates_x, h, c, self.weight_hh, beta_c=self.beta_c)
        return y, state
