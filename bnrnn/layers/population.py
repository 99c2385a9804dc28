"""Population statistics of whole models: their exact estimate, and which statistics an evaluation uses."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.average import PopulationAverage
from bnrnn.layers.norm import SequenceBatchNorm, TooFewSequences


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
    before = [(norm, norm.use_batch_statistics) for norm in _norms(model)]
    for norm, _ in before:
        norm.use_batch_statistics = True
    try:
        yield
    finally:
        for norm, used in before:
            norm.use_batch_statistics = used


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
def estimate_population_statistics(
    model: nn.Module, inputs: Iterable[Any], arguments: Callable[[Any], tuple[Any, ...]] | None = None
) -> None:
    """Fill every `pop_mean` and `pop_var` of the model from a pass over `inputs`, the training set.

    As in Cooijmans et al. 2016, section 3, they are the averages of the minibatch statistics at each time step. The
    model runs in evaluation mode, hence without dropout, but with batch statistics; afterwards each module is in the
    mode that it was in before. A model without norms is not run. Models with both sequence-wise and step-wise norms
    need two passes (`estimated_together`). In a torch.distributed process group, the averages are over the batches of
    all processes. Every process must call this function; all then have the same statistics.

    Args:
        inputs: batches, for instance a DataLoader. If a batch is a plain list or tuple, its first element is passed to
            the model, as in torch.optim.swa_utils.update_bn. Any other batch is passed as it is: a tensor, a
            PackedSequence or another named tuple. A batch of one sequence has no variance over the batch; a
            model with statistics for each time step leaves it out with a warning.
        arguments: function that returns the tuple of the model's arguments for a batch, if the rule above does not fit.

    Raises BnrnnError if there is no batch, if the model needs other arguments, or if a model that needs two passes gets
    an iterator.
    """
    groups = estimated_together(model) if has_batch_norm(model) else []
    if len(groups) > 1 and iter(inputs) is inputs:
        raise BnrnnError("population statistics of this model need two passes: pass a list of batches, not an iterator")
    for norms in groups:
        skipped = 0
        with collecting_statistics(model, norms):
            for batch in inputs:
                # A sequence-wise norm has added its statistics when a step-wise norm refuses the batch.
                before = [norm.average.copy() for norm in norms if norm.average] if len(groups) > 1 else []
                given = (arguments or _first)(batch)
                _check_call(model, given)
                try:
                    model(*given)
                except TooFewSequences:
                    skipped += 1
                    for norm, average in zip(norms, before, strict=False):
                        norm.average = average
        if skipped:
            warnings.warn(f"{skipped} of the batches had a single sequence, and were left out", stacklevel=3)


def _check_call(model: nn.Module, given: tuple[Any, ...]) -> None:
    """Raise BnrnnError if the model cannot be called with so many arguments."""
    try:
        inspect.signature(model.forward).bind(*given)
    except TypeError as error:
        raise BnrnnError(
            f"{type(model).__name__} cannot be called with what a batch gives ({error}): pass the third argument of "
            "estimate_population_statistics, such as arguments=lambda batch: (batch[0], batch[1])"
        ) from error


def _first(batch: Any) -> tuple[Any, ...]:
    """The argument of a model for a batch: its first element if it is a plain list or tuple, else the batch."""
    plain = isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields")
    return (batch[0] if plain else batch,)


@contextmanager
def collecting_statistics(model: nn.Module, norms: list[SequenceBatchNorm]) -> Iterator[None]:
    """Context manager that estimates the population statistics of these norms from the batches run inside it.

    Callers use it instead of `estimate_population_statistics` if they carry a state from batch to batch.
    """
    modes = [(module, module.training) for module in model.modules()]
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
        for module, training in modes:
            module.training = training
