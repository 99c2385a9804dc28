import math

import pytest
import torch

from bnrnn.inputs import IGNORE
from bnrnn.metrics import Scores, cross_entropy


def test_only_scored_steps_count():
    logits = torch.randn(3, 4, 5)
    targets = torch.full((3, 4), IGNORE)
    targets[-1] = torch.tensor([0, 1, 2, 3])
    ref = -torch.stack([logits[-1, b].log_softmax(0)[b] for b in range(4)])
    assert cross_entropy(logits, targets).item() == pytest.approx(ref.mean().item())
    scores = Scores()
    scores.add(logits[:, :1], targets[:, :1])
    scores.add(logits[:, 1:], targets[:, 1:])  # unequal batches weigh by their steps
    correct = (logits[-1].argmax(-1) == targets[-1]).float().mean().item()
    assert scores.means() == pytest.approx({"loss": ref.mean().item(), "accuracy": correct})


def test_nothing_scored_is_nan():
    assert all(math.isnan(v) for v in Scores().means().values())
