"""The table of metrics, scores of logits, and Java, which scores captions."""

import math
import os

import pytest
import torch

from bnrnn.inputs import IGNORE
from bnrnn.metrics import Scores, axis_title, cross_entropy, from_loss, has_java, metric_of, sign


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


def test_the_table_of_metrics_knows_what_is_measured_however_it_was():
    assert sign("valid/accuracy_batch_statistics") == sign("test/rouge_l") == sign("test/bleu4_beam3") == 1
    assert sign("train/loss") == sign("test/ppl_shared_statistics") == sign("train/grad_norm") == -1
    assert metric_of("test/rouge_l_beam3").title == "ROUGE-L" and metric_of("seconds") is None
    assert from_loss("bpc", math.log(2)) == {"bpc": 1.0} and from_loss("accuracy", 1.0) == {}
    assert axis_title("train/loss") == "training cross-entropy in nats"
    assert axis_title("valid/bpc") == "validation bits per character (batch statistics)"
    assert axis_title("seconds") == "seconds"


def test_java_that_is_installed_but_does_not_start_does_not_count(tmp_path, monkeypatch):
    for status in (1, 0):
        (tmp_path / "java").write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / "java").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        has_java.cache_clear()
        assert has_java() is (status == 0)
    has_java.cache_clear()
