"""The whole path on the embedded digits: training, stopping, killing, resuming, and the files of a run."""

import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bnrnn.commands import campaign
from bnrnn.config import ROOT, compose_config
from bnrnn.errors import BnrnnError
from bnrnn.inputs import Batch
from bnrnn.metrics import has_java
from bnrnn.report.trained import load_trained
from bnrnn.system.locks import LOCK, Locked, is_being_trained
from bnrnn.train import cli, named_overrides, train
from bnrnn.training import checkpoint
from bnrnn.training.cells import Cell
from bnrnn.training.checkpoint import CHECKPOINT, MODEL
from bnrnn.training.device import choose_device
from bnrnn.training.log import read_jsonl
from bnrnn.training.loop import Trainer, has_diverged
from bnrnn.training.progress import Entry
from bnrnn.training.results import FILE, Result, check_same_config, config_hash, config_record
from bnrnn.training.state import TrainState
from bnrnn.training.stop import Interrupted, Stop
from tests.helpers import composed, forked

SHORT = (
    "budget.updates=6",
    "budget.eval_every=3",
    "budget.eval_batches=1",
    "budget.population_batches=1",
    "log_every=2",
)
GOLDEN = {
    "lstm": [2.3141174, 2.3332673, 2.2982820],
    "bn_lstm": [2.2920698, 2.2835337, 2.2773357],
}


def short(*overrides: str):
    return composed("model.hidden_size=16", *SHORT, *overrides)


def losses(run_dir: Path) -> list[float]:
    return [r["train/loss"] for r in read_jsonl(run_dir / "metrics.jsonl") if "train/loss" in r]


def without_time(run_dir: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in read_jsonl(run_dir / "metrics.jsonl")]


def test_golden_loss(tmp_path):
    """The first losses of LSTM and BN-LSTM. If they change, the recipe has changed."""
    for model, golden in GOLDEN.items():
        train(short(f"model={model}"), tmp_path / model)
        assert losses(tmp_path / model) == pytest.approx(golden, rel=1e-4)


def test_a_result_says_what_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("bnrnn.train.today", lambda: "2026-11-24")
    cfg = short("seed=3")
    result = train(cfg, tmp_path, {"seed": "3"})
    stored = Result.read(tmp_path / "result.json")
    assert stored == result
    assert stored.status == "finished" and stored.updates == 6 and stored.best_update in (3, 6)
    assert stored.updates_per_epoch == 12  # 1,200 images in batches of 100
    assert stored.date == "2026-11-24"
    assert set(stored.metrics) == {
        "valid/loss", "valid/accuracy", "test/loss", "test/accuracy",
        "test/loss_batch_statistics", "test/accuracy_batch_statistics",
        "valid/loss_population_statistics", "valid/accuracy_population_statistics",
        "valid/loss_shared_statistics", "valid/accuracy_shared_statistics",
        "test/loss_shared_statistics", "test/accuracy_shared_statistics",
    }  # fmt: skip
    assert stored.config["seed"] == 3 and stored.environment["torch"] == torch.__version__
    text = (tmp_path / "result.json").read_text()
    assert "data_dir" not in text and "out_dir" not in text and str(tmp_path) not in text
    assert not (tmp_path / CHECKPOINT).exists()
    weights = checkpoint.load(tmp_path / MODEL)["model"]
    assert not weights["layer.layers.0.bn_hh.pop_var"].isnan().any()


def test_the_largest_gradient_norm_of_a_window_stands_beside_its_mean(tmp_path):
    train(short("log_every=1"), tmp_path / "each")
    train(short("log_every=3"), tmp_path / "window")
    norms = [r["train/grad_norm"] for r in read_jsonl(tmp_path / "each/metrics.jsonl") if "train/grad_norm" in r]
    largest = [r["train/grad_norm_max"] for r in read_jsonl(tmp_path / "window/metrics.jsonl") if "train/loss" in r]
    assert len(set(norms)) == 6 and largest == [max(norms[:3]), max(norms[3:])]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 100.1 * math.log(10)])
def test_a_loss_that_is_not_finite_or_absurd_is_a_divergence(loss):
    assert has_diverged(loss, 10) and not has_diverged(99.9 * math.log(10), 10)


def test_a_run_whose_loss_explodes_ends_as_diverged(tmp_path):
    result = train(short("model=lstm", "optim=sgd", "optim.lr=1e9", "grad_clip=0"), tmp_path)
    loss = losses(tmp_path)[-1]
    assert result.status == "diverged" and result.updates == 2 and math.isfinite(loss) and loss > 1e3


def test_validation_with_population_statistics_is_recorded_and_selects_a_model_of_its_own(tmp_path):
    wanted = short("population_every=1", "budget.updates=9")
    result = train(wanted, tmp_path / "a")
    records = [r for r in read_jsonl(tmp_path / "a/metrics.jsonl") if "valid/accuracy" in r]
    recorded = {r["update"]: r["valid/accuracy_population_statistics"] for r in records}
    assert list(recorded) == [3, 6, 9]
    assert result.metrics["valid/accuracy_chosen_by_population"] == max(recorded.values())
    assert result.metrics["valid/accuracy"] == max(r["valid/accuracy"] for r in records)
    assert "test/accuracy_chosen_by_population" in result.metrics
    # Neither training nor the other numbers depend on it, so it is no part of a run's identity; a kill changes nothing.
    plain = train(short("budget.updates=9"), tmp_path / "b")
    assert plain.config_hash == result.config_hash and losses(tmp_path / "a") == losses(tmp_path / "b")
    assert plain.metrics.items() <= result.metrics.items()
    with pytest.raises(SystemExit):
        interrupt_at(7, wanted, tmp_path / "c")
    assert train(wanted, tmp_path / "c").metrics == result.metrics


def test_a_compressed_checkpoint_is_small_and_resumes_as_the_checkpoint_does(tmp_path):
    undisturbed = train(short(), tmp_path / "a")
    with pytest.raises(SystemExit):
        interrupt_at(4, short(), tmp_path / "b")
    path = tmp_path / "b" / CHECKPOINT
    assert not checkpoint.compress(path, most=100) and not checkpoint.compressed(path).exists()
    assert checkpoint.compress(path, most=10**6)
    assert checkpoint.compressed(path).stat().st_size < path.stat().st_size / 2
    path.unlink()
    assert train(short(), tmp_path / "b").metrics == undisturbed.metrics
    assert without_time(tmp_path / "b") == without_time(tmp_path / "a")
    assert not checkpoint.compressed(path).exists()


def test_of_a_checkpoint_and_its_compressed_copy_the_one_with_more_updates_is_resumed(tmp_path, monkeypatch):
    path = tmp_path / CHECKPOINT
    parts = {part: {} for part in checkpoint.PARTS}
    checkpoint.save(path, parts | {"state": {"update": 60}})
    checkpoint.compress(path, most=10**6)
    newer = checkpoint.compressed(path).read_bytes()
    for update, resumed in ((20, 60), (60, 60), (80, 80)):
        checkpoint.save(path, parts | {"state": {"update": update}})
        assert checkpoint.load(path)["state"]["update"] == resumed
        assert checkpoint.existing(path) == (path if update >= 60 else checkpoint.compressed(path))
    checkpoint.save(path, parts | {"state": {"update": 20}})
    monkeypatch.setattr(
        campaign, "load_entries", lambda *_: [Entry("", "", [], 1.0, False, [Cell([], {}, "", tmp_path)])]
    )
    campaign.compress(campaign.Options())
    assert checkpoint.compressed(path).read_bytes() == newer, "the copy that is ahead remains"
    checkpoint.compressed(path).write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(BnrnnError, match=r"checkpoint.pt.gz is not .*: remove it to resume from the other one"):
        checkpoint.load(path)


def test_a_damaged_compressed_checkpoint_is_named(tmp_path):
    checkpoint.compressed(tmp_path / CHECKPOINT).write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(BnrnnError, match=r"checkpoint.pt.gz is not a checkpoint .*: remove it to start the run again"):
        checkpoint.load(tmp_path / CHECKPOINT)


def test_a_model_without_statistics_is_measured_once(tmp_path):
    metrics = train(short("model=lstm", "budget.eval_every=6"), tmp_path).metrics
    assert set(metrics) == {"valid/loss", "valid/accuracy", "test/loss", "test/accuracy"}


def test_the_same_seed_gives_the_same_result_and_another_seed_another(tmp_path):
    first, again, other = (train(short(f"seed={s}"), tmp_path / n) for n, s in (("a", 0), ("b", 0), ("c", 1)))
    assert without_time(tmp_path / "a") == without_time(tmp_path / "b")
    assert first.metrics == again.metrics != other.metrics


def test_statistics_are_estimated_from_training_batches_of_their_own_size(tmp_path, monkeypatch):
    passes, original = set(), Trainer._pass

    def recorded(self, split, batch_size):
        passes.add((split, batch_size))
        return original(self, split, batch_size)

    monkeypatch.setattr(Trainer, "_pass", recorded)
    train(short("batch_size=20", "population_batch_size=37"), tmp_path)
    assert passes == {("train", 37), ("valid", 20), ("test", 20)}


def test_no_more_batches_are_read_than_asked_for():
    run = SimpleNamespace(device=torch.device("cpu"), stop=Stop())
    run.log = SimpleNamespace(track=lambda batches, total, what: batches)
    batches = [Batch(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long))] * 5
    assert [len(list(Trainer._limited(run, 5, iter(batches), most, ""))) for most in (2, 5, 9, None)] == [2, 5, 5, 5]


def test_measuring_leaves_a_model_in_the_mode_it_was_in():
    model = torch.nn.Dropout()
    run = SimpleNamespace(cfg=SimpleNamespace(seed=0), device=torch.device("cpu"), model=model, _precision=nullcontext)
    for mode in (True, False):
        model.train(mode)
        with Trainer._measuring(run):
            assert not model.training
        assert model.training == mode


def test_the_last_update_is_validated_with_population_statistics_too(tmp_path):
    train(short("population_every=2", "budget.updates=9"), tmp_path)
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [r["update"] for r in records if "valid/accuracy_population_statistics" in r] == [6, 9]


def test_no_epoch_of_a_seed_has_the_order_of_an_epoch_of_another_seed():
    class Orders:
        def num_batches(self, split, batch_size):
            return 1

        def batches(self, split, batch_size, generator, start):
            yield generator.initial_seed()

    orders = []
    for seed in range(3):
        run = SimpleNamespace(cfg=SimpleNamespace(seed=seed, batch_size=2), data=Orders(), state=TrainState("", []))
        orders += islice(Trainer.training_batches(run), 3)
    assert len(set(orders)) == 9


def test_evaluation_does_not_touch_training(tmp_path):
    train(short("data.state_noise=0.1"), tmp_path / "a")
    train(short("data.state_noise=0.1", "budget.eval_every=2"), tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_the_selected_model_is_the_best_of_the_evaluations(tmp_path):
    result = train(short("budget.updates=40", "budget.eval_every=4"), tmp_path)
    valid = {r["update"]: r["valid/accuracy"] for r in read_jsonl(tmp_path / "metrics.jsonl") if "valid/accuracy" in r}
    assert list(valid) == list(range(4, 41, 4))
    assert result.best_update == max(valid, key=lambda u: (valid[u], -u))
    assert result.metrics["valid/accuracy"] == max(valid.values())


@pytest.mark.parametrize("population_every", ["null", "1"])
def test_the_best_weights_are_restored_before_testing(tmp_path, monkeypatch, population_every):
    """A run whose first evaluation is the best has the same results as a run that ends at this evaluation."""
    monkeypatch.setattr(Trainer, "_better", lambda self, metrics, best: False)
    every = f"population_every={population_every}"
    result, ends_there = (
        train(short(every, f"budget.updates={n}"), tmp_path / name) for n, name in ((6, "long"), (3, "short"))
    )
    selected = {name: value for name, value in result.metrics.items() if not name.endswith("_last")}
    assert (result.updates, result.best_update) == (6, 3) and selected == ends_there.metrics
    a, b = (checkpoint.load(tmp_path / name / MODEL)["model"] for name in ("long", "short"))
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_the_last_update_is_evaluated_also_within_an_interval(tmp_path):
    result = train(short("budget.updates=5"), tmp_path)
    valid = [r["update"] for r in read_jsonl(tmp_path / "metrics.jsonl") if "valid/accuracy" in r]
    assert valid == [3, 5] and result.updates == 5


def test_evaluation_draws_the_same_noise_every_time(tmp_path, monkeypatch):
    evaluate, estimate = Trainer.evaluate, Trainer.estimate_population_statistics

    def evaluate_twice(self, split):
        first = evaluate(self, split)
        torch.rand(1)  # moves the generator of the training on
        assert evaluate(self, split) == first
        return first

    def estimate_twice(self):
        estimate(self)
        first = {name: value.clone() for name, value in self.model.named_buffers()}
        torch.rand(1)
        estimate(self)
        assert all(torch.equal(first[name], value) for name, value in self.model.named_buffers())

    monkeypatch.setattr(Trainer, "evaluate", evaluate_twice)
    monkeypatch.setattr(Trainer, "estimate_population_statistics", estimate_twice)
    assert train(short("data.state_noise=0.1"), tmp_path).status == "finished"


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


def test_overrides_are_named_by_their_keys_also_those_that_delete():
    given = ["seed=1", "~optim.momentum", "+model.name=a=b"]
    assert named_overrides(given) == [("model.name", "a=b"), ("seed", "1"), ("~optim.momentum", "")]


def test_a_checkpoint_of_another_config_stops_too(tmp_path):
    with pytest.raises(SystemExit):
        interrupt_at(2, short(), tmp_path)
    with pytest.raises(BnrnnError, match=r"checkpoint.pt was made with another configuration \(grad_clip"):
        train(short("grad_clip=5"), tmp_path)


def test_a_damaged_checkpoint_or_result_is_named(tmp_path):
    (tmp_path / CHECKPOINT).write_bytes(b"half a checkpo")
    with pytest.raises(BnrnnError, match=r"checkpoint.pt is not a checkpoint .*remove it"):
        train(short(), tmp_path)
    (tmp_path / "result.json").write_text('{"name": "x"')
    with pytest.raises(BnrnnError, match=r"result.json is not the result"):
        train(short(), tmp_path)


def test_divergence_ends_the_run_with_a_result_that_says_so(tmp_path):
    result = train(short("optim.lr=1e37", "model=lstm", "budget.updates=100"), tmp_path)
    assert result.status == "diverged" and result.metrics == {} and result.updates < 100
    assert train(short("optim.lr=1e37", "model=lstm", "budget.updates=100"), tmp_path) == result
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)


@pytest.mark.parametrize("updates", [1, 40])
def test_divergence_before_an_evaluation_is_one_too(tmp_path, updates):
    """Neither the loss of the only update nor the records so far show it, but the weights have overflowed."""
    given = (f"budget.updates={updates}", "budget.eval_every=7", "population_every=1", "log_every=10")
    result = train(short("model=bn_lstm", "optim=sgd", "optim.lr=1e37", "grad_clip=0", *given), tmp_path)
    assert (result.status, result.metrics, result.best_update) == ("diverged", {}, 0)
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["valid/loss"] is None


def interrupt_at(update: int, cfg, run_dir: Path, number: int = signal.SIGTERM) -> None:
    """Train, and send a signal during an update."""
    original = Trainer.update

    def update_and_signal(self, batch):
        if self.state.update == update:
            os.kill(os.getpid(), number)
        return original(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", update_and_signal)
        train(cfg, run_dir)


def test_sigterm_saves_first_and_the_run_resumes_bit_for_bit(tmp_path):
    cfg = short("data.state_noise=0.1")
    whole = train(cfg, tmp_path / "whole")
    for update in (0, 3, 4):  # before the first record, right at an evaluation, between two records
        run_dir = tmp_path / str(update)
        with pytest.raises(Interrupted, match="SIGTERM: saved") as stopped:
            interrupt_at(update, cfg, run_dir)
        assert stopped.value.status == 143
        assert checkpoint.load(run_dir / CHECKPOINT)["state"]["update"] == update + 1
        resumed = train(cfg, run_dir)
        assert resumed.metrics == whole.metrics
        assert without_time(run_dir) == without_time(tmp_path / "whole")
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_after_the_last_check_is_not_lost():
    """It arrives while the result is written: the run is finished, and the sweep ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
    with pytest.raises(KeyboardInterrupt), Stop():
        signal.raise_signal(signal.SIGINT)
    stop = Stop()
    stop.received = signal.SIGTERM
    with pytest.raises(Interrupted), stop:  # once is enough
        stop.check()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_save_that_fails_after_a_signal_is_told(tmp_path, monkeypatch, capsys, number):
    def full(*_):
        raise BnrnnError("no room")

    monkeypatch.setattr(checkpoint, "save", full)
    previous = [signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_at(1, short("model=lstm"), tmp_path / "alone", number)
        assert capsys.readouterr().err == "error: no room\n"
        assert "ended by an error: no room" in (tmp_path / "alone/run.log").read_text()
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), previous, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize(("batches", "within"), [(2, "valid"), (4, "population statistics")])
def test_a_signal_within_an_evaluation_or_a_population_pass_is_obeyed_there(tmp_path, monkeypatch, batches, within):
    cfg = short("model=bn_lstm", "population_every=1", "budget.eval_batches=3")
    whole = train(cfg, tmp_path / "whole")
    original, seen = Trainer._limited, []

    def limited(self, total, items, most, what):
        for batch in original(self, total, items, most, what):
            seen.append(what)
            if len(seen) == batches:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(Trainer, "_limited", limited)
    with pytest.raises(SystemExit, match="SIGTERM: saved"):
        train(cfg, tmp_path / "run")
    assert len(seen) == batches and seen[-1] == within
    monkeypatch.setattr(Trainer, "_limited", original)
    assert train(cfg, tmp_path / "run").metrics == whole.metrics
    assert without_time(tmp_path / "run") == without_time(tmp_path / "whole")


def test_slurms_warning_saves_first_and_then_reaches_the_handler_of_submitit(tmp_path, monkeypatch):
    cfg, original, called = short(), Trainer.update, []

    def update_and_warn(self, batch):
        if self.state.update == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGTERM)  # which queuing a job again causes
        return original(self, batch)

    def requeue(number, frame):
        called.append(checkpoint.load(tmp_path / CHECKPOINT)["state"]["update"])
        sys.exit(255)

    monkeypatch.setattr(Trainer, "update", update_and_warn)
    previous = signal.signal(signal.SIGUSR2, requeue)
    try:
        with pytest.raises(SystemExit) as left:
            train(cfg, tmp_path)
        assert signal.getsignal(signal.SIGUSR2) == requeue
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert left.value.code == 255 and called == [4]


def test_a_run_that_another_process_finished_before_we_had_the_lock_is_not_made_again(tmp_path, monkeypatch):
    first = train(short(), tmp_path / "a")

    @contextmanager
    def lock_late(run_dir):
        shutil.copy(tmp_path / "a" / "result.json", run_dir)
        yield

    monkeypatch.setattr("bnrnn.train.locked", lock_late)
    assert train(short(), tmp_path / "b") == first
    assert not (tmp_path / "b" / "metrics.jsonl").exists()


def test_a_lock_that_is_held_for_an_instant_does_not_matter_and_one_that_stays_is_an_error_of_its_own(tmp_path):
    assert not is_being_trained(tmp_path) and list(tmp_path.iterdir()) == []
    with (tmp_path / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_being_trained(tmp_path)
        with pytest.raises(Locked, match="is being trained by another process"):
            train(short(), tmp_path)
    with (tmp_path / LOCK).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as is_being_trained does
        assert not is_being_trained(tmp_path)
        release = threading.Timer(0.08, fcntl.flock, (file, fcntl.LOCK_UN))
        release.start()
        assert train(short(), tmp_path).status == "finished"
        release.join()


def test_kill_9_at_any_moment_and_start_again_is_as_if_nothing_had_happened(tmp_path, capsys):
    overrides = ("data.state_noise=0.1", "budget.updates=40", "budget.eval_every=7", "log_every=3",
                 "model.hidden_size=16", "checkpoint_seconds=0.05", "population_batch_size=300")  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for num_records in (1, 7, 14):
        process = forked(train, short(*overrides), killed)
        while process.is_alive() and len(read_jsonl(killed / "metrics.jsonl")) < num_records:
            time.sleep(0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL and not (killed / "result.json").exists()
    capsys.readouterr()
    train(short(*overrides), killed)
    assert "resumed at update" in capsys.readouterr().out
    train(short(*overrides), whole)
    assert without_time(killed) == without_time(whole)
    a, b = (Result.read(d / "result.json") for d in (killed, whole))
    assert a.metrics == b.metrics and a.best_update == b.best_update
    a, b = (checkpoint.load(d / MODEL)["model"] for d in (killed, whole))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_second_process_is_kept_out_of_a_run_that_is_being_trained(tmp_path, monkeypatch, capfd):
    arguments = [f"hydra.run.dir={tmp_path}", "model.hidden_size=16", "budget.updates=100000", "log_every=1"]
    monkeypatch.setattr(sys, "argv", ["bnrnn-train", *arguments])
    first = forked(cli)
    while not read_jsonl(tmp_path / "metrics.jsonl"):
        assert first.is_alive()
        time.sleep(0.02)
    with pytest.raises(SystemExit, match="is being trained by another process"):
        cli()
    os.kill(first.pid, signal.SIGINT)  # Ctrl-C
    first.join()
    assert first.exitcode == 130 and "SIGINT: saved; the same command resumes from here" in capfd.readouterr().err
    assert (tmp_path / CHECKPOINT).exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.layer.gama_init=1", "gama_init': did you mean model.layer.gamma_init?"),
        ("modle=lstm", "Could not override 'modle': did you mean model?"),
        ("model=bn_lstn", "bn_lstm"),
        ("device=tpu", "device=tpu is unknown: use auto, cpu or cuda"),
        ("batch_size=1", "batch_size=1: one sequence has no batch statistics"),
        ("population_batch_size=1", "population_batch_size=1: one sequence has no batch statistics"),
        ("data=smnist", "train-images-idx3-ubyte.gz is missing: run `make data`"),
        ("optim.decay=2.0", "optim.decay=2.0 is not valid: expected a number from 0, below 1"),
        ("budget.updates=0", "budget.updates=0 is not valid: expected a whole number from 1, or null"),
        ("hydra.run.dir=/proc/x", "/proc/x cannot be used (No such file or directory): choose another path"),
        (f"hydra.run.dir={'n' * 300}", f"{'n' * 300} cannot be used (File name too long): use shorter names"),
    ],
)
def test_an_error_of_the_user_is_one_message(tmp_path, monkeypatch, override, message):
    monkeypatch.setattr(sys, "argv", ["bnrnn-train", f"hydra.run.dir={tmp_path}/run", override, f"data_dir={tmp_path}"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as ended:
        cli()
    assert str(ended.value.code).startswith("error: ") and message in str(ended.value.code)
    assert "Error in call" not in str(ended.value.code)  # the words of hydra


def test_a_process_ends_with_the_message_and_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "bnrnn.train", f"hydra.run.dir={tmp_path}/run", "device=tpu"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate()
    assert process.returncode == 1 and output.endswith("\nerror: device=tpu is unknown: use auto, cpu or cuda\n")
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [0, 2])
def test_a_checkpoint_has_the_random_generator_of_its_own_gpu(monkeypatch, number):
    """Earlier ones have those of all GPUs, of which the machine that resumes may have fewer."""
    restored = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"state of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *given: restored.append(given))
    device = torch.device("cuda", number)
    state = checkpoint.random_state(device)
    assert state["cuda"] == [f"state of cuda:{number}"] and checkpoint.random_state(torch.device("cpu"))["cuda"] == []
    checkpoint.set_random_state(state, torch.device("cuda:0"))
    checkpoint.set_random_state(state | {"cuda": ["first", "second", "third"]}, device)
    checkpoint.set_random_state(state, torch.device("cpu"))
    expected = "third" if number else "first"
    assert restored == [(state["cuda"][0], torch.device("cuda:0")), (expected, device)]


def test_a_missing_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(BnrnnError, match="device=cuda needs a GPU"):
        choose_device("cuda")


def test_bfloat16_is_a_choice_that_the_result_names(tmp_path):
    full = train(short("backend=reference"), tmp_path / "float32")
    low = train(short("backend=reference", "precision=bfloat16"), tmp_path / "bfloat16")
    assert (full.environment["precision"], low.environment["precision"]) == ("float32", "bfloat16")
    assert full.config_hash == low.config_hash  # precision is not part of a run's identity
    assert losses(tmp_path / "float32") != losses(tmp_path / "bfloat16")
    assert losses(tmp_path / "bfloat16") == pytest.approx(losses(tmp_path / "float32"), rel=1e-2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("precision=float8", "precision=float8 is unknown: use float32, tf32 or bfloat16"),
        ("precision=tf32", "precision=tf32 needs a GPU, but the device is cpu"),
    ],
)
def test_an_unavailable_precision_is_an_error(override, message, tmp_path):
    with pytest.raises(BnrnnError, match=message):
        train(short(override, "device=cpu"), tmp_path)


def test_a_layer_with_only_a_reference_refuses_another_engine(tmp_path):
    assert train(short("model=rnn"), tmp_path / "a").environment["backend"] == "reference"
    with pytest.raises(BnrnnError, match="backend=fused has no kernel for this model's layers"):
        train(short("model=bn_rnn", "backend=fused"), tmp_path / "b")


def test_a_result_is_stored_before_anything_is_drawn_for_wandb(tmp_path, monkeypatch):
    def curves(records):
        assert (tmp_path / FILE).exists() and not (tmp_path / CHECKPOINT).exists()
        raise ValueError("no axis")

    monkeypatch.setattr("bnrnn.report.run_figures.curves", curves)
    assert train(short("wandb.mode=offline"), tmp_path).status == "finished"
    assert "the figure curves is missing in wandb (ValueError: no axis)" in (tmp_path / "run.log").read_text()


def test_java_that_is_installed_but_does_not_start_does_not_count(tmp_path, monkeypatch):
    for status in (1, 0):
        (tmp_path / "java").write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / "java").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        has_java.cache_clear()
        assert has_java() is (status == 0)
    has_java.cache_clear()


def test_all_failed_runs_of_a_sweep_are_named(tmp_path, monkeypatch, capsys):
    chosen = ["--multirun", "data=smnist,ptb_char", f"out_dir={tmp_path}", f"data_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bnrnn-train", *chosen, "wandb.mode=disabled"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit):
        cli()
    output = capsys.readouterr().out
    assert (
        "failed: " in output and "train-images-idx3-ubyte.gz is missing" in output and "ptb" in output.split("idx3")[1]
    )


@pytest.mark.parametrize("multirun", ["--multirun", "hydra.mode=MULTIRUN", "experiment=quickstart"])
def test_a_sweep_over_an_option_that_names_no_folder_is_refused(tmp_path, monkeypatch, multirun):
    chosen = [multirun, "precision=float32,bfloat16", f"out_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bnrnn-train", *chosen])
    with pytest.raises(SystemExit, match="several values, but the folders of runs are not named by precision"):
        cli()
    assert list(tmp_path.iterdir()) == []


def test_a_result_with_scores_of_captions_says_which_tokenizer_they_are_from(tmp_path, monkeypatch):
    assert "java" not in train(short(), tmp_path / "a").environment
    monkeypatch.setattr("bnrnn.train.measure", lambda trainer: {"test/bleu4": 0.25})
    for found in (True, False):
        monkeypatch.setattr("bnrnn.train.has_java", lambda found=found: found)
        assert train(short(), tmp_path / str(found)).environment["java"] is found
