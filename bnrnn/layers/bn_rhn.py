"""Batch-normalized recurrent highway network, Zhang et al. 2017, section 3.

A recurrent highway network (bnrnn.layers.rhn) with batch normalization of "the inputs of each recurrence loop". The
paper allows three readings of this phrase (deviation Z1), which `place` selects. By default the gates are not coupled.

    "every":  a_d = R_d BN(s_{d-1}) + [d = 1] BN(W x) + b_d     inputs of all highway layers
    "first":  the same for d = 1; no BN for d > 1               inputs of a time step: the previous state and x
    "sum":    a_d = BN(R_d s_{d-1} + [d = 1] W x), shift b_d    inputs of the gates

In all three, the state that the carry gate keeps is the unnormalized s_{d-1}.
"""

from functools import partial
from typing import Any

from torch import Tensor

from bnrnn.errors import BnrnnError, check_size
from bnrnn.layers.norm import SequenceBatchNorm, check_batch, check_modes
from bnrnn.layers.rhn import RHN
from bnrnn.scan.rhn.reference import RHNStatistics

PLACES = ("every", "first", "sum")


class BNRHN(RHN):
    """`y, (s,) = BNRHN(input_size, hidden_size, t_max)(x, state=None)`; arguments as RHN.

    Args:
        t_max: length of the training sequences. Evaluation uses the statistics of the last of these steps for all later
            steps.
        place: where to normalize, one of `PLACES`, by default `"every"`; the recipe uses `"first"`. None turns
            normalization off.
        gamma_init: initial gamma. The paper gives no value; 1 is the one of Ioffe and Szegedy 2015.
        eps: added to each variance. 1e-3 is the default of TensorFlow, the paper's framework.
        statistics, momentum: kind of population statistics; see bnrnn.layers.norm.SequenceBatchNorm.

    Raises BnrnnError for an unknown place and for a t_max below 1.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        t_max: int,
        depth: int = 3,
        coupled: bool = False,
        transform_bias: float = -2.0,
        place: str | None = "every",
        gamma_init: float = 1.0,
        eps: float = 1e-3,
        statistics: str = "exact",
        momentum: float = 0.1,
    ) -> None:
        if place not in (None, *PLACES):
            raise BnrnnError(f"place={place!r} is unknown: use None, {', '.join(map(repr, PLACES))}")
        if place is not None:
            check_size("t_max", t_max)
        super().__init__(input_size, hidden_size, t_max, depth, coupled, transform_bias)
        H, G, self.bn_x, self.bn_s, self.bn_sum = hidden_size, self.num_gates * hidden_size, None, None, None
        norm = partial(
            SequenceBatchNorm, t_max=t_max, gamma_init=gamma_init, eps=eps, statistics=statistics, momentum=momentum
        )
        if place in ("every", "first"):
            num_layers = depth if place == "every" else 1
            self.bn_x = norm(G)
            self.bn_s = norm(num_layers * H, beta=True)
        if place == "sum":
            self.bn_sum = norm(depth * G)

    def normalization(self, x_proj: Tensor, t_start: int) -> dict[str, Any]:
        check_modes(self.bn_x, self.bn_s)
        norms = {
            "x": (self.bn_x, (-1,)),
            "s": (self.bn_s, (-1, self.hidden_size)),
            "z": (self.bn_sum, (self.depth, -1)),
        }
        options: dict[str, Any] = {}
        statistics: dict[str, Tensor] = {}
        for name, (norm, shape) in norms.items():
            if norm is None:
                continue
            options[f"gamma_{name}"], options["eps"] = norm.gamma.view(shape), norm.eps
            if norm.beta is not None:
                options[f"beta_{name}"] = norm.beta.view(shape)
            population = norm.population(t_start, len(x_proj))
            if population is None:
                check_batch(x_proj.shape[1])
            else:
                of_step = (len(x_proj), *shape)
                statistics |= {
                    f"{what}_{name}": p.reshape(of_step) for what, p in zip(("mean", "var"), population, strict=True)
                }
        return options | {"population": RHNStatistics(**statistics) if statistics else None}

    def collect(self, t_start: int, used: RHNStatistics, batch_sizes: list[int] | None) -> None:
        pairs = ((self.bn_x, used.mean_x, used.var_x), (self.bn_s, used.mean_s, used.var_s),
                 (self.bn_sum, used.mean_z, used.var_z))  # fmt: skip
        for norm, mean, var in pairs:
            if norm is not None and mean is not None and var is not None:
                norm.collect(t_start, mean.flatten(1), var.flatten(1), batch_sizes)
