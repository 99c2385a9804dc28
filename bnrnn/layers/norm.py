"""Batch normalization of sequences with separate statistics at every time step.

Cooijmans et al. 2016 (arXiv:1603.09025), section 3: training uses minibatch statistics, evaluation uses population
statistics. Both are kept per time step, because activations in the first steps differ from those in later steps.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.errors import BnrnnError
from bnrnn.scan import linear, normalize_over_time, normalize_sequence


def check_batch(size: int) -> None:
    """Raise BnrnnError for a batch of fewer than two sequences, which has no variance to normalize with."""
    if size < 2:
        raise BnrnnError(
            f"batch statistics need at least 2 sequences, got a batch of {size}: use a larger batch, drop an "
            "incomplete last one, or switch to population statistics with model.eval()"
        )


class SequenceBatchNorm(nn.Module):
    """Batch normalization over the batch axis, separately at every time step; gamma and beta are shared over time.

    Args:
        num_features: F, the number of features.
        t_max: number of time steps that have their own population statistics; later steps use the last ones, as in the
            paper. None selects sequence-wise normalization: one mean and one variance over batch and time, without
            padding (Laurent et al. 2015, arXiv:1510.01378, eqs. 20-21).
        gamma_init: initial gamma. Cooijmans et al. use 0.1, which keeps the input of tanh in the range where gradients
            do not vanish.
        eps: added to the variance.
        beta: whether there is a trainable shift.

    The buffers `pop_mean` and `pop_var` have shape (t_max, F), or (1, F) for sequence-wise normalization. They are NaN
    until `estimate_population_statistics` fills them. Raises BnrnnError for t_max below 1.
    """

    pop_mean: Tensor
    pop_var: Tensor

    def __init__(
        self, num_features: int, t_max: int | None, gamma_init: float = 0.1, eps: float = 1e-5, beta: bool = False
    ) -> None:
        super().__init__()
        if t_max is not None and t_max < 1:
            raise BnrnnError(f"t_max must be at least 1 (the training length), got {t_max}")
        self.over_time, self.t_max, self.eps = t_max is None, t_max or 1, eps
        self.gamma = nn.Parameter(torch.full((num_features,), float(gamma_init)))
        self.beta = nn.Parameter(torch.zeros(num_features)) if beta else None
        self.register_buffer("pop_mean", torch.full((self.t_max, num_features), torch.nan))
        self.register_buffer("pop_var", torch.full((self.t_max, num_features), torch.nan))
        self.use_batch_statistics = False  # whether evaluation uses them; see `batch_statistics`
        self.average: PopulationAverage | None = None  # set while population statistics are estimated

    @property
    def collecting(self) -> bool:
        return self.average is not None

    @property
    def uses_batch(self) -> bool:
        """Whether the layer normalizes with the statistics of the current batch."""
        return self.training or self.use_batch_statistics or self.collecting

    def population(self, t_start: int, num_steps: int) -> tuple[Tensor, Tensor] | None:
        """The population means and variances (num_steps, F) from step t_start on, or None if batch statistics are used.

        In training this also invalidates the stored estimates. Raises BnrnnError in evaluation if no statistics were
        estimated since the last training step.
        """
        if self.training:
            self.pop_var.fill_(torch.nan)  # the coming update changes the weights, so earlier estimates become invalid
            return None
        if self.uses_batch:
            return None
        if t_start + num_steps <= self.t_max:
            steps = slice(t_start, t_start + num_steps)
        else:
            steps = torch.arange(t_start, t_start + num_steps, device=self.pop_mean.device).clamp_max(self.t_max - 1)
        mean, var = self.pop_mean[steps], self.pop_var[steps]
        if math.isnan(var.sum().item()):
            raise BnrnnError(
                "evaluation needs population statistics, and none were estimated since the last training step: call "
                "bnrnn.estimate_population_statistics(model, training_inputs), or evaluate inside "
                "bnrnn.batch_statistics(model)"
            )
        return mean, var

    def collect(
        self, t_start: int, mean: Tensor | None, var: Tensor | None, batch_sizes: list[int] | None = None
    ) -> None:
        """Add the statistics (T, F) of one batch, from step t_start on, to the running estimate, if there is one."""
        if self.average is not None and mean is not None and var is not None:
            self.average.add(t_start, mean, var, batch_sizes)

    def forward(
        self,
        x: Float[Tensor, "T B F"],
        t_start: int = 0,
        shift: Float[Tensor, " F"] | None = None,
        batch_sizes: list[int] | None = None,
    ) -> Float[Tensor, "T B F"]:
        """Normalize a whole sequence that begins at step t_start.

        Args:
            shift: added instead of this module's beta, for a layer whose bias takes the place of beta.
            batch_sizes: for a padded batch, longest sequence first: only the first batch_sizes[t] rows of step t are
                normalized and counted. The values of the other rows are undefined.
        """
        if self.over_time:
            size = sum(batch_sizes) if batch_sizes else x.shape[0] * x.shape[1]
            normalize, population = normalize_over_time, self.population(0, 1)
        else:
            size = x.shape[1]
            normalize, population = normalize_sequence, self.population(t_start, len(x))
        if population is None:
            check_batch(size)
        beta = self.beta if shift is None else shift
        y, mean, var = normalize(x, self.gamma, beta, self.eps, population, batch_sizes)
        if self.over_time:
            self.collect(0, mean, var)
        else:
            self.collect(t_start, mean, var, batch_sizes)
        return y

    def before_scan(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, t_start: int, batch_sizes: list[int] | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]:
        """Return (x, weight, gamma, bias, population), the arguments of a scan that computes and normalizes x W^T.

        Sequence-wise normalization is applied here, before the scan. Then the returned x is the normalized product plus
        bias, and the other four are None.
        """
        if self.over_time:
            x_proj = linear(x, weight)  # (T, B, F)
            return self(x_proj, t_start, bias, batch_sizes).to(x_proj.dtype), None, None, None, None
        return x, weight, self.gamma, bias, self.population(t_start, len(x))


class PopulationAverage:
    """Averages the means and the variances of batches at each time step. All batches have the same weight."""

    def __init__(self, norm: SequenceBatchNorm) -> None:
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
        kept = len(self.mean[t_start : t_start + len(mean)])
        if batch_sizes is not None:
            kept = min(kept, sum(n > 1 for n in batch_sizes))
        steps = slice(t_start, t_start + kept)
        self.mean[steps] += mean[:kept]
        self.var[steps] += var[:kept]
        self.count[steps] += 1

    def write(self, norm: SequenceBatchNorm) -> None:
        """Store the averages in the module. Steps that no sequence reached get the statistics of the last reached step.

        Raises BnrnnError if no batch was added.
        """
        num_seen = int((self.count > 0).sum())
        if num_seen == 0:
            raise BnrnnError("estimating population statistics needs at least one batch of training inputs, got none")
        t = torch.arange(norm.t_max, device=self.mean.device).clamp_max(num_seen - 1)
        norm.pop_mean.copy_((self.mean / self.count)[t])
        norm.pop_var.copy_((self.var / self.count)[t])


def _norms(model: nn.Module) -> list[SequenceBatchNorm]:
    return [module for module in model.modules() if isinstance(module, SequenceBatchNorm)]


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model has batch normalization, so that batch and population statistics give different outputs."""
    return bool(_norms(model))


def has_step_statistics(model: nn.Module) -> bool:
    """Whether the model has statistics for each time step; these can be averaged over time (`shared_statistics`)."""
    return any(not norm.over_time for norm in _norms(model))


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Context manager in which a model in evaluation mode normalizes with the statistics of the current batch.

    The population statistics are not changed.
    """
    norms = _norms(model)
    for norm in norms:
        norm.use_batch_statistics = True
    try:
        yield
    finally:
        for norm in norms:
            norm.use_batch_statistics = False


@contextmanager
def shared_statistics(model: nn.Module) -> Iterator[None]:
    """Context manager in which all time steps use the same population statistics: the average over the steps."""
    norms = _norms(model)
    kept = [(norm.pop_mean.clone(), norm.pop_var.clone()) for norm in norms]
    for norm in norms:
        norm.pop_mean.copy_(norm.pop_mean.mean(0).expand_as(norm.pop_mean))
        norm.pop_var.copy_(norm.pop_var.mean(0).expand_as(norm.pop_var))
    try:
        yield
    finally:
        for norm, (mean, var) in zip(norms, kept, strict=True):
            norm.pop_mean.copy_(mean)
            norm.pop_var.copy_(var)


def estimated_together(model: nn.Module) -> list[list[SequenceBatchNorm]]:
    """Group the norms by the training-set pass that estimates them.

    One pass estimates all norms. A model that has sequence-wise and step-wise norms needs a second pass for the
    step-wise ones. Reason: in each batch, sequence-wise normalization shifts a token that is the same in all sequences
    by a different amount. At the step of this token the following step-wise norm sees almost no variance within a
    batch. If its statistics came from the first pass, evaluation would divide the remaining shift by this tiny
    deviation.
    """
    norms = _norms(model)
    steps = [norm for norm in norms if not norm.over_time]
    return [norms, steps] if 0 < len(steps) < len(norms) else [norms]


@torch.no_grad()
def estimate_population_statistics(model: nn.Module, inputs: Iterable[Any]) -> None:
    """Fill every `pop_mean` and `pop_var` of the model from a pass over `inputs`, the training set.

    As in Cooijmans et al. 2016, section 3, they are the averages of the minibatch statistics at each time step. The
    model runs in evaluation mode, hence without dropout, but with batch statistics; afterwards it is in the mode that
    it was in before. Models with both sequence-wise and step-wise norms need two passes (`estimated_together`).

    Args:
        inputs: batches, each of which is passed to the model as its only argument.

    Raises BnrnnError if there is no batch, or if such a model gets an iterator, which allows one pass only.
    """
    groups = estimated_together(model)
    if len(groups) > 1 and iter(inputs) is inputs:
        raise BnrnnError("population statistics of this model need two passes: pass a list of batches, not an iterator")
    for norms in groups:
        with collecting_statistics(model, norms):
            for x in inputs:
                model(x)


@contextmanager
def collecting_statistics(model: nn.Module, norms: list[SequenceBatchNorm]) -> Iterator[None]:
    """Context manager that estimates the population statistics of these norms from the batches run inside it.

    Callers use it instead of `estimate_population_statistics` if they carry a state from batch to batch.
    """
    was_training = model.training
    model.eval()
    for norm in norms:
        norm.average = PopulationAverage(norm)
    try:
        yield
        for norm in norms:
            assert norm.average is not None
            norm.average.write(norm)
    finally:
        for norm in norms:
            norm.average = None
        model.train(was_training)
