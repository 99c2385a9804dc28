"""Recurrent highway network, Zilly et al. 2016 (arXiv:1607.03474), eqs. 6-9.

    s_0 = s_D of the previous time step
    a_d = R_d s_{d-1} + [d = 1] W x + b_d;   h, t, c = tanh, σ, σ of the three parts of a_d
    s_d = h ⊙ t + s_{d-1} ⊙ c,   d = 1 ... D

With coupled gates, c = 1 - t and a_d has two parts. The output is s_D.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bnrnn.errors import check_size
from bnrnn.layers.base import RecurrentLayer, State
from bnrnn.scan import linear, rhn_scan
from bnrnn.scan.rhn.reference import RHNStatistics


class RHN(RecurrentLayer):
    """`y, (s,) = RHN(input_size, hidden_size)(x, state=None)`.

    Args:
        t_max: ignored, because the layer keeps no statistics. It exists so that all layers take the same arguments.
        depth: D, the number of highway layers in a time step.
        coupled: whether c = 1 - t. Otherwise the carry gate c has its own weights.
        transform_bias: initial bias of the transform gate t. With a negative value the layer at first mostly keeps its
            state. The bias of a carry gate with its own weights starts at the opposite value.

    Raises BnrnnError for a depth that is no whole number of at least 1.
    """

    state_names = ("s",)
    num_gates = 2  # 3 if gates are not coupled

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        t_max: int | None = None,
        depth: int = 3,
        coupled: bool = True,
        transform_bias: float = -2.0,
    ) -> None:
        check_size("depth", depth)
        self.num_gates = 2 if coupled else 3
        super().__init__(input_size, hidden_size)
        self.depth, self.transform_bias = depth, transform_bias
        self.weight_hh = nn.Parameter(torch.empty(depth, self.num_gates * hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(depth, self.num_gates * hidden_size))
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, depth={self.depth}, coupled={self.num_gates == 2}"

    def reset_parameters(self) -> None:
        """Draw weights uniformly from ±1/sqrt(H), and reset the norms and the biases (see `reset_bias`)."""
        super().reset_parameters()
        self.reset_bias()

    @torch.no_grad()
    def reset_bias(self) -> None:
        """Set the bias of h to 0, that of t to `transform_bias`, and that of c to the opposite of `transform_bias`."""
        H = self.hidden_size
        self.bias.zero_()
        self.bias[:, H : 2 * H] = self.transform_bias
        self.bias[:, 2 * H :] = -self.transform_bias

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        x_proj = linear(x, self.weight_ih)  # (T, B, G)
        options = self.normalization(x_proj, t_start)
        y, s, used = rhn_scan(x_proj, state[0], self.weight_hh, bias=self.bias, batch_sizes=batch_sizes, **options)
        self.collect(t_start, used, batch_sizes)
        return y, (s,)

    def normalization(self, x_proj: Tensor, t_start: int) -> dict[str, Any]:
        """The arguments of bnrnn.scan.rhn_scan for normalization; BNRHN overrides it. The plain RHN has none."""
        return {}

    def collect(self, t_start: int, used: RHNStatistics, batch_sizes: list[int] | None) -> None:
        """Add the statistics of a batch to the estimate of population statistics. The plain RHN has none."""
