"""The 1,797 handwritten 8x8 digits that scikit-learn ships (UCI, CC BY 4.0), pixel by pixel; no download needed."""

import torch

from bnrnn.data.base import PixelSequences


class Digits(PixelSequences):
    """1,200 / 297 / 300 digits for train / valid / test, in the file's order; T = 64."""

    def __init__(self, state_noise: float = 0.0) -> None:
        from sklearn.datasets import load_digits  # slow to import

        images, labels = load_digits(return_X_y=True)
        x, y = torch.from_numpy(images).to(torch.uint8), torch.from_numpy(labels).long()
        sizes = {"train": 1200, "valid": 297, "test": 300}
        parts = zip(sizes, x.split(list(sizes.values())), y.split(list(sizes.values())), strict=True)
        super().__init__({name: (x, y) for name, x, y in parts}, max_value=16.0, state_noise=state_noise)
