"""What a dataset hands to the training loop and a model reads: the only thing that data and models share."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

IGNORE = -100  # target of a step that is not scored
START, END = 0, 1  # ids that begin and end every caption


class Batch(NamedTuple):
    """Time-major inputs, and the class to predict at each step, IGNORE where nothing is scored.

    Targets may have fewer steps than the inputs: those at the end of the sequences, the only ones that are scored.
    Inputs are features (T, B, I), or ids (T, B), or whatever else the data's model reads: a tuple of tensors and plain
    values. `carried`: the sequences continue those of the previous batch. `t_start`: index of the first time step; it
    selects the population statistics.
    """

    inputs: Float[Tensor, "T B I"] | Int[Tensor, "T B"] | Any
    targets: Int[Tensor, "S B"]
    carried: bool = False
    t_start: int = 0

    def to(self, device: torch.device) -> "Batch":
        def moved(x: Any) -> Any:
            return x.to(device, non_blocking=True) if isinstance(x, Tensor) else x

        plain = isinstance(self.inputs, Tensor)
        inputs = moved(self.inputs) if plain else type(self.inputs)(*(moved(x) for x in self.inputs))
        return self._replace(inputs=inputs, targets=moved(self.targets))


class Padded(NamedTuple):
    """Sequences of different lengths, padded at the end, and their lengths."""

    x: Float[Tensor, "T B I"]
    lengths: list[int]


class Captioned(NamedTuple):
    """What a captioner reads: features, and words from START on, padded with END."""

    features: Float[Tensor, "B F"]
    words: Int[Tensor, "T B"]
    lengths: list[int]


class Question(NamedTuple):
    """What an attentive reader reads: ids, padded at the end, and the ids that the answer may be chosen from."""

    passage: Int[Tensor, "T B"]
    passage_lengths: list[int]
    question: Int[Tensor, "S B"]
    question_lengths: list[int]
    candidates: Int[Tensor, "C B"]  # entities of the passage; a column with fewer than C repeats its first


class References(NamedTuple):
    """What captions that a model generates are scored against.

    `features`: of each image. `captions`: those that people wrote of each image. `spell`: a caption from its ids.
    """

    features: Float[Tensor, "N F"]
    captions: list[list[str]]
    spell: Callable[[Iterable[int]], str]
