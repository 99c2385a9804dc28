"""The whole path on the embedded digits: training, stopping, killing, resuming, and the files of a run."""

import json
import math
import os
import signal
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bnrnn.errors import BnrnnError
from bnrnn.inputs import Batch
from bnrnn.scan import backends
from bnrnn.train import train
from bnrnn.training import checkpoint
from bnrnn.training.checkpoint import CHECKPOINT, MODEL
from bnrnn.training.device import choose_device
from bnrnn.training.log import RunLog, read_jsonl
from bnrnn.training.loop import Trainer, has_diverged
from bnrnn.training.results import FILE, Result
from bnrnn.training.state import TrainState
from bnrnn.training.stop import Interrupted, Stop
from tests.helpers import composed

SHORT = ("budget.updates=6", "budget.eval_every=3", "budget.eval_batches=1", "budget.population_batches=1",
         "log_every=2")  # fmt: skip
GOLDEN = {"lstm": [2.3141174, 2.3332673, 2.2982820], "bn_lstm": [2.2920698, 2.2835337, 2.2773357]}


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


def test_the_last_update_is_evaluated_within_an_interval_and_with_population_statistics_too(tmp_path):
    result = train(short("population_every=2", "budget.updates=8"), tmp_path)
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [r["update"] for r in records if "valid/accuracy" in r] == [3, 6, 8] and result.updates == 8
    assert [r["update"] for r in records if "valid/accuracy_population_statistics" in r] == [6, 8]


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


def test_a_layer_with_only_a_reference_refuses_another_engine(tmp_path):
    assert train(short("model=rnn"), tmp_path / "a").environment["backend"] == "reference"
    with pytest.raises(BnrnnError, match="backend=fused has no kernel for this model's layers"):
        train(short("model=bn_rnn", "backend=fused"), tmp_path / "b")


def test_a_result_names_the_engine_that_ran_if_the_selected_one_failed(tmp_path, monkeypatch):
    def fails(trial):
        backends.note(trial.instead)
        return False

    monkeypatch.setattr("bnrnn.scan.lstm._has_one_feature", lambda *_: False)
    monkeypatch.setattr("bnrnn.scan.dispatch.engine_of", lambda *_: "triton")
    monkeypatch.setattr("bnrnn.scan.trials.Trial.passed", fails)
    result = train(short(), tmp_path / "fails")
    assert result.environment["backend"] == "fused"
    assert [(piece["backend"], piece["ran"]) for piece in result.pieces] == [("cpu", "fused")]
    monkeypatch.undo()
    result = train(short(), tmp_path / "runs")
    assert result.environment["backend"] == "cpu" and "ran" not in result.pieces[0]


def test_a_result_is_stored_before_anything_is_drawn_for_wandb(tmp_path, monkeypatch):
    def curves(records):
        assert (tmp_path / FILE).exists() and not (tmp_path / CHECKPOINT).exists()
        raise ValueError("no axis")

    monkeypatch.setattr("bnrnn.report.run_figures.curves", curves)
    assert train(short("wandb.mode=offline"), tmp_path).status == "finished"
    assert "the figure curves is missing in wandb (ValueError: no axis)" in (tmp_path / "run.log").read_text()


class Table:
    """A run of wandb of which only the line in wandb's table of runs is kept, and the rest is accepted."""

    def __init__(self) -> None:
        self.summary: dict[str, float | str] = {}

    def __getattr__(self, name: str):
        return lambda *_, **__: None


def test_wandbs_table_of_runs_has_the_status_and_the_last_metrics(tmp_path, monkeypatch):
    shown = Table()
    monkeypatch.setattr("bnrnn.train.mirror.start", lambda *_: shown)
    result = train(short(), tmp_path)
    assert shown.summary["status"] == "finished"
    assert shown.summary["test/accuracy"] == result.metrics["test/accuracy"]


def test_the_speed_in_wandb_counts_from_where_a_run_resumed(tmp_path, monkeypatch):
    cfg, watched = short(), []
    with pytest.raises(Interrupted):
        interrupt_at(3, cfg, tmp_path)
    saved = checkpoint.load(tmp_path / CHECKPOINT)
    saved["state"]["seconds"] = 1e6
    checkpoint.save(tmp_path / CHECKPOINT, saved)
    monkeypatch.setattr(RunLog, "watch", lambda self, update, values: watched.append(values()["updates_per_second"]))
    train(cfg, tmp_path)
    assert watched and min(watched) > 0.01  # it would be a millionth


def test_a_note_about_wandb_is_printed_and_kept_in_the_log_of_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bnrnn.train.mirror.start", lambda *given: given[-1]("warning: wandb is not there"))
    train(short(), tmp_path, title="a run")
    assert "a run warning: wandb is not there\n" in capsys.readouterr().out
    assert "warning: wandb is not there\n" in (tmp_path / "run.log").read_text()


def test_a_result_with_scores_of_captions_says_which_tokenizer_they_are_from(tmp_path, monkeypatch):
    assert "java" not in train(short(), tmp_path / "a").environment
    monkeypatch.setattr("bnrnn.train.measure", lambda trainer: {"test/bleu4": 0.25})
    for found in (True, False):
        monkeypatch.setattr("bnrnn.train.has_java", lambda found=found: found)
        assert train(short(), tmp_path / str(found)).environment["java"] is found
