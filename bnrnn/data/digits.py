"""The 1,797 handwritten 8x8 digits that scikit-learn ships (UCI, CC BY 4.0), pixel by pixel; no download needed."""

from importlib.metadata import distribution

import numpy as np
import torch

from bnrnn.data.base import PixelSequences


class Digits(PixelSequences):
    """1,200 / 297 / 300 digits for train / valid / test, in the file's order; T = 64."""

    def __init__(self, state_noise: float = 0.0) -> None:
        # sklearn.datasets.load_digits reads the same file, but importing sklearn takes seconds.
        path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
        rows = torch.from_numpy(np.loadtxt(str(path), delimiter=","))
        x, y = rows[:, :-1].to(torch.uint8), rows[:, -1].long()
        sizes = {"train": 1200, "valid": 297, "test": 300}
        parts = zip(sizes, x.split(list(sizes.values())), y.split(list(sizes.values())), strict=True)
        super().__init__({name: (x, y) for name, x, y in parts}, max_value=16.0, state_noise=state_noise)
