"""Toy data whose features have torch's default precision, for trainings in float64."""

from collections.abc import Iterator

import torch

from bnrnn.data.base import PixelSequences
from bnrnn.inputs import Batch
from tests.toy_captions import ToyCaptions


def wide(batch: Batch) -> Batch:
    """The batch with its features in the default precision."""
    inputs, dtype = batch.inputs, torch.get_default_dtype()
    if isinstance(inputs, torch.Tensor):
        return batch._replace(inputs=inputs.to(dtype))
    return batch._replace(inputs=inputs._replace(features=inputs.features.to(dtype)))


class WidePixels(PixelSequences):
    """Images of nine random pixels, whose first pixel depends on the class."""

    def __init__(self, state_noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (140, 9), generator=generator).to(torch.uint8)
        labels = images[:, 0].long() % 10
        parts = (slice(0, 100), slice(100, 120), slice(120, 140))
        splits = {name: (images[p], labels[p]) for name, p in zip(("train", "valid", "test"), parts, strict=True)}
        super().__init__(splits, max_value=255.0, state_noise=state_noise)

    def batches(self, *args, **options) -> Iterator[Batch]:
        return map(wide, super().batches(*args, **options))


class WideCaptions(ToyCaptions):
    def batches(self, *args, **options) -> Iterator[Batch]:
        return map(wide, super().batches(*args, **options))

    def features_of(self, split: str) -> torch.Tensor:
        return super().features_of(split).to(torch.get_default_dtype())
