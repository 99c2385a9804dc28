"""Runs that train together in one process: each has the numbers and files that it has alone, in float64 exactly."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from bnrnn import plan, workers
from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.train import cli, train, train_in_packs, train_pack
from bnrnn.training import checkpoint
from bnrnn.training.checkpoint import CHECKPOINT, MODEL
from bnrnn.training.log import read_jsonl
from bnrnn.training.loop import Trainer
from bnrnn.training.options import check_options
from bnrnn.training.pack import Run, describe, form, in_packs
from bnrnn.training.results import FILE, Result
from bnrnn.workers import work
from tests.helpers import composed, forked
from tests.test_campaign import cells_of, entry, hold, write
from tests.test_train import interrupt_at, without_time

SHORT = ("budget.updates=5", "budget.eval_every=3", "budget.eval_batches=1", "budget.population_batches=1",
         "log_every=2", "batch_size=10", "population_batch_size=10", "model.hidden_size=8")  # fmt: skip
KINDS = {
    "bn_lstm": ("model=bn_lstm", "data._target_=tests.toy_double.WidePixels"),
    "lstm": ("model=lstm", "data._target_=tests.toy.ToyCharacters", "optim=adam", "model.init.hidden=orthogonal"),
    "words": (
        "model=input_bn_lstm", "data._target_=tests.toy.ToyWords", "optim=sgd", "init@model.init=uniform",
        "optim.momentum=0.5", "sum_over_time=true", "model.num_layers=2", "model.learned_state=false",
        "model.embedding_size=8", "model.dropout=0.3", "lr_decay={after: 0, divisor: 2}",
    ),
    "captioner": (
        "setting=lstm_captioner", "experiment=zhang2017/flickr8k", "data._target_=tests.toy_double.WideCaptions",
        "~data.data_dir", "~data.vocabulary_size", "budget.epochs=null", "model.embedding_size=8",
    ),
}  # fmt: skip


def variant(name: str, **changes) -> DictConfig:
    """The configuration of a kind, with other values; a double underscore stands for a dot."""
    cfg = composed(*KINDS[name], *SHORT)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


VARIANTS = {
    "bn_lstm": [
        {"seed": 0, "optim__lr": 0.01, "grad_clip": 0.1},
        {"seed": 1, "model__layer__gamma_init": 0.4, "data__state_noise": 0.1},
    ],
    "lstm": [{"seed": 0}, {"seed": 1, "optim__lr": 0.02}],
    "words": [{"seed": 0, "optim__lr": 0.3}, {"seed": 1, "model__layer__gamma_init": 0.3}],
    "captioner": [{"seed": 0}, {"seed": 1}],
}


@pytest.fixture
def single(double):
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def double(monkeypatch):
    monkeypatch.setattr("bnrnn.metrics.has_java", lambda: False)  # METEOR takes seconds to start
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pack_of(cfgs: list[DictConfig], folder: Path) -> list[Run]:
    return [Run(cfg, folder / str(n), {"n": str(n)}, f"[{n}]") for n, cfg in enumerate(cfgs)]


def assert_same(folder: Path, alone: Path) -> None:
    """Assert that a run has the records, the result and the weights of another."""
    assert without_time(folder) == without_time(alone)
    found, expected = Result.read(folder / FILE), Result.read(alone / FILE)
    assert (found.metrics, found.best_update, found.updates, found.status, found.config_hash) == (
        expected.metrics, expected.best_update, expected.updates, expected.status, expected.config_hash
    )  # fmt: skip
    assert not (folder / CHECKPOINT).exists()
    if found.status == "finished":
        a, b = (checkpoint.load(path / MODEL)["model"] for path in (folder, alone))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in b)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_of_a_pack_is_as_if_it_had_been_alone(name, tmp_path, capsys, monkeypatch):
    # All runs select their last model: otherwise those that do not would measure the last one too, and scan more.
    monkeypatch.setattr(Trainer, "_better", lambda self, metrics, best: True)
    cfgs = [variant(name, **changes) for changes in VARIANTS[name]]
    results = train_pack(pack_of(cfgs, tmp_path / "pack"))
    output = capsys.readouterr().out
    metrics = []
    for n, (cfg, result) in enumerate(zip(cfgs, results, strict=True)):
        assert isinstance(result, Result) and result.environment["pack"] == len(cfgs)
        assert result.overrides == {"n": str(n)}
        alone = train(cfg, tmp_path / "alone" / str(n))
        assert_same(tmp_path / "pack" / str(n), tmp_path / "alone" / str(n))
        assert "pack" not in alone.environment and len(alone.pieces) == len(result.pieces) == 1
        metrics.append(alone.metrics)
    assert all(a != b for n, a in enumerate(metrics) for b in metrics[:n]), "these runs differ"
    if name != "captioner":  # its batches have other lengths for each seed
        counts = re.search(rf"pack of {len(cfgs)}: (\d+) scans in (\d+) calls", output)
        assert counts is not None and int(counts[1]) == len(cfgs) * int(counts[2])


def test_one_that_diverges_and_one_that_fails_do_not_stop_the_others(tmp_path):
    cfgs = [variant("lstm", seed=0), variant("lstm", seed=1, optim__lr=1e37), variant("lstm", seed=2)]
    cfgs.append(variant("lstm", seed=3, data__length=10**6))  # longer than the text
    runs = pack_of(cfgs, tmp_path / "pack")
    *results, failed = train_pack(runs)
    assert isinstance(failed, Exception) and "expected at least 2,000,000 for segments" in str(failed)
    assert [r.status for r in results] == ["finished", "diverged", "finished"] and results[1].updates < 5
    for n in range(3):
        train(cfgs[n], tmp_path / "alone" / str(n))
        assert_same(runs[n].folder, tmp_path / "alone" / str(n))


def stopped_at(update: int, runs: list[Run], number: int = signal.SIGTERM) -> None:
    """Train a pack, and send a signal in this update of its second run."""
    original = Trainer.update

    def update_and_signal(self, batch):
        if self.state.update == update and self.cfg.seed == runs[1].cfg.seed:
            os.kill(os.getpid(), number)
        return original(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", update_and_signal)
        train_pack(runs)


def test_a_stopped_pack_resumes_with_another_size_and_from_other_updates(tmp_path, capsys):
    cfgs = [variant("words", seed=n) for n in range(3)]
    runs = pack_of(cfgs, tmp_path / "pack")
    with pytest.raises(SystemExit, match="SIGTERM: saved"):
        stopped_at(1, runs)
    saved = [checkpoint.load(run.folder / CHECKPOINT) for run in runs]
    assert [s["state"]["update"] for s in saved] == [2, 2, 1], "each stops after the update in which it is"
    with pytest.raises(SystemExit, match="SIGTERM: saved"):
        stopped_at(3, [runs[2], runs[1]])
    capsys.readouterr()
    train(*runs[0])  # alone
    train_pack([*runs[1:], *pack_of([variant("words", seed=3)], tmp_path / "new")])
    begun = re.findall(r"\S+: (resumed at update \d+|from the start)", capsys.readouterr().out)
    assert begun == ["resumed at update 2", "resumed at update 4", "resumed at update 3", "from the start"]
    for n in (1, 2):
        train(cfgs[n], tmp_path / "alone" / str(n))
        assert_same(runs[n].folder, tmp_path / "alone" / str(n))
    pieces = Result.read(runs[1].folder / FILE).pieces
    assert [(piece["update"], piece["pack"]) for piece in pieces] == [(0, 3), (2, 2), (4, 3)]


def test_a_killed_pack_resumes(tmp_path):
    cfgs = [variant("lstm", seed=n, checkpoint_seconds=0, budget__updates=8, log_every=1) for n in range(2)]
    runs = pack_of(cfgs, tmp_path / "pack")
    process = forked(train_pack, runs)
    while process.is_alive() and len(read_jsonl(runs[1].folder / "metrics.jsonl")) < 3:
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert all(isinstance(result, Result) for result in train_pack(runs))
    for n, run in enumerate(runs):
        train(cfgs[n], tmp_path / "alone" / str(n))
        assert_same(run.folder, tmp_path / "alone" / str(n))


def test_a_checkpoint_of_a_run_in_a_pack_is_an_ordinary_one(tmp_path):
    runs = pack_of([variant("bn_lstm", seed=0), variant("bn_lstm", seed=1)], tmp_path / "pack")
    with pytest.raises(SystemExit):
        stopped_at(2, runs)
    with pytest.raises(SystemExit):
        interrupt_at(2, variant("bn_lstm", seed=1), tmp_path / "alone")
    found, expected = (checkpoint.load(path / CHECKPOINT) for path in (runs[1].folder, tmp_path / "alone"))
    for key in ("run_id", "seconds", "cpu_seconds", "pieces"):
        assert type(found["state"].pop(key)) is type(expected["state"].pop(key))
    found["records_sha256"] = expected["records_sha256"]  # the records have times
    torch.set_printoptions(precision=17, threshold=10**6)
    assert repr(found) == repr(expected)
    torch.set_printoptions(profile="default")


def test_runs_of_one_form_are_packed_in_order():
    base = [variant("lstm", seed=n) for n in range(5)]
    others = [variant("bn_lstm"), variant("lstm", model__hidden_size=9), variant("lstm", batch_size=7)]
    cfgs = [base[0], others[0], *base[1:3], *others[1:], *base[3:]]
    assert in_packs(cfgs, 8) == [[0, 2, 3, 6, 7], [1], [4], [5]]
    assert in_packs(cfgs, 2) == [[0, 2], [1], [3, 6], [4], [5], [7]]
    free = {"optim__lr": 0.5, "grad_clip": 0, "model__state_noise": 0.3, "model__init__forget_bias": 2.0}
    assert all(form(variant("lstm", **{key: value})) == form(base[0]) for key, value in free.items())
    gammas = [variant("bn_lstm", model__layer__gamma_init=gamma) for gamma in (0.1, 0.5, None)]
    assert form(gammas[0]) == form(gammas[1]) != form(gammas[2]), "null may turn a normalization off"
    kept = {"backend": "fused", "precision": "bfloat16", "budget__updates": 9, "data__length": 5, "num_threads": 2}
    assert all(form(variant("lstm", **{key: value})) != form(base[0]) for key, value in kept.items())


def test_what_is_not_packed_is_said_with_its_reason():
    def line(*cfgs: DictConfig) -> str:
        return describe(cfgs, in_packs(cfgs, 8))

    alike = [variant("lstm", seed=n) for n in range(3)]
    assert line(*alike) == "packs: 3 runs"
    assert line(*alike, variant("lstm", model__hidden_size=9), variant("lstm", batch_size=9)) == (
        "packs: 5 runs in 3 packs of at most 3; runs with another batch_size, model.hidden_size train apart"
    )
    highway = [variant("captioner", seed=n, model__layer___target_="bnrnn.layers.rhn.RHN") for n in range(2)]
    assert line(*highway) == (
        "packs: 2 runs in 2 packs of at most 1; RHN trains alone, because its scan has no axis of replicas; "
        "batches of WideCaptions have other lengths for each seed, so a pack is no faster"
    )


@pytest.mark.parametrize(("value", "shown"), [(0, "0"), (-1, "-1"), ("many", "many"), (2.5, "2.5")])
def test_a_pack_of_no_size_is_refused(value, shown):
    with pytest.raises(BnrnnError, match=rf"pack={shown} is not valid: expected a whole number from 1, or null"):
        check_options(variant("lstm", pack=value))


@pytest.fixture
def command(tmp_path, monkeypatch, capfd, single):
    """The command of training, in this process. Returns what it prints."""

    def run(*overrides: str) -> str:
        given = [f"out_dir={tmp_path}", "budget.updates=2", "budget.eval_every=2", "budget.eval_batches=1",
                 "budget.population_batches=1", "model=lstm", "model.hidden_size=8",
                 "data._target_=tests.toy_double.WidePixels"]  # fmt: skip
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["bnrnn-train", *given, *overrides])
        cli()
        return capfd.readouterr().out

    return run


def test_a_sweep_trains_in_packs_that_its_lines_name(tmp_path, command):
    output = command("hydra.mode=MULTIRUN", "seed=0,1", "pack=8")
    assert "packs: 2 runs\n" in output
    for seed in range(2):
        begun = rf"\[run {seed + 1} of 2, pack 1 of 1\] \S+,model=lstm,seed={seed}: from the start, .*, pack of 2"
        assert re.search(begun, output)
    folders = sorted(path.parent for path in tmp_path.glob("default/*/*/result.json"))
    packed = [Result.read(folder / FILE) for folder in folders]
    assert len(folders) == 2 and "pack" not in packed[0].config and folders[0].name.count("pack") == 0
    for folder in folders:
        (folder / FILE).unlink()
    assert not re.search(r"packs:|pack of|, pack", command("hydra.mode=MULTIRUN", "seed=0,1"))
    assert [Result.read(folder / FILE).metrics for folder in folders] == [result.metrics for result in packed]


def test_a_run_that_fails_stops_no_later_pack(tmp_path, capsys):
    runs = pack_of([variant("words", seed=n) for n in range(3)], tmp_path)
    (tmp_path / "0/run.lock").mkdir(parents=True)
    with pytest.raises(BnrnnError, match=r"0/run\.lock cannot be"):
        train_in_packs(runs, 2)
    assert sorted(tmp_path.rglob(FILE)) == [tmp_path / "1" / FILE, tmp_path / "2" / FILE]
    assert re.search(r"pack 1 of 2\] failed: .*0/run\.lock", capsys.readouterr().out)


def test_a_run_that_is_named_twice_is_trained_once(tmp_path, command):
    command("hydra.mode=MULTIRUN", "seed=0,0", "pack=2")
    assert len(list(tmp_path.rglob(FILE))) == 1


def test_a_pack_of_several_processes_is_refused(command):
    with pytest.raises(
        SystemExit, match=r"pack=8 trains runs together in this process, but hydra/launcher=submitit_local starts one"
    ):
        command("hydra.mode=MULTIRUN", "seed=0,1", "pack=8", "hydra/launcher=submitit_local")
    with pytest.raises(SystemExit, match=r"pack=0 is not valid: expected a whole number from 1, or null"):
        command("pack=0")


@pytest.mark.usefixtures("single")
def test_a_worker_packs_what_is_open_and_of_one_form(tmp_path, capsys):
    cells = cells_of(write(tmp_path, entry("model=bn_lstm", seeds="0"), entry("model=lstm", seeds="0,1,2,3")))
    with hold(cells[2].folder):
        work(cells, 0.0, failed := set(), pack=2)
    begun = re.findall(r"(quickstart.*seed=\d)(.*): \S+: from the start", capsys.readouterr().out)
    assert failed == set() and [name for name, _ in begun] == [cells[n].title for n in (0, 1, 3, 4)]
    assert [pack for _, pack in begun] == ["", " (pack of 2)", " (pack of 2)", ""]
    work(cells, 0.0, set())
    assert "(pack of" not in capsys.readouterr().out, "on a CPU the default is one after the other"


@pytest.mark.usefixtures("single")
def test_on_a_cpu_the_runs_of_a_pack_take_turns_after_each_update(tmp_path, monkeypatch):
    """There the engine computes the scans of each run by themselves."""
    runs = [run._replace(cfg=composed("model=lstm", *SHORT)) for run in pack_of([variant("lstm")] * 2, tmp_path)]
    turns, update = [], Trainer.update
    monkeypatch.setattr(Trainer, "update", lambda self, batch: turns.append(self.log.title) or update(self, batch))
    results = train_pack(runs)
    assert turns == ["[0]", "[1]"] * 5
    assert results[0].environment["backend"] == "cpu" and results[0].metrics == results[1].metrics


@pytest.mark.usefixtures("single")
def test_a_pack_with_too_little_memory_is_resumed_one_by_one(tmp_path, monkeypatch, capsys):
    cells = cells_of(write(tmp_path, entry("model=lstm", seeds="0,1")))
    monkeypatch.setattr(workers, "train_pack", lambda runs: [RuntimeError("CUDA out of memory. Tried")] * len(runs))
    work(cells, 0.0, failed := set(), pack=8)
    assert failed == set() and all((cell.folder / FILE).exists() for cell in cells)
    assert capsys.readouterr().out.count("too little memory for a pack of 2; the run is resumed alone") == 2


@pytest.mark.usefixtures("single")
def test_the_runs_of_a_killed_pack_are_resumed_alone(tmp_path, monkeypatch, capfd):
    cells = cells_of(write(tmp_path, entry("model=lstm", "pack=4", seeds="0,1")))

    def die(self, batch):
        if "pack of" in self.log.title and self.state.update == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, batch)

    update = Trainer.update
    monkeypatch.setattr(Trainer, "update", die)
    assert workers.run_team(cells, 0.0, 1, workers.Stop()) == [0]
    assert all("pack" not in Result.read(cell.folder / FILE).environment for cell in cells)
    assert capfd.readouterr().out.count("its process was killed by SIGKILL\n") == 2


def test_on_a_gpu_a_pack_has_the_size_that_fits_into_half_of_the_free_memory(tmp_path, monkeypatch):
    cells = cells_of(write(tmp_path, entry("model=lstm"), entry("model=bn_rnn"), entry("model=bn_lstm")))
    assert plan.fitting(cells[0]) == 1
    asked = []

    def costs(planned):
        asked.append(planned[0].title)
        return {plan._kind(planned[0]): plan.Cost(1, 1.0, 1.0, 4.0 if "bn_lstm" in planned[0].title else 0.1)}

    monkeypatch.setattr(plan, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 2**30, 80 * 2**30))
    monkeypatch.setattr(plan, "costs", costs)
    monkeypatch.setattr(plan, "_fitting", {})
    assert [plan.fitting(cell) for cell in (*cells, *cells)] == [plan.MOST_TOGETHER, 1, 7] * 2
    assert len(asked) == 2, "each kind of run is measured once, and none that would be no faster"
