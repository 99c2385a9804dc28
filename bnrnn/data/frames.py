"""Speech utterances with a class for every frame, in batches of similar length that are padded at the end."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch.nn.utils.rnn import pad_sequence

from bnrnn.data.base import DataDefaults, by_length, count_even, render_sizes
from bnrnn.errors import BnrnnError
from bnrnn.inputs import IGNORE, Batch, Padded

SECONDS = 0.01  # time between two frames
SHOWN = 3  # the description names at most so many of the utterances that were left out


def check_normalize(normalize: str) -> None:
    """Raise BnrnnError for an unknown way to normalize features."""
    if normalize not in ("speaker", "global", "none"):
        raise BnrnnError(f"data.normalize={normalize} is unknown: use speaker, global or none")


class Utterance(NamedTuple):
    """One recording: the class of each frame, and a function that reads the features of the frames."""

    name: str
    labels: Int[np.ndarray, " T"]
    read: Callable[[], Float[np.ndarray, "T F"]]


class FrameData(DataDefaults):
    """Batches of whole utterances.

    Args:
        splits: the utterances of `train`, `valid` and `test`.
        num_states: number of classes.
        num_features: F, the number of features of a frame.
        name: name of the data set in descriptions and error messages.
        left_out: names of the utterances that were left out, by reason.

    Raises BnrnnError for a split with fewer than two utterances, and when features are read that have the wrong shape
    or are not finite.
    """

    metric = "error"
    selects_by = "loss"

    def __init__(
        self,
        splits: Mapping[str, Sequence[Utterance]],
        num_states: int,
        num_features: int,
        name: str,
        left_out: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        for split, utterances in splits.items():
            if len(utterances) < 2:
                raise BnrnnError(f"{name}: {split} has {len(utterances)} utterances, expected at least 2")
        self.splits = {split: list(utterances) for split, utterances in splits.items()}
        self.lengths = {split: np.array([len(u.labels) for u in part]) for split, part in self.splits.items()}
        self.input_size, self.output_size = num_features, num_states
        self.t_max = int(self.lengths["train"].max())
        hours = " / ".join(f"{lengths.sum() * SECONDS / 3600:.2f}" for lengths in self.lengths.values())
        self.description = f"{name}: {render_sizes(splits)} utterances, {hours} hours, {num_states:,} states"
        for why, names in (left_out or {}).items():
            shown = [*names[:SHOWN], *["..."][: len(names) - SHOWN]]
            self.description += f"; left out, {why}: {len(names):,} ({', '.join(shown)})"

    def num_batches(self, split: str, batch_size: int) -> int:
        return count_even(len(self.splits[split]), batch_size)

    def batches(
        self, split: str, batch_size: int, generator: torch.Generator | None = None, start: int = 0
    ) -> Iterator[Batch]:
        """One pass over the utterances from batch `start` on, in batches of similar length."""
        for chosen in by_length(self.lengths[split], batch_size, generator)[start:]:
            utterances = [self.splits[split][n] for n in chosen.tolist()]
            features = [torch.from_numpy(self._features(utterance)) for utterance in utterances]
            labels = [torch.from_numpy(utterance.labels.astype(np.int64)) for utterance in utterances]
            inputs = Padded(pad_sequence(features), [len(x) for x in features])
            yield Batch(inputs, pad_sequence(labels, padding_value=IGNORE))

    def _features(self, utterance: Utterance) -> Float[np.ndarray, "T F"]:
        features: Any = utterance.read()
        expected = (len(utterance.labels), self.input_size)
        if features.shape != expected:
            raise BnrnnError(
                f"{utterance.name} has features of shape {features.shape}, expected {expected}: write them again"
            )
        if not np.isfinite(features).all():
            raise BnrnnError(f"{utterance.name} has features that are not finite numbers: write them again")
        return features.astype(np.float32, copy=False)
