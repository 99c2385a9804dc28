"""A generated text that is the same on every machine: a fixed rule selects the words."""

import numpy as np
import torch

from bnrnn.data.language import Segments, Streams

WORDS = ["the", "cat", "saw", "a", "dog", "and", "ran", "far", "from", "it", "to", "her", "old", "red", "house"]


def words(count: int) -> list[str]:
    """The next word depends on the present one and on a linear congruential generator."""
    k, seed, chosen = 0, 1, []
    for _ in range(count):
        seed = (1103515245 * seed + 12345) % 2**31
        k = (3 * k + 1 + (seed >> 16) % 4) % len(WORDS)
        chosen.append(WORDS[k])
    return chosen


def parts(sequence: list) -> dict[str, list]:
    n = len(sequence)
    return {
        "train": sequence[: n * 8 // 10],
        "valid": sequence[n * 8 // 10 : n * 9 // 10],
        "test": sequence[n * 9 // 10 :],
    }


class ToyCharacters(Segments):
    def __init__(self, length: int = 12, num_words: int = 500, state_noise: float = 0.0) -> None:
        text = " ".join(words(num_words)).encode()
        symbols = bytes(sorted(set(text)))
        splits = {split: np.frombuffer(bytes(part), np.uint8) for split, part in parts(list(text)).items()}
        super().__init__(splits, symbols, length, test_lengths=(20,), description="toy text")


class ToyWords(Streams):
    def __init__(self, window: int = 5, num_words: int = 500, state_noise: float = 0.0) -> None:
        ids = [WORDS.index(word) for word in words(num_words)]
        splits = {split: torch.tensor(part) for split, part in parts(ids).items()}
        super().__init__(splits, len(WORDS), window, description="toy text")
