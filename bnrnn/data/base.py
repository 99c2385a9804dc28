"""What a dataset is to the training loop, and what datasets of whole labelled sequences share."""

import hashlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from bnrnn.inputs import Batch, References

POOL = 12  # batches whose sequences are sorted by length together, as in the rc_data_iter.py of Cooijmans et al. 2016


@runtime_checkable
class SequenceData(Protocol):
    """Splits `train`, `valid` and `test` of sequences, with the sizes that a model needs to know."""

    input_size: int
    output_size: int
    t_max: int
    metric: str  # that people read: accuracy, error, bpc or ppl
    selects_by: str  # accuracy or loss, of the validation split
    description: str  # what the data are and how many

    def num_batches(self, split: str, batch_size: int) -> int:
        """Batches in one pass over the split; the last may be smaller."""
        ...

    def batches(
        self, split: str, batch_size: int, generator: torch.Generator | None = None, start: int = 0
    ) -> Iterator[Batch]:
        """One pass from batch `start` on: in order, or shuffled as `generator` decides."""
        ...

    def extra_tests(self) -> dict[str, tuple[int, Iterator[Batch]]]:
        """Other ways to measure the test split, by name: number of batches, and the batches."""
        ...

    def references(self, split: str) -> References | None:
        """What captions generated for a split are scored against; None where nothing is generated."""
        ...


def by_length(
    lengths: Int[np.ndarray, " N"], batch_size: int, generator: torch.Generator | None
) -> list[Int[np.ndarray, " B"]]:
    """Batches of N sequences, those of similar length together.

    In random order with a generator, then sorted by length within every `POOL` batches. The N are divided evenly among
    ceil(N / batch_size) batches, so that none is left with one or two, whose batch statistics would say nothing.
    """
    N, total = len(lengths), -(-len(lengths) // batch_size)
    bounds = [N * k // total for k in range(total + 1)]
    order = np.arange(N) if generator is None else torch.randperm(N, generator=generator).numpy()
    for k in range(0, total, POOL):
        pool = order[bounds[k] : bounds[min(k + POOL, total)]]
        pool[:] = pool[np.argsort(-lengths[pool], kind="stable")]
    which = range(total) if generator is None else torch.randperm(total, generator=generator).tolist()
    return [order[bounds[k] : bounds[k + 1]] for k in which]


def model_sizes(data: SequenceData) -> dict[str, int]:
    """Arguments of a model's constructor that follow from the data."""
    names = ("input_size", "output_size", "t_max", "feature_size", "scored_steps")
    return {name: getattr(data, name) for name in names if hasattr(data, name)}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class DataDefaults:
    """What most datasets have in common."""

    def extra_tests(self) -> dict[str, tuple[int, Iterator[Batch]]]:
        return {}

    def references(self, split: str) -> References | None:
        return None


class PixelSequences(DataDefaults):
    """Images read pixel by pixel in a fixed order and classified after the last one.

    Args:
        splits: for each split the images (N, P) as bytes and the labels (N,).
        max_value: the byte that becomes 1.0.
        order: index of the pixel to read at each step; None reads all of them in scanline order.
        state_noise: noise on h_0 that this task asks of batch-normalized recurrences (see SequenceModel).
    """

    input_size = 1
    output_size = 10
    scored_steps = 1
    metric = selects_by = "accuracy"

    def __init__(
        self,
        splits: dict[str, tuple[UInt8[Tensor, "N P"], Int[Tensor, " N"]]],
        max_value: float,
        order: Int[Tensor, " T"] | None = None,
        state_noise: float = 0.0,
    ) -> None:
        self.state_noise = state_noise
        self.splits = {name: (x if order is None else x[:, order], y) for name, (x, y) in splits.items()}
        self.max_value = max_value
        self.t_max = self.splits["train"][0].shape[1]
        counts = " / ".join(f"{len(y):,}" for _, y in splits.values())
        self.description = f"{counts} images as sequences of {self.t_max} pixels"

    def num_batches(self, split: str, batch_size: int) -> int:
        return -(-len(self.splits[split][1]) // batch_size)

    def batches(
        self, split: str, batch_size: int, generator: torch.Generator | None = None, start: int = 0
    ) -> Iterator[Batch]:
        images, labels = self.splits[split]
        index = torch.arange(len(labels)) if generator is None else torch.randperm(len(labels), generator=generator)
        for chosen in index.split(batch_size)[start:]:
            inputs = (images[chosen].T.float() / self.max_value).unsqueeze(-1)  # (T, B, 1)
            yield Batch(inputs, labels[chosen][None])  # (1, B)
