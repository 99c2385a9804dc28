"""The average of batch statistics over many batches, which are the population statistics of batch normalization."""

from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from bnrnn.errors import BnrnnError


def counted_steps(t_start: int, num_steps: int, batch_sizes: list[int] | None) -> slice:
    """Of steps from t_start on, those with more than one sequence: the variance of a single one says nothing."""
    if batch_sizes is not None:
        num_steps = min(num_steps, sum(n > 1 for n in batch_sizes))
    return slice(t_start, t_start + num_steps)


class PopulationAverage:
    """Averages the means and the variances of batches at each time step. All batches have the same weight.

    Args:
        norm: the SequenceBatchNorm for whose population statistics the averages are.
    """

    def __init__(self, norm: Any) -> None:
        self.mean = torch.zeros_like(norm.pop_mean, dtype=torch.float64)
        self.var = torch.zeros_like(self.mean)
        self.count = torch.zeros(norm.t_max, 1, dtype=torch.float64, device=self.mean.device)

    def add(
        self,
        t_start: int,
        mean: Float[Tensor, "T F"],
        var: Float[Tensor, "T F"],
        batch_sizes: list[int] | None = None,
    ) -> None:
        """Add the statistics of one batch, from step t_start on.

        Steps beyond t_max are ignored, and steps with a single sequence, because its variance is always 0.
        """
        steps = counted_steps(t_start, len(self.mean[t_start : t_start + len(mean)]), batch_sizes)
        kept = steps.stop - steps.start
        self.mean[steps] += mean[:kept]
        self.var[steps] += var[:kept]
        self.count[steps] += 1

    def copy(self) -> "PopulationAverage":
        """A copy of its own, to which other batches can be added."""
        copied = copy(self)
        copied.mean, copied.var, copied.count = self.mean.clone(), self.var.clone(), self.count.clone()
        return copied

    def write(self, norm: Any) -> None:
        """Store the averages in `norm`. A step that no sequence reached gets those of the last reached step before.

        In a torch.distributed process group, the averages are over the batches of all processes, and every process must
        call this. Raises BnrnnError if no batch was added, or none that reached step 0.
        """
        if dist.is_available() and dist.is_initialized():
            for total in (self.mean, self.var, self.count):
                dist.all_reduce(total)
        reached = self.count[:, 0] > 0
        if not reached.any():
            raise BnrnnError("estimating population statistics needs at least one batch of training inputs, got none")
        if not reached[0]:
            first = int(reached.nonzero()[0])
            raise BnrnnError(
                f"no batch of the estimate reached the time steps before {first}, so they have no population "
                "statistics: pass sequences from t_start=0 on"
            )
        steps = torch.arange(norm.t_max, device=self.mean.device)
        t = torch.where(reached, steps, 0).cummax(0).values
        norm.pop_mean.copy_((self.mean / self.count)[t])
        norm.pop_var.copy_((self.var / self.count)[t])
        if norm.running:
            norm.num_batches_tracked.clamp_min_(1)
