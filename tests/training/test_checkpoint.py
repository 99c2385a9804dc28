"""Checkpoints whose fields have other types, ranges or shapes than a run writes: each is one message."""

import copy
import math

import pytest
import torch

from bnrnn.errors import BnrnnError
from bnrnn.train import train
from bnrnn.training import checkpoint
from bnrnn.training.checkpoint import CHECKPOINT, MODEL
from tests.test_train import interrupt_at, short


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The folder of a run that was stopped after four of six updates, and its checkpoint."""
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(SystemExit):
        interrupt_at(3, short(), folder)
    return folder, checkpoint.load(folder / CHECKPOINT)


def shared(depth: int) -> dict:
    """A small dictionary that stands for 2 ** depth values."""
    value: dict = {"a": 1}
    for _ in range(depth):
        value = {"a": value, "b": value}
    return value


def in_state(**fields):
    return lambda saved: saved["state"].update(fields)


def in_best(**fields):
    return lambda saved: saved["state"]["best"].update(fields)


def cut(weights: dict) -> None:
    weights.update({name: value.flatten()[:1] for name, value in weights.items()})


def in_optimizer(change):
    return lambda saved: change(saved["optimizer"])


def shorten_moments(optimizer: dict) -> None:
    optimizer["state"][0] = {name: torch.zeros(7) for name in optimizer["state"][0]}


WRONG = {
    "beyond the budget": (in_state(update=7, evaluated=6), r"its update is 7, expected at most 6"),
    "negative update": (in_state(update=-5), "update is -5"),
    "update of another type": (in_state(update=4.0), "update is 4.0"),
    "update that is a switch": (in_state(update=True), "update is a bool of another kind"),
    "evaluated later": (in_state(evaluated=5), "it was evaluated at update 5, after its last, 4"),
    "best later": (in_best(update=5), "it was evaluated at update 5, after its last, 4"),
    "seconds without a number": (in_state(seconds=math.nan), "seconds is nan"),
    "endless seconds": (in_state(cpu_seconds=math.inf), "cpu_seconds is inf"),
    "negative records": (in_state(num_records=-1), "num_records is -1"),
    "absurd records": (in_state(num_records=10**12), r"expected the 1000000000000 to which the checkpoint belongs"),
    "name of a run": (in_state(run_id="x" * 1000), "run_id is a str of another kind"),
    "commits": (in_state(commits=[1]), "commits is a list of another kind"),
    "pieces": (in_state(pieces=[{"update": 0, "commit": shared(40)}]), "pieces is a list of another kind"),
    "window": (in_state(window=torch.zeros(3, dtype=torch.float64)), "window is a Tensor of another kind"),
    "huge window": (in_state(window=torch.zeros(1, dtype=torch.float64).expand(1 << 40)), "window is a Tensor"),
    "largest norm": (in_state(largest_norm=torch.zeros(2)), "largest_norm is a Tensor of another kind"),
    "carried": (in_state(carried=["a"]), "carried is a list of another kind"),
    "loss": (in_state(loss="low"), "loss is a str of another kind"),
    "diverged": (in_state(diverged=1), "diverged is 1"),
    "best": (in_state(best=[1]), "best is a list of another kind"),
    "metrics of the best": (in_best(metrics={"valid/accuracy": "high"}), "best is a dict of another kind"),
    "unknown field": (in_state(other=1), "unexpected keyword argument 'other'"),
    "weights": (lambda saved: cut(saved["model"]), "size mismatch|Error"),
    "weights of the best": (lambda saved: cut(saved["state"]["best"]["model"]), "its best model has other weights"),
    "weights of another type": (lambda saved: saved["model"].update(a=1), "its model has other values than tensors"),
    "moments": (in_optimizer(shorten_moments), "its optimizer has values of other shapes than the weights"),
    "learning rate": (in_optimizer(lambda o: o["param_groups"][0].update(lr="a")), "lr of its optimizer is no finite"),
    "random generator": (lambda saved: saved["random"].update(torch=torch.zeros(3)), "RNG state|ByteTensor"),
    "configuration": (lambda saved: saved.update(config=shared(40)), "its configuration has more than 10,000 values"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_one_message_before_anything_is_trained(interrupted, tmp_path, name):
    folder, saved = interrupted
    change, wrong = WRONG[name]
    saved = copy.deepcopy(saved)
    change(saved)
    checkpoint.save(tmp_path / CHECKPOINT, saved)
    (tmp_path / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())
    content = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(BnrnnError, match=wrong) as error:
        train(short(), tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    assert (tmp_path / CHECKPOINT).read_bytes() == content and not (tmp_path / "result.json").exists()


def test_a_checkpoint_with_right_fields_is_resumed(interrupted, tmp_path):
    folder, saved = interrupted
    checkpoint.save(tmp_path / CHECKPOINT, saved)
    (tmp_path / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())
    assert train(short(), tmp_path).metrics == train(short(), tmp_path / "whole").metrics
    assert checkpoint.load(tmp_path / MODEL)["config"] == saved["config"]


def test_a_compressed_copy_that_would_be_too_large_is_not_written(interrupted, tmp_path, monkeypatch):
    _, saved = interrupted
    path = tmp_path / CHECKPOINT
    checkpoint.save(path, saved)
    assert checkpoint.compress(path, 1 << 20) and checkpoint.load(path)["state"]["update"] == 4
    monkeypatch.setattr(checkpoint, "MOST_COMPRESSED", 1000)
    with pytest.raises(BnrnnError, match=r"checkpoint.pt.gz is not a checkpoint \(more than 1,000 bytes\)"):
        checkpoint.load(path)
    assert not checkpoint.compress(path, 1 << 20) and not checkpoint.compressed(path).exists()
