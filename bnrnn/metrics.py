"""All metrics: their table, masked losses, scores of logits, and scores of captions.

Captions are scored by pycocoevalcap, the evaluation code of COCO captions, which the extra `captions` installs.
"""

import math
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from bnrnn.inputs import IGNORE

TOKEN = re.compile(r"n't\b|'(?:s|re|ve|ll|d|m)\b|\w+?(?=n't\b)|\w+(?:[-/&]\w+)*(?:\.\w+)*|[^\w\s]")
SIGNS = "&$%#+=*@/~<>"  # signs that count as words


@dataclass(frozen=True)
class Metric:
    """A metric `<split>/<name>` and how tables and figures show it.

    Args:
        title: the name in text and on axes.
        unit: the unit of differences, after scaling.
        scale: tables show the value times this factor.
        digits: number of decimal places in tables.
        better: 1 if a higher value is better, -1 if a lower value is better.
        from_loss: computes the metric from a mean cross-entropy in nats; None if it is not a function of it.
    """

    name: str
    title: str
    unit: str = ""
    scale: int = 1
    digits: int = 3
    better: int = -1
    from_loss: Callable[[float], float] | None = None


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "accuracy", "points", scale=100, digits=1, better=1),
        Metric("error", "error", "points", scale=100, digits=1),
        Metric("bpc", "bits per character", "bits", from_loss=lambda nats: nats / math.log(2)),
        Metric("ppl", "perplexity per word", digits=1, from_loss=lambda nats: math.exp(min(nats, 700.0))),
        Metric("loss", "cross-entropy in nats", "nats"),
        *(Metric(f"bleu{n}", f"BLEU-{n}", better=1) for n in range(1, 5)),
        Metric("rouge_l", "ROUGE-L", better=1),
        Metric("cider", "CIDEr", better=1),
        Metric("meteor", "METEOR", better=1),
    )
}
READ = ("ppl", "bpc", "error", "accuracy")  # the main metric of a run is the first of these that it has
SCORES = ("bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider", "meteor")  # scores of captions


def metric_of(key: str) -> Metric | None:
    """The metric of a key `<split>/<name>`, also with a suffix such as `_batch_statistics`; None if it is unknown."""
    name = key.split("/")[-1]
    return next((m for m in METRICS.values() if name == m.name or name.startswith(f"{m.name}_")), None)


def in_words(metric: Metric) -> str:
    """The name of the metric in the heading of a table."""
    return f"{metric.title} in %" if metric.scale == 100 else metric.title


def sign(key: str) -> int:
    """1 if a higher value of `<split>/<metric>` is better, -1 if a lower value is better."""
    metric = metric_of(key)
    return metric.better if metric else -1


def from_loss(name: str, loss: float) -> dict[str, float]:
    """{name: value} if the metric is a function of the loss (in nats), else {}."""
    function = METRICS[name].from_loss if name in METRICS else None
    return {name: function(loss)} if function else {}


def axis_title(key: str) -> str:
    """The axis title for `<split>/<metric>` in figures. Validation curves are measured with batch statistics."""
    metric, split = metric_of(key), key.split("/")[0]
    if metric is None or split not in ("train", "valid", "train_set"):
        return key
    if split == "train_set":
        return f"{metric.title} of the training set (batch statistics)"
    return f"training {metric.title}" if split == "train" else f"validation {metric.title} (batch statistics)"


def cross_entropy(logits: Float[Tensor, "T B V"], targets: Int[Tensor, "T B"]) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats over the scored steps."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


def error(logits: Float[Tensor, "T B V"], targets: Int[Tensor, "T B"]) -> Float[Tensor, ""]:
    """Fraction of the scored steps whose most probable class is wrong."""
    scored = targets != IGNORE
    return ((logits.argmax(-1) != targets) & scored).sum() / scored.sum()


def scored_steps(targets: Int[Tensor, "T B"]) -> Float[Tensor, ""]:
    """Number of scored steps of a sequence, averaged over the batch."""
    return (targets != IGNORE).sum() / targets.shape[1]


@dataclass
class Scores:
    """Sums over batches, so that the mean over a split does not depend on the sizes of its batches."""

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
        """`loss` in nats, `accuracy` in 0-1, and `metric`; NaN if nothing was scored."""
        if self.count == 0:
            return {"loss": math.nan, "accuracy": math.nan, metric: math.nan}
        loss = self.loss / self.count
        accuracy = self.correct / self.count
        error = {"error": 1 - accuracy} if metric == "error" else {}
        return {"loss": loss, "accuracy": accuracy, **error, **from_loss(metric, loss)}


@cache
def has_java() -> bool:
    """Whether METEOR, and the tokenizer that pycocoevalcap uses, can run: both are Java programs."""
    try:
        return subprocess.run(["java", "-version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def score(candidates: list[str], references: list[list[str]]) -> dict[str, float]:
    """BLEU-1 to 4, ROUGE-L, CIDEr and, if Java is installed, METEOR of one candidate caption per image.

    Without Java, `tokenize` splits captions into words. Its result differs from that of pycocoevalcap's tokenizer in
    about one of 600 captions.
    """
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.rouge.rouge import Rouge

    given, expected = _tokenized([[c] for c in candidates]), _tokenized(references)
    bleu, _ = Bleu(4).compute_score(expected, given, verbose=0)
    values = {f"bleu{n}": float(b) for n, b in enumerate(bleu, 1)}
    values |= {"rouge_l": float(Rouge().compute_score(expected, given)[0])}
    values |= {"cider": float(Cider().compute_score(expected, given)[0])}
    if has_java():
        meteor = Meteor()
        values |= {"meteor": float(meteor.compute_score(expected, given)[0])}
        meteor.meteor_p.communicate()  # ends the program and closes its pipes
    return values


def _tokenized(captions: list[list[str]]) -> dict[int, list[str]]:
    if not has_java():
        return {n: [tokenize(caption) for caption in of_image] for n, of_image in enumerate(captions)}
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    given: dict[int, Any] = {n: [{"caption": c} for c in of_image] for n, of_image in enumerate(captions)}
    return PTBTokenizer().tokenize(given)


def tokenize(caption: str) -> str:
    """Split a caption like the Penn Treebank: lower case, contractions split, no punctuation, joined by spaces."""
    return " ".join(w for w in TOKEN.findall(caption.lower()) if any(c.isalnum() for c in w) or w in SIGNS)
