"""When two runs are the same: configurations, results and checkpoints, also of earlier versions."""

import json

import pytest
import torch

from bnrnn.config import ROOT, compose_config
from bnrnn.errors import BnrnnError
from bnrnn.report.trained import load_trained
from bnrnn.train import train
from bnrnn.training import checkpoint
from bnrnn.training.checkpoint import CHECKPOINT, MODEL
from bnrnn.training.results import Result, check_same_config, config_hash, config_record
from tests.test_train import interrupt_at, short, without_time


def test_a_second_start_does_no_work(tmp_path, monkeypatch):
    first = train(short(), tmp_path)
    written = (tmp_path / "result.json").stat().st_mtime_ns
    monkeypatch.setattr("bnrnn.train.build", lambda cfg: pytest.fail("data and model were built"))
    assert train(short("device=cpu", "wandb.mode=offline"), tmp_path) == first
    assert (tmp_path / "result.json").stat().st_mtime_ns == written


def test_a_finished_cell_with_another_config_stops_and_names_the_difference(tmp_path):
    train(short(), tmp_path)
    with pytest.raises(BnrnnError, match=r"another configuration \(optim.lr: 0.001 there, 0.01 now\)"):
        train(short("optim.lr=0.01"), tmp_path)


def test_numbers_are_compared_by_value_and_classes_by_name(tmp_path):
    record = config_record(short("grad_clip=5"))
    moved = record | {"model": record["model"] | {"_target_": "bnrnn.elsewhere.SequenceModel"}}
    other = record | {"model": record["model"] | {"_target_": "bnrnn.elsewhere.Captioner"}}
    assert config_hash(record) == config_hash(moved) == config_hash(config_record(short("grad_clip=5.0")))
    assert len({config_hash(changed) for changed in (record, other, record | {"grad_clip": 5.5})}) == 3
    assert config_hash({"permuted": True}) != config_hash({"permuted": 1})
    check_same_config(moved, config_record(short("grad_clip=5.0")), tmp_path)
    with pytest.raises(BnrnnError, match=r"model._target_: Captioner there, SequenceModel now"):
        check_same_config(other, record, tmp_path)


def test_the_hash_of_a_result_is_computed_from_its_configuration(tmp_path):
    result = train(short(), tmp_path)
    path = tmp_path / "result.json"
    stored = json.loads(path.read_text())
    assert stored["config_hash"] == result.config_hash
    path.write_text(json.dumps(as_before_checksums(stored) | {"config_hash": "0" * 16}))
    assert Result.read(path).config_hash == result.config_hash
    assert train(short(), tmp_path).metrics == result.metrics


def as_before_checksums(stored: dict) -> dict:
    """A result as it was written before results had checksums, versions, pieces and processor times."""
    added = ("version", "sha256", "pieces", "cpu_seconds", "records_sha256")
    return {key: value for key, value in stored.items() if key not in added}


def with_old_paths(record: dict) -> dict:
    """A configuration as it was stored before its classes moved."""
    text = json.dumps(record)
    for present, old in {"models.sequence_model.Seq": "model.Seq", "models.sequence_model.init": "init.init",
                         "training.optim": "optim"}.items():  # fmt: skip
        assert f"bnrnn.{present}" in text
        text = text.replace(f"bnrnn.{present}", f"bnrnn.{old}")
    return json.loads(text)


def test_a_result_whose_classes_have_moved_is_read_loaded_and_not_made_again(tmp_path):
    result = train(short(), tmp_path)
    path = tmp_path / "result.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(as_before_checksums(stored) | {"config": with_old_paths(stored["config"])}))
    assert Result.read(path).metrics == result.metrics == train(short(), tmp_path).metrics
    model, data = load_trained(tmp_path, "nowhere")
    assert type(model).__name__ == "SequenceModel" and data.t_max == 64
    weights = checkpoint.load(tmp_path / MODEL)["model"]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_whose_classes_have_moved_is_resumed(tmp_path):
    undisturbed = train(short(), tmp_path / "a")
    with pytest.raises(SystemExit):
        interrupt_at(4, short(), tmp_path / "b")
    saved = checkpoint.load(tmp_path / "b" / CHECKPOINT)
    checkpoint.save(tmp_path / "b" / CHECKPOINT, saved | {"config": with_old_paths(saved["config"])})
    assert train(short(), tmp_path / "b").metrics == undisturbed.metrics
    assert without_time(tmp_path / "b") == without_time(tmp_path / "a")


def test_the_checkpoints_of_the_repository_are_of_the_recipes_of_today():
    for path in (ROOT / "results").rglob(f"{CHECKPOINT}.gz"):
        key, budget, name = str(path.parent.relative_to(ROOT / "results")).rsplit("/", 2)
        cfg = compose_config(f"experiment={key}", f"budget={budget}", *name.split(","))
        saved = checkpoint.load(path.parent / CHECKPOINT)
        check_same_config(saved["config"], config_record(cfg), path)


def test_a_damaged_checkpoint_or_result_is_named(tmp_path):
    (tmp_path / CHECKPOINT).write_bytes(b"half a checkpo")
    with pytest.raises(BnrnnError, match=r"checkpoint.pt is not a checkpoint .*remove it"):
        train(short(), tmp_path)
    (tmp_path / "result.json").write_text('{"name": "x"')
    with pytest.raises(BnrnnError, match=r"result.json is not the result"):
        train(short(), tmp_path)
