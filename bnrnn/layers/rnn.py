"""Plain tanh RNN, a baseline for Fig. 1a of Cooijmans et al. 2016 and the one of Laurent et al. 2015, appendix A."""

import torch
from torch import Tensor, nn

from bnrnn.layers.base import RecurrentLayer, State
from bnrnn.scan import linear
from bnrnn.scan.rnn import rnn_scan


class RNN(RecurrentLayer):
    """`y, (h,) = RNN(input_size, hidden_size)(x, state=None)`, with h_t = tanh(W_hh h_{t-1} + W_ih x_t + b).

    t_max is ignored: the layer keeps no statistics. It exists so that all layers take the same arguments.
    """

    num_gates = 1
    state_names = ("h",)
    engines = ("reference", "triton")

    def __init__(self, input_size: int, hidden_size: int, t_max: int | None = None) -> None:
        super().__init__(input_size, hidden_size)
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.reset_parameters()

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        (h,) = state
        y, h, _ = rnn_scan(linear(x, self.weight_ih) + self.bias, h, self.weight_hh, batch_sizes=batch_sizes)
        return y, (h,)
