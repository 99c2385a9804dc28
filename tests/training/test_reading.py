"""Training of readers: golden losses, resuming, statistics, and a run from question files to a result."""

import sys

import pytest

from bnrnn.config import compose_config
from bnrnn.data.cnn_qa_prepare import prepare_cnn_qa
from bnrnn.report.claims import analysis_of
from bnrnn.train import cli, train
from bnrnn.training.build import build
from bnrnn.training.log import read_jsonl
from bnrnn.training.results import Result
from tests.data.cnn_corpus import make
from tests.helpers import composed
from tests.test_train import interrupt_at, losses, without_time

SMALL = (
    "experiment=cooijmans2016/fig4_small_fair", "model.hidden_size=12", "batch_size=16", "population_batch_size=16",
    "budget.updates=6", "budget.eval_every=3", "log_every=1",
)  # fmt: skip
TOY = ("data=digits", "data._target_=tests.toy_cloze.ToyCloze", "+data.permute_entities=true")
VARIANTS = ["lstm_reader", "bn_lstm_reader", "bn_everywhere", "bn_e_star", "bn_e_star_star"]
GOLDEN = {
    "lstm_reader": [3.3899207, 3.3604307, 3.3459375, 3.3430808],
    "bn_lstm_reader": [3.3944106, 3.3694408, 3.3558731, 3.3517778],
    "bn_everywhere": [3.4767451, 3.3504765, 3.3567879, 3.3190424],
    "bn_e_star": [3.4796553, 3.3586721, 3.3340108, 3.3299136],
    "bn_e_star_star": [3.4370618, 3.3758609, 3.3629124, 3.4984503],
}


def small(setting: str, *overrides: str):
    return composed(*SMALL, *TOY, f"setting={setting}", *overrides)


@pytest.mark.parametrize("setting", VARIANTS)
def test_golden_losses(setting, tmp_path):
    result = train(small(setting), tmp_path)
    assert losses(tmp_path)[:4] == pytest.approx(GOLDEN[setting], rel=1e-4)
    metrics = result.metrics
    assert metrics["test/error"] == pytest.approx(1 - metrics["test/accuracy"])
    assert ("valid/error_population_statistics" in metrics) == (setting != "lstm_reader")


@pytest.mark.parametrize("setting", ["lstm_reader", "bn_e_star_star"])
def test_a_stopped_run_resumes_bit_for_bit(setting, tmp_path):
    cfg = small(setting)
    whole = train(cfg, tmp_path / "whole")
    with pytest.raises(SystemExit):
        interrupt_at(4, cfg, tmp_path / "stopped")
    assert train(cfg, tmp_path / "stopped").metrics == whole.metrics
    assert without_time(tmp_path / "stopped") == without_time(tmp_path / "whole")


def test_as_reported_and_fair_differ_only_in_their_initialization():
    equal, fair = (small("lstm_reader", f"init@model.init={init}") for init in ("reader", "reader_fair"))
    models = [build(cfg)[3] for cfg in (equal, fair)]
    norms = [model.attend_passage.weight.norm().item() for model in models]
    assert norms[0] == pytest.approx(0.05 * norms[1])
    assert [type(m) for m in models] == [type(models[0])] * 2
    for cfg in (equal, fair):
        del cfg.model.init
    assert equal == fair


def test_published_and_equal_settings():
    published, equal = (
        {s: compose_config(f"experiment=cooijmans2016/{key}", f"setting={s}") for s in VARIANTS}
        for key in ("fig4_small", "fig4_small_equal")
    )
    assert [(c.optim.lr, c.batch_size) for c in published.values()] == [(8e-5, 64)] * 3 + [(8e-4, 40)] * 2
    assert {(c.optim.lr, c.batch_size, c.population_batch_size) for c in equal.values()} == {(8e-4, 40, 40)}
    for key, size in (("fig4a", 240), ("fig4_small", 100)):
        cfg = compose_config(f"experiment=cooijmans2016/{key}")
        assert (cfg.model.hidden_size, cfg.grad_clip, cfg.model.init.scale) == (size, 10.0, 0.05)


@pytest.mark.slow
def test_from_question_files_to_a_result(tmp_path, monkeypatch):
    corpus = make(tmp_path / "cnn", {"training": 40, "validation": 10, "test": 10})
    prepare_cnn_qa(tmp_path, corpus)
    command = [
        "bnrnn-train", "-m", "experiment=cooijmans2016/fig4a", "budget=smoke", "device=cpu", "model.hidden_size=8",
        "batch_size=10", f"data_dir={tmp_path}", f"out_dir={tmp_path}", "seed=0",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    cli()
    results = sorted((tmp_path / "cooijmans2016/fig4a/smoke").glob("*/result.json"))
    assert len(results) == 5
    for path in results:
        result = Result.read(path)
        assert result.status == "finished" and 0 <= result.metrics["test/error"] <= 1
        assert result.data.startswith("a part of the CNN questions, top4 (the passage has the answer to")
        assert [r["update"] for r in read_jsonl(path.parent / "metrics.jsonl") if "valid/error" in r]


def test_the_figure_of_attention_shows_every_trained_reader(tmp_path, monkeypatch):
    from bnrnn.data import babi
    from tests.data.test_babi import write

    monkeypatch.setattr(babi, "NUM_QUESTIONS", 20)
    story = "".join(f"{n} Mary went to the room{n}.\n" for n in range(1, 6)) + "6 Where is Mary? \troom5\t5\n"
    for split in ("train", "test"):
        write(tmp_path / "babi/tasks.tar.gz", f"tasks/en/qa1_single_{split}.txt", story * 20)
    for setting in ("lstm_reader", "bn_e_star_star"):
        overrides = {"data": "babi_qa1", "seed": "0", "setting": setting}
        pairs = [f"{key}={value}" for key, value in overrides.items()]
        cfg = compose_config("experiment=cooijmans2016/fig4_small_fair", "budget=smoke", f"data_dir={tmp_path}", *pairs)
        train(cfg, tmp_path / "cooijmans2016/fig4_small_fair/smoke" / ",".join(pairs), overrides)
    analysis = analysis_of("cooijmans2016/attention").module()
    assert analysis is not None
    result = analysis.measure(str(tmp_path), tmp_path)
    assert len(result["questions"]) == 3
    for question in result["questions"]:
        assert question["question"] == ["where", "is", "mary", "?"] and question["answer"] == "room5"
        assert list(question["readers"]) == ["lstm_reader", "bn_e_star_star"]
        for reader in question["readers"].values():
            assert len(reader["attention"]) == len(question["passage"]) == 30
            assert sum(reader["attention"]) == pytest.approx(1, abs=0.01)
    assert analysis.render(result).count("where is mary ?") == 6
    analysis.draw(result, tmp_path / "attention.png")
    assert (tmp_path / "attention.png").stat().st_size > 10_000
