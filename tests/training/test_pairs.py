"""Every model with every kind of data: a pair trains, or says in one sentence what fits."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import HydraException
from hydra.utils import get_class

from bnrnn.config import ROOT, target_of
from bnrnn.errors import BnrnnError
from bnrnn.inputs import CAPTIONS, QUESTIONS, SEQUENCES
from bnrnn.layers.average import PopulationAverage
from bnrnn.report.evidence import Evidence
from bnrnn.train import train
from bnrnn.training.checkpoint import MODEL, load
from bnrnn.training.help import text
from bnrnn.training.pairs import KINDS, check_pair, fitting, options
from bnrnn.training.results import config_hash, config_record, identity, is_stale
from tests.helpers import composed
from tests.test_config import EXPERIMENTS, cells
from tests.toy_captions import ToyCaptions

TOYS = {  # data of each kind, and of each form that a kind has
    SEQUENCES: ["digits.Digits", "toy.ToyCharacters", "toy.ToyWords", "toy_frames.ToyFrames"],
    CAPTIONS: ["toy_captions.ToyCaptions"],
    QUESTIONS: ["toy_cloze.ToyCloze"],
}
MODELS = options("model")
HASHES = Path(__file__).with_name("recipes.json")


@pytest.fixture(autouse=True)
def no_scores(monkeypatch) -> None:
    """Generated captions are tested elsewhere: scoring them starts a program that takes 15 seconds."""
    monkeypatch.setattr(ToyCaptions, "references", lambda self, split: None)


def run(model: str, toy: str, folder: Path, *more: str):
    """Train a small model for two updates."""
    target = f"{'bnrnn.data' if toy.startswith('digits') else 'tests'}.{toy}"
    cfg = composed(
        f"model={model}", f"data._target_={target}", "model.hidden_size=6", "batch_size=4", "population_batch_size=4",
        "budget.updates=2", "budget.eval_every=2", "budget.eval_batches=2", "budget.population_batches=1",
        "wandb.mode=disabled", *more,
    )  # fmt: skip
    return train(cfg, folder)


def trains(model: str, toy: str, folder: Path, *more: str) -> bool:
    """Whether a small model trains for two updates and ends with a finite loss."""
    result = run(model, toy, folder, *more)
    return result.status == "finished" and result.updates == 2 and math.isfinite(result.metrics["test/loss"])


@pytest.mark.parametrize(("number", "model"), list(enumerate(MODELS)))
def test_every_model_trains_with_its_own_initialization(tmp_path, number, model):
    toys = TOYS[get_class(target_of("model", model)).reads]
    assert trains(model, toys[number % len(toys)], tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("toy", [toy for toys in TOYS.values() for toy in toys])
@pytest.mark.parametrize("model", MODELS)
def test_a_pair_trains_with_one_and_two_layers_or_says_what_fits(tmp_path, model, toy):
    kind = next(kind for kind, toys in TOYS.items() if toy in toys)
    if model in fitting("model", kind):
        assert trains(model, toy, tmp_path / "one")
        assert trains(model, toy, tmp_path / "two", "model.num_layers=2")
    else:
        with pytest.raises(BnrnnError, match=f"has {kind}: use one of the models"):
            run(model, toy, tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", ["bn_rhn", "captioner/bn_lstm", "attentive_reader/bn_rhn"])
def test_a_second_layer_adds_its_parameters(tmp_path, model):
    toy = TOYS[get_class(target_of("model", model)).reads][-1]
    one, two = (run(model, toy, tmp_path / str(n), f"model.num_layers={n}").num_parameters for n in (1, 2))
    assert two > one


def test_a_pair_that_does_not_fit_names_what_fits():
    with pytest.raises(BnrnnError) as error:
        check_pair(composed("model=captioner/bn_rhn", "data=pmnist"), "captioner/bn_rhn", "pmnist")
    assert str(error.value).startswith(
        "model=captioner/bn_rhn reads captions of images, and data=pmnist has sequences: use one of the models "
    )
    assert str(error.value).endswith("or one of the datasets coco_captions, coco_mini, flickr8k")


def test_every_model_and_dataset_is_in_the_help_and_in_one_row_of_the_table():
    for group in ("model", "data"):
        listed = [name for kind in KINDS for name in fitting(group, kind)]
        assert sorted(listed) == sorted(options(group))
        assert all(name in text() for name in listed)
    assert "_base" not in text() and "gamma_init=0.1,0.3,1.0" in text() and "hydra:" not in text()


def test_help_whose_reader_ends_shows_no_traceback():
    with subprocess.Popen(
        [sys.executable, "-m", "bnrnn.train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as program:
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("model", ["rhn", "captioner/lstm"])
def test_an_initialization_that_does_not_fit_is_one_sentence(tmp_path, model):
    toy = TOYS[get_class(target_of("model", model)).reads][-1]
    with pytest.raises((BnrnnError, HydraException), match=r"this init@model.init is for sequence models of LSTMs"):
        run(model, toy, tmp_path / "run", "init@model.init=glorot")


def test_options_that_were_added_later_are_no_part_of_the_identity():
    record = config_record(composed())
    old = record | {"model": {k: v for k, v in record["model"].items() if k not in ("num_layers", "dropout")}}
    assert identity(old) == identity(record)
    assert config_hash(old) == config_hash(record)
    deep = config_record(composed("model.num_layers=2"))
    assert config_hash(deep) != config_hash(record)


def test_running_statistics_are_what_a_run_evaluates(tmp_path, monkeypatch):
    estimated = []
    written = PopulationAverage.write
    monkeypatch.setattr(PopulationAverage, "write", lambda self, of: (estimated.append(of), written(self, of)))
    options = ("model.layer.statistics=running", "budget.updates=8", "budget.eval_every=8")
    result = run("bn_lstm", "digits.Digits", tmp_path / "running", *options)
    assert not estimated and math.isfinite(result.metrics["valid/loss_population_statistics"])
    stored = load(tmp_path / "running" / MODEL)["model"]
    counts = [value.max().item() for name, value in stored.items() if name.endswith("num_batches_tracked")]
    assert counts and set(counts) == {result.best_update}, "the averages over the updates of the selected model"
    exact = run("bn_lstm", "digits.Digits", tmp_path / "exact", *options[1:])
    assert len(estimated) > 0
    name = "valid/loss"
    assert result.metrics[name] == exact.metrics[name], "training and batch statistics are the same"
    assert result.metrics[f"{name}_population_statistics"] != exact.metrics[f"{name}_population_statistics"]
    name = "test/loss"
    assert result.metrics[name] != exact.metrics[name] != result.metrics[f"{name}_batch_statistics"]
    assert config_hash(result.config) != config_hash(exact.config)


def test_no_recipe_has_changed():
    """Hashes from before models brought their own initialization. A change of a recipe makes its results stale.

    Recipes that were added later have none: `make check` finds a change once they have results.
    """
    expected = json.loads(HASHES.read_text())
    assert set(expected) <= set(EXPERIMENTS)
    for key, hashes in expected.items():
        found = [config_hash(config_record(composed(f"experiment={key}", *choice))) for choice in cells(key)]
        assert found == hashes, key


def test_no_stored_result_is_stale():
    for key in ("cooijmans2016/table1", "cooijmans2016/fig4_small", "laurent2015/table2", "zhang2017/rates"):
        runs = Evidence(ROOT / "results").runs(key)
        assert runs and not any(run.stale for run in runs)
        changed = runs[0].result
        changed.config["model"]["hidden_size"] += 1
        assert is_stale(key, runs[0].budget, changed)
