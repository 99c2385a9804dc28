"""Generated recordings of speech: sequences of different lengths, with a class for each frame."""

import numpy as np

from bnrnn.data.frames import FrameData, Utterance


def utterance(seed: int) -> Utterance:
    draw = np.random.default_rng(seed)
    labels = draw.integers(3, size=draw.integers(4, 9))
    features = (labels[:, None] + draw.normal(size=(len(labels), 2))).astype(np.float32)
    return Utterance(f"utterance {seed}", labels, lambda: features)


class ToyFrames(FrameData):
    def __init__(self, state_noise: float = 0.0) -> None:
        splits = {"train": range(12), "valid": range(20, 26), "test": range(30, 36)}
        super().__init__({split: [utterance(n) for n in part] for split, part in splits.items()}, 3, 2, "toy frames")
