"""What all LSTMs share: the gates, the state, zoneout and recurrent dropout.

Zoneout (Krueger et al. 2017, arXiv:1606.01305, eqs. 2-5) keeps the previous value of each unit of the cell with
probability p_c, and that of h with p_h:

    c_t = d_c c_{t-1} + (1 - d_c) c̃_t,   h_t = d_h h_{t-1} + (1 - d_h) h̃_t,   d_c ~ Bernoulli(p_c), d_h ~ Bernoulli(p_h)

where c̃_t and h̃_t are c_t and h_t without zoneout: h̃_t depends on c̃_t. Recurrent dropout (Semeniuta et al. 2016,
arXiv:1603.05118, eqs. 8 and 9) sets each unit of the candidate tanh(g) to 0 with probability p, at every time step. In
evaluation, d_c, d_h and the factor of the candidate are their expected values p_c, p_h and 1 - p.
"""

from collections.abc import Sequence
from typing import Any

import torch

from bnrnn.errors import BnrnnError, check_number
from bnrnn.layers.base import RecurrentLayer
from bnrnn.scan.noise import Noise

WITHOUT_TRITON = ("reference", "fused", "cpu")


class NoisyLSTM(RecurrentLayer):
    """Base class of the LSTMs.

    Args:
        zoneout: (p_c, p_h), or None for (0, 0).
        recurrent_dropout: p.

    Raises BnrnnError for probabilities outside 0 ... 1.
    """

    num_gates = 4
    state_names = ("h", "c")

    def __init__(
        self, input_size: int, hidden_size: int, zoneout: Sequence[float] | None, recurrent_dropout: float
    ) -> None:
        super().__init__(input_size, hidden_size)
        p_c, p_h = checked_zoneout(zoneout)
        check_number("recurrent_dropout", recurrent_dropout, low=0.0, high=1.0)
        self.zoneout, self.recurrent_dropout = (p_c, p_h), float(recurrent_dropout)
        if any((*self.zoneout, self.recurrent_dropout)):
            self.engines = WITHOUT_TRITON

    def noise(self) -> Noise | None:
        """The factors of one call of the scan. In training they are random; the key is drawn from torch's generator."""
        if not any((*self.zoneout, self.recurrent_dropout)):
            return None
        key = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu") if self.training else None
        return Noise(*self.zoneout, self.recurrent_dropout, key)

    def extra_repr(self) -> str:
        options = {"zoneout": self.zoneout if any(self.zoneout) else None, "recurrent_dropout": self.recurrent_dropout}
        return ", ".join([super().extra_repr(), *(f"{name}={value}" for name, value in options.items() if value)])


def checked_zoneout(zoneout: Any) -> tuple[float, float]:
    """The two probabilities (p_c, p_h). Raises BnrnnError unless zoneout is None or a pair of numbers from 0 to 1."""
    if zoneout is None:
        return 0.0, 0.0
    if isinstance(zoneout, str) or not isinstance(zoneout, Sequence) or len(zoneout) != 2:
        raise BnrnnError(f"zoneout must be a pair of probabilities, of keeping c and of keeping h: got {zoneout!r}")
    for name, value in zip(("zoneout[0]", "zoneout[1]"), zoneout, strict=True):
        check_number(name, value, low=0.0, high=1.0)
    return float(zoneout[0]), float(zoneout[1])
