"""Damaged checkpoints and records: each is one message. Runs of another time or engine are resumed as they were."""

import pytest
import torch
from hypothesis import given, settings

from bnrnn.errors import BnrnnError
from bnrnn.train import train
from bnrnn.training import checkpoint
from bnrnn.training.checkpoint import CHECKPOINT, MODEL
from bnrnn.training.results import METRICS, Result
from tests.stress.damage import NO_FILE, damaged
from tests.test_train import interrupt_at, short


def test_no_damage_of_a_checkpoint_is_accepted_and_old_files_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / MODEL
    saved = {"model": {"w": torch.arange(100.0)}, "config": {}}
    checkpoint.save(path, saved)
    good = path.read_bytes()
    assert torch.load(path, weights_only=True)["config"] == {}  # still an ordinary file of torch

    @settings(max_examples=200, derandomize=True, database=None, deadline=None)
    @given(damaged(good))
    def read(damage):
        kind, content = damage
        if kind not in NO_FILE:
            path.write_bytes(content)
            with pytest.raises(BnrnnError, match=r"model.pt is not a checkpoint \(.*\): remove it to start the run"):
                checkpoint.load(path)

    read()
    torch.save(saved, path)  # from before there were checksums
    assert torch.equal(checkpoint.load(path)["model"]["w"], torch.arange(100.0))
    old = path.read_bytes()
    position = old.index(torch.arange(100.0).numpy().tobytes()) + 200
    path.write_bytes(old[:position] + b"\x55" + old[position + 1 :])
    with pytest.raises(BnrnnError, match=r"model.pt is not a checkpoint"):
        checkpoint.load(path)
    path.write_bytes(good.replace(b"bnrnn 1 sha256", b"bnrnn 2 sha256"))
    with pytest.raises(BnrnnError, match=r"does not have its checksum|newer bnrnn"):
        checkpoint.load(path)


def test_a_model_in_the_place_of_a_checkpoint_is_named(tmp_path):
    checkpoint.save(tmp_path / CHECKPOINT, {"model": {}, "config": {}})
    with pytest.raises(BnrnnError, match=r"checkpoint.pt is not a checkpoint \(expected state, model, optimizer"):
        checkpoint.load(tmp_path / CHECKPOINT)


def test_records_that_are_not_those_of_the_checkpoint_stop_the_run(tmp_path):
    with pytest.raises(SystemExit):
        interrupt_at(4, short(), tmp_path)
    path = tmp_path / METRICS
    good = path.read_bytes()
    for changed in (good[: good.index(b"\n") + 1], good.replace(b"2.", b"3.", 1)):
        path.write_bytes(changed)
        with pytest.raises(BnrnnError, match=r"metrics.jsonl is damaged: it has .*to which the checkpoint belongs"):
            train(short(), tmp_path)
        assert path.read_bytes() == changed and (tmp_path / CHECKPOINT).exists()


def test_a_piece_that_differs_is_refused_unless_it_is_asked_for_and_all_are_listed(tmp_path):
    with pytest.raises(SystemExit):
        interrupt_at(4, short("backend=cpu"), tmp_path)
    with pytest.raises(BnrnnError, match=r"begun in another way \(backend: cpu there, reference now\)"):
        train(short("backend=reference"), tmp_path)
    result = train(short("backend=reference", "resume=changed"), tmp_path)
    assert [(p["update"], p["backend"]) for p in result.pieces] == [(0, "cpu"), (5, "reference")]
    assert Result.read(tmp_path / "result.json") == result


def test_a_run_begun_before_there_were_pieces_resumes(tmp_path):
    whole = train(short(), tmp_path / "a")
    with pytest.raises(SystemExit):
        interrupt_at(4, short(), tmp_path / "b")
    saved = checkpoint.load(tmp_path / "b" / CHECKPOINT)
    del saved["records_sha256"], saved["state"]["pieces"], saved["state"]["cpu_seconds"]
    torch.save(saved, tmp_path / "b" / CHECKPOINT)
    result = train(short(), tmp_path / "b")
    assert result.metrics == whole.metrics and result.cpu_seconds is None and whole.cpu_seconds is not None
    assert [piece["update"] for piece in result.pieces] == [5]


def test_a_checkpoint_left_beside_a_result_is_removed_by_the_next_start(tmp_path):
    train(short(), tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"left behind")
    train(short(), tmp_path)
    assert not (tmp_path / CHECKPOINT).exists()
