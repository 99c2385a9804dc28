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


def error(logits: Float[Tensor, "T B V"], targets: Int[Tensor, "T B"]) -> Float[Tensor, ""]:
    """Share of the scored steps whose most probable class is wrong."""
    scored = targets != IGNORE
    return ((logits.argmax(-1) != targets) & scored).sum() / scored.sum()


def scored_steps(targets: Int[Tensor, "T B"]) -> Float[Tensor, ""]:
    """Scored steps of a sequence, the mean over the batch."""
    return (targets != IGNORE).sum() / targets.shape[1]


def from_loss(metric: str, loss: float) -> dict[str, float]:
    """{metric: value} where it is a function of the loss: `bpc`, bits per character, or `ppl`, perplexity per word."""
    functions = {"bpc": lambda nats: nats / math.log(2), "ppl": lambda nats: math.exp(min(nats, 700.0))}
    return {metric: functions[metric](loss)} if metric in functions else {}


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

    def means(self, metric: str = "accuracy") -> dict[str, float]:
        """`loss` in nats, `accuracy` in 0-1, and the metric that people read."""
        if self.count == 0:
            return {"loss": math.nan, "accuracy": math.nan, metric: math.nan}
        loss = self.loss / self.count
        accuracy = self.correct / self.count
        error = {"error": 1 - accuracy} if metric == "error" else {}
        return {"loss": loss, "accuracy": accuracy, **error, **from_loss(metric, loss)}


HIGHER_IS_BETTER = ("accuracy", "bleu", "rouge", "cider", "meteor")


def sign(metric: str) -> int:
    """1 where more of `<split>/<metric>` is better, -1 where less is."""
    return 1 if metric.split("/")[-1].startswith(HIGHER_IS_BETTER) else -1
