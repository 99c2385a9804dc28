"""Batches: the types that datasets produce and models read. Datasets and models share nothing else."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

IGNORE = -100  # target of a step that is not scored
START, END = 0, 1  # ids that begin and end every caption
SEQUENCES, CAPTIONS, QUESTIONS = "sequences", "captions of images", "questions about passages"  # kinds of data


class Batch(NamedTuple):
    """Time-major inputs, and the class to predict at each step.

    Args:
        inputs: features (T, B, I), ids (T, B), or a named tuple of tensors and plain values for special models.
        targets: the classes; IGNORE marks steps that are not scored. If there are fewer steps than inputs, the targets
            belong to the last steps, and only these are scored.
        carried: whether the sequences continue those of the previous batch.
        t_start: index of the first time step; it selects the population statistics.
    """

    inputs: Float[Tensor, "T B I"] | Int[Tensor, "T B"] | Any
    targets: Int[Tensor, "S B"]
    carried: bool = False
    t_start: int = 0

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device. Copies to a GPU are asynchronous, from pinned memory."""

        def moved(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            pinned = x.pin_memory() if device.type == "cuda" and x.device.type == "cpu" else x
            return pinned.to(device, non_blocking=True)

        plain = isinstance(self.inputs, Tensor)
        inputs = moved(self.inputs) if plain else type(self.inputs)(*(moved(x) for x in self.inputs))
        return self._replace(inputs=inputs, targets=moved(self.targets))


class Padded(NamedTuple):
    """Sequences of different lengths, padded at the end, and their lengths."""

    x: Float[Tensor, "T B I"]
    lengths: list[int]


class Captioned(NamedTuple):
    """The input of a captioner: image features, and ids of captions, which begin with START and are padded with END."""

    features: Float[Tensor, "B F"]
    words: Int[Tensor, "T B"]
    lengths: list[int]


class Question(NamedTuple):
    """The input of an attentive reader: ids of passages and questions, padded at the end, and candidate answers."""

    passage: Int[Tensor, "T B"]
    passage_lengths: list[int]
    question: Int[Tensor, "S B"]
    question_lengths: list[int]
    candidates: Int[
        Tensor, "C B"
    ]  # ids of the entities of each passage; a column with fewer than C repeats its first id


class References(NamedTuple):
    """The references for scoring generated captions.

    Args:
        features: the features of each image, from which the model generates captions.
        captions: the captions that people wrote for each image.
        spell: converts the ids of a caption to words.
    """

    features: Float[Tensor, "N F"]
    captions: list[list[str]]
    spell: Callable[[Iterable[int]], str]
