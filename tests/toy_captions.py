"""Generated images that are the same on every machine. Captions name three properties; each has its own feature."""

import numpy as np

from bnrnn.data.captions import CaptionData, Image

THINGS = (["a", "one", "the"], ["red", "blue", "old", "wet"], ["dog", "cat", "boat", "hat", "tree"])


class ToyCaptions(CaptionData):
    def __init__(self, num_images: int = 40, least_count: int = 1, state_noise: float = 0.0) -> None:
        rng, images, features = np.random.default_rng(0), [], []
        for row in range(num_images):
            which = [int(rng.integers(len(words))) for words in THINGS]
            words = [of[k] for of, k in zip(THINGS, which, strict=True)]
            features.append(np.concatenate([np.eye(len(of))[k] for of, k in zip(THINGS, which, strict=True)]))
            captions = [" ".join(words), f"{words[1]} {words[2]}, near!"][: 1 + row % 2]
            images.append(Image(f"{row}.jpg", row, captions))
        n = num_images * 8 // 10
        splits = {
            "train": images[:n],
            "valid": images[n : n + num_images // 10],
            "test": images[n + num_images // 10 :],
        }
        super().__init__(splits, np.stack(features).astype(np.float16), "toy images", least_count)
