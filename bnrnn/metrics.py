"""Masked losses and scores of logits against targets."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from bnrnn.data.base import IGNORE


def cross_entropy(logits: Float[Tensor, "T B V"], targets: Int[Tensor, "T B"]) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats over the scored steps."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


@dataclass
class Scores:
    """Sums over batches, so that a mean over a split does not depend on how it was cut."""

    loss: float = 0.0
    correct: int = 0
    count: int = 0

    @torch.no_grad()
    def add(self, logits: Float[Tensor, "T B V"], targets: Int[Tensor, "T B"]) -> None:
        scored = targets != IGNORE
        logits, targets = logits[scored], targets[scored]
        self.loss += F.cross_entropy(logits.double(), targets, reduction="sum").item()
        self.correct += int((logits.argmax(-1) == targets).sum())
        self.count += len(targets)

    def means(self) -> dict[str, float]:
        """`loss` in nats and `accuracy` in 0-1."""
        if self.count == 0:
            return {"loss": math.nan, "accuracy": math.nan}
        return {"loss": self.loss / self.count, "accuracy": self.correct / self.count}
