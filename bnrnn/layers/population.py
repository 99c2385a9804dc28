"""Population statistics of whole models: their exact estimate, and which statistics an evaluation uses."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.norm import PopulationAverage, SequenceBatchNorm, TooFewSequences


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
def estimate_population_statistics(
    model: nn.Module, inputs: Iterable[Any], arguments: Callable[[Any], tuple[Any, ...]] | None = None
) -> None:
    """Fill every `pop_mean` and `pop_var` of the model from an exact pass over the training set.

    Cooijmans et al. 2016, section 3: the average over minibatches of their estimates, per time step. The model runs in
    evaluation mode (no dropout) with batch statistics, and is left in the mode it was in. Models that normalize both
    sequence by sequence and step by step need two passes (`estimated_together`). In a torch.distributed process group
    the average is over the batches of all processes; each must call this, and all then have the same statistics.

    Args:
        inputs: batches of the training set, for instance a DataLoader. Of a batch that is a plain list or tuple, the
            model is given the first element, as in torch.optim.swa_utils.update_bn; any other batch as it is: a tensor,
            a PackedSequence or another named tuple. A batch of one sequence has no variance: it is left out, with a
            warning.
        arguments: from a batch to the tuple of the model's arguments, where those are others.

    Raises BnrnnError where there is no batch, or `inputs` cannot be gone through twice for a model that needs it.
    """
    groups = estimated_together(model)
    if len(groups) > 1 and iter(inputs) is inputs:
        raise BnrnnError("population statistics of this model take two passes: give a list, not an iterator")
    for norms in groups:
        skipped = 0
        with collecting_statistics(model, norms):
            for batch in inputs:
                try:
                    model(*(arguments or _first)(batch))
                except TooFewSequences:
                    skipped += 1
        if skipped:
            warnings.warn(f"{skipped} of the batches had a single sequence, and were left out", stacklevel=3)


def _first(batch: Any) -> tuple[Any, ...]:
    """What a model that takes one argument is given of a batch."""
    plain = isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields")
    return (batch[0] if plain else batch,)


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
