"""Batch normalization of sequences with separate statistics at every time step.

Cooijmans et al. 2016 (arXiv:1603.09025), section 3: minibatch statistics in training, population statistics in
evaluation, both per time step, because the activations just after the start differ from those later on.
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
from bnrnn.scan.tracing import traced


def check_batch(size: int) -> None:
    """Raise BnrnnError where a batch has no variance to normalize with."""
    if size < 2:
        raise BnrnnError(
            f"batch statistics need at least 2 sequences, got a batch of {size}: use a larger batch, drop an "
            "incomplete last one, or switch to population statistics with model.eval()"
        )


class SequenceBatchNorm(nn.Module):
    """Batch normalization over the batch axis, separately at every time step; gamma and beta are shared over time.

    Args:
        num_features: F.
        t_max: time steps with population statistics of their own; later steps use the last (as the paper). None is
            sequence-wise normalization: one mean and one variance over batch and time, of unpadded steps alone
            (Laurent et al. 2015, arXiv:1510.01378, eqs. 20-21).
        gamma_init: initial scale. Cooijmans et al. use 0.1, so that tanh is fed the range where gradients survive.
        eps: added to the variance.
        beta: whether there is a trainable shift.

    Buffers `pop_mean`, `pop_var` of shape (t_max, F), or (1, F), are NaN until `estimate_population_statistics` fills
    them.
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
        self.use_batch_statistics = False  # in evaluation; see `batch_statistics`
        self.average: PopulationAverage | None = None  # set while population statistics are estimated

    @property
    def collecting(self) -> bool:
        return self.average is not None

    @property
    def uses_batch(self) -> bool:
        """Whether the statistics of the batch at hand are used."""
        return self.training or self.use_batch_statistics or self.collecting

    def population(self, t_start: int, num_steps: int) -> tuple[Tensor, Tensor] | None:
        """Means and variances (num_steps, F) to normalize with from step t_start on; None: use those of the batch.

        Raises BnrnnError in evaluation before the statistics were estimated.
        """
        if self.training:
            self.pop_var.fill_(torch.nan)  # the weights are about to change, so earlier estimates no longer hold
            return None
        if self.uses_batch:
            return None
        if t_start + num_steps <= self.t_max:
            steps = slice(t_start, t_start + num_steps)
        else:
            steps = torch.arange(t_start, t_start + num_steps, device=self.pop_mean.device).clamp_max(self.t_max - 1)
        mean, var = self.pop_mean[steps], self.pop_var[steps]
        if not traced() and math.isnan(var.sum().item()):
            raise BnrnnError(
                "evaluation needs population statistics, and none were estimated since the last training step: call "
                "bnrnn.estimate_population_statistics(model, training_inputs), or evaluate inside "
                "bnrnn.batch_statistics(model)"
            )
        return mean, var

    def collect(
        self, t_start: int, mean: Tensor | None, var: Tensor | None, batch_sizes: list[int] | None = None
    ) -> None:
        """Count the statistics (T, F) of one batch from step t_start on, while the estimate is being made."""
        if self.average is not None and mean is not None and var is not None:
            self.average.add(t_start, mean, var, batch_sizes)

    def forward(
        self,
        x: Float[Tensor, "T B F"],
        t_start: int = 0,
        shift: Float[Tensor, " F"] | None = None,
        batch_sizes: list[int] | None = None,
    ) -> Float[Tensor, "T B F"]:
        """Normalize a whole sequence that begins at step t_start; `shift` is added as a beta from outside would be.

        Of a padded batch, longest first, only the first batch_sizes[t] rows of step t count; what stands in the others'
        places afterwards has no meaning.
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
        """(x, weight, gamma, bias, population) for a scan that forms x W^T and normalizes it step by step.

        Sequence-wise normalization is applied here, before the scan: then x is the normalized product with the bias
        added, and the others are None.
        """
        if self.over_time:
            x_proj = linear(x, weight)  # (T, B, F)
            return self(x_proj, t_start, bias, batch_sizes).to(x_proj.dtype), None, None, None, None
        return x, weight, self.gamma, bias, self.population(t_start, len(x))


class PopulationAverage:
    """Equal-weight average over batches of their means and variances, at each time step."""

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
        """Count one batch from step t_start on.

        Steps beyond t_max are left out, and those with a single sequence, whose variance says nothing.
        """
        kept = len(self.mean[t_start : t_start + len(mean)])
        if batch_sizes is not None:
            kept = min(kept, sum(n > 1 for n in batch_sizes))
        steps = slice(t_start, t_start + kept)
        self.mean[steps] += mean[:kept]
        self.var[steps] += var[:kept]
        self.count[steps] += 1

    def write(self, norm: SequenceBatchNorm) -> None:
        """Store the averages; steps that no sequence reached repeat the last one that was."""
        num_seen = int((self.count > 0).sum())
        if num_seen == 0:
            raise BnrnnError("no batch was given to estimate population statistics from")
        t = torch.arange(norm.t_max, device=self.mean.device).clamp_max(num_seen - 1)
        norm.pop_mean.copy_((self.mean / self.count)[t])
        norm.pop_var.copy_((self.var / self.count)[t])


def _norms(model: nn.Module) -> list[SequenceBatchNorm]:
    return [module for module in model.modules() if isinstance(module, SequenceBatchNorm)]


def has_batch_norm(model: nn.Module) -> bool:
    """Whether batch and population statistics differ for this model."""
    return bool(_norms(model))


def has_step_statistics(model: nn.Module) -> bool:
    """Whether the model normalizes with statistics per time step, which can then be averaged over time."""
    return any(not norm.over_time for norm in _norms(model))


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, `model.eval()` normalizes with the statistics of the batch at hand and leaves everything unchanged."""
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
    """Inside, population statistics are the same at every time step: the average of those of all steps."""
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
    """The norms of the model by the pass over the training set that their population statistics are from.

    One pass for all, and where some normalize sequence by sequence and some step by step, a second one for the latter.
    A sequence-wise normalization shifts words that are the same in all sequences from batch to batch. The first step
    after it takes that away again within each batch, divides by almost nothing and sees no variance; with population
    statistics of both from one pass the rest of the shift would be divided by the same.
    """
    norms = _norms(model)
    steps = [norm for norm in norms if not norm.over_time]
    return [norms, steps] if 0 < len(steps) < len(norms) else [norms]


@torch.no_grad()
def estimate_population_statistics(model: nn.Module, inputs: Iterable[Any]) -> None:
    """Fill every `pop_mean` and `pop_var` of the model from an exact pass over `inputs` (the training set).

    Cooijmans et al. 2016, section 3: the average over minibatches of their estimates, per time step. The model runs in
    evaluation mode (no dropout) with batch statistics, and is left in the mode it was in. Models that normalize both
    sequence by sequence and step by step need two passes (`estimated_together`). Raises BnrnnError where there is no
    batch, or `inputs` cannot be gone through twice for such a model.
    """
    groups = estimated_together(model)
    if len(groups) > 1 and iter(inputs) is inputs:
        raise BnrnnError("population statistics of this model take two passes: give a list, not an iterator")
    for norms in groups:
        with collecting_statistics(model, norms):
            for x in inputs:
                model(x)


@contextmanager
def collecting_statistics(model: nn.Module, norms: list[SequenceBatchNorm]) -> Iterator[None]:
    """`estimate_population_statistics` of these norms for batches that the caller feeds, such as those with a state."""
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
