"""Batch-normalized tanh RNN, Cooijmans et al. 2016 (arXiv:1603.09025), section 4 and Fig. 1a.

    h_t = tanh(BN(W_hh h_{t-1} + W_ih x_t; γ, β))

Unlike the BN-LSTM, the layer normalizes the sum of the two products, as the code released for Fig. 1a does.
"""

from torch import Tensor

from bnrnn.errors import check_size
from bnrnn.layers.base import RecurrentLayer, State
from bnrnn.layers.norm import SequenceBatchNorm, check_batch
from bnrnn.scan import linear
from bnrnn.scan.rnn import rnn_scan


class BNRNN(RecurrentLayer):
    """`y, (h,) = BNRNN(input_size, hidden_size, t_max)(x, state=None)`.

    `t_max`, `gamma_init`, `eps`, `statistics` and `momentum` as in BNLSTM.
    """

    num_gates = 1
    state_names = ("h",)
    engines = ("reference", "triton")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        t_max: int,
        gamma_init: float = 0.1,
        eps: float = 1e-5,
        statistics: str = "exact",
        momentum: float = 0.1,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_size("t_max", t_max)
        self.bn = SequenceBatchNorm(
            hidden_size, t_max, gamma_init, eps, beta=True, statistics=statistics, momentum=momentum
        )
        self.reset_parameters()

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        (h,) = state
        population = self.bn.population(t_start, len(x))
        x_proj = linear(x, self.weight_ih)  # (T, B, H)
        if population is None:
            check_batch(x_proj.shape[1])
        y, h, seen = rnn_scan(
            x_proj,
            h,
            self.weight_hh,
            gamma=self.bn.gamma,
            beta=self.bn.beta,
            eps=self.bn.eps,
            population=population,
            batch_sizes=batch_sizes,
        )
        self.bn.collect(t_start, *seen, batch_sizes)
        return y, (h,)
