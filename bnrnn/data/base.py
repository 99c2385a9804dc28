"""The interface between datasets and the training loop, and code that several datasets share."""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sized
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from bnrnn.inputs import SEQUENCES, Batch, References

SHUFFLED, FILE = "shuffled", "file"  # orders of an evaluation (see `evaluation_generator`)
POOL = 12  # so many batches are sorted by length together, as in rc_data_iter.py of Cooijmans et al. 2016


@runtime_checkable
class SequenceData(Protocol):
    """A dataset of sequences with the splits `train`, `valid` and `test`, and the sizes that a model needs."""

    kind: str  # SEQUENCES, CAPTIONS or QUESTIONS of bnrnn.inputs; models name the kind that they read
    input_size: int
    output_size: int
    t_max: int
    metric: str  # the metric to report: accuracy, error, bpc or ppl
    selects_by: str  # the validation metric that selects the checkpoint: accuracy or loss
    evaluation_orders: tuple[str, ...]  # SHUFFLED or FILE: orders in which it can be evaluated; the first by default
    description: str  # name and size of the data, for the log

    def num_batches(self, split: str, batch_size: int) -> int:
        """Number of batches in one pass over the split; their sizes may differ."""
        ...

    def batches(
        self, split: str, batch_size: int, generator: torch.Generator | None = None, start: int = 0
    ) -> Iterator[Batch]:
        """One pass over the split from batch `start` on, in order or, with a `generator`, shuffled."""
        ...

    def extra_tests(self) -> dict[str, tuple[int, Iterator[Batch]]]:
        """Further evaluations of the test split, by name: the number of batches, and the batches."""
        ...

    def references(self, split: str) -> References | None:
        """The reference captions of a split, or None if the task generates no captions."""
        ...


def evaluation_generator(order: str, split: str, seed: int) -> torch.Generator | None:
    """The generator that shuffles a split, the same for every evaluation of a run; None for FILE order.

    The statistics of a batch depend on which sequences are in it, and neighbours in a file are often alike. The authors
    of Cooijmans et al. 2016 shuffle every split, except for the readers (D7).
    """
    if order == FILE:
        return None
    # Those of `train` are the passes that estimate population statistics. Their order has not changed since the first
    # results, which were evaluated in FILE order.
    own = seed if split == "train" else zlib.crc32(f"{split} {seed}".encode())
    return torch.Generator().manual_seed(own)


def by_length(
    lengths: Int[np.ndarray, " N"], batch_size: int, generator: torch.Generator | None
) -> list[Int[np.ndarray, " B"]]:
    """Indices of N sequences, grouped into batches of similar length.

    With a generator, the sequences and then the batches are shuffled; without, both keep their order. Sequences are
    sorted by length within every `POOL` batches. The N sequences are divided evenly among `count_even` batches:
    a last batch of one or two sequences would have meaningless batch statistics.
    """
    N, total = len(lengths), count_even(len(lengths), batch_size)
    bounds = [N * k // total for k in range(total + 1)]
    order = np.arange(N) if generator is None else torch.randperm(N, generator=generator).numpy()
    for k in range(0, total, POOL):
        pool = order[bounds[k] : bounds[min(k + POOL, total)]]
        pool[:] = pool[np.argsort(-lengths[pool], kind="stable")]
    which = range(total) if generator is None else torch.randperm(total, generator=generator).tolist()
    return [order[bounds[k] : bounds[k + 1]] for k in which]


def count_even(count: int, batch_size: int) -> int:
    """Number of batches among which so many sequences are divided evenly: of at least two each, if there are two."""
    total = -(-count // batch_size)
    return total if batch_size == 1 else max(1, min(total, count // 2))


def count_batches(count: int, batch_size: int) -> int:
    """Number of batches into which `in_batches` divides so many sequences."""
    alone = count % batch_size == 1 and 1 < batch_size < count
    return -(-count // batch_size) - alone


def in_batches(order: Int[Tensor, " N"], batch_size: int) -> list[Int[Tensor, " B"]]:
    """Consecutive batches. The last is smaller if N is not a multiple of the batch size. If a single sequence is left
    over, it joins the batch before it, because one sequence has no batch statistics."""
    bounds = [batch_size * k for k in range(count_batches(len(order), batch_size))] + [len(order)]
    return [order[start:end] for start, end in pairwise(bounds)]


def model_sizes(data: SequenceData) -> dict[str, int]:
    """Those arguments of a model's constructor that the data determine."""
    names = ("input_size", "output_size", "t_max", "feature_size", "scored_steps")
    return {name: getattr(data, name) for name in names if hasattr(data, name)}


def render_sizes(splits: Mapping[str, Sized]) -> str:
    """The number of elements of each split, such as 1,200 / 297 / 300."""
    return " / ".join(f"{len(part):,}" for part in splits.values())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class DataDefaults:
    """The answers of most datasets: no further tests, no reference captions, batches of equal lengths, any order."""

    kind = SEQUENCES
    evaluation_orders: tuple[str, ...] = (SHUFFLED, FILE)

    def extra_tests(self) -> dict[str, tuple[int, Iterator[Batch]]]:
        return {}

    def references(self, split: str) -> References | None:
        return None


class PixelSequences(DataDefaults):
    """Images that a model reads pixel by pixel in a fixed order and classifies after the last pixel.

    Args:
        splits: for each split the images (N, P) as bytes and the labels (N,).
        max_value: the byte value that becomes 1.0.
        order: index of the pixel to read at each step; None reads all of them in scanline order.
        state_noise: standard deviation of the noise on h_0 of batch-normalized recurrences (see SequenceModel).
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
        sizes = render_sizes({name: labels for name, (_, labels) in splits.items()})
        self.description = f"{sizes} images as sequences of {self.t_max} pixels"

    def num_batches(self, split: str, batch_size: int) -> int:
        return count_batches(len(self.splits[split][1]), batch_size)

    def batches(
        self, split: str, batch_size: int, generator: torch.Generator | None = None, start: int = 0
    ) -> Iterator[Batch]:
        images, labels = self.splits[split]
        index = torch.arange(len(labels)) if generator is None else torch.randperm(len(labels), generator=generator)
        for chosen in in_batches(index, batch_size)[start:]:
            inputs = (images[chosen].T.float() / self.max_value).unsqueeze(-1)  # (T, B, 1)
            yield Batch(inputs, labels[chosen][None])  # (1, B)
