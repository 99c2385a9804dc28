"""The plan of a sweep, which is printed before anything is started."""

from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bnrnn.commands import plan
from bnrnn.config import compose_config
from bnrnn.errors import BnrnnError
from bnrnn.train import train
from bnrnn.training.build import build
from bnrnn.training.loop import Trainer
from tests.test_train import interrupt_at

QUICK = ("budget=smoke", "model.hidden_size=8", "seed=0,1", "wandb.mode=disabled")


@pytest.fixture
def arguments(tmp_path):
    return ["experiment=quickstart", *QUICK, f"out_dir={tmp_path}"]


def test_the_cells_are_those_that_a_multirun_would_have(arguments, tmp_path):
    planned = plan.cells(arguments)
    assert [(c.overrides["model"], c.overrides["seed"]) for c in planned] == [
        ("lstm", "0"), ("lstm", "1"), ("bn_lstm", "0"), ("bn_lstm", "1"),
    ]  # fmt: skip
    assert {c.state for c in planned} == {"to do"}
    assert planned[0].folder == tmp_path / "quickstart/smoke/data=digits,model.hidden_size=8,model=lstm,seed=0"
    assert len(plan.cells(["experiment=cooijmans2016/table1"])) == 18


@pytest.mark.parametrize(
    "arguments",
    [
        ["experiment=cooijmans2016/fig6_pmnist", "model.layer.gamma_init=0.10,1e-3"],
        ["experiment=laurent2015/table2", "setting=small", "++budget.epochs=1", "budget=cpu", "out_dir='a b'"],
        ["experiment=cooijmans2016/table5_mnist_lr", "device=cpu"],
        ["experiment=quickstart", "budget=smoke,cpu", "model=lstm", "seed=0"],
    ],
)
def test_a_cell_has_the_folder_that_hydra_gives_it(arguments):
    for cell in plan.expand(arguments):
        cfg = compose_config(*cell.choices, hydra=True)
        assert cell.folder == Path(cfg.out_dir, cfg.name, cfg.budget.name, cfg.hydra.job.override_dirname)
        assert cell.folder.name == cfg.hydra.job.override_dirname


def test_a_cell_is_planned_once_and_runs_of_several_budgets_cost_differently():
    (once,) = plan.expand(["experiment=quickstart", "model=lstm", "seed=7,7"])
    short, long = plan.expand(["experiment=quickstart", "model=lstm", "seed=7", "budget=smoke,cpu"])
    assert once.folder.parent.name == "paper" and plan._kind(short) != plan._kind(long)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("out_dir=a,b", "out_dir=a,b has several values, but the folders of runs are not named by out_dir: give one"),
        ("device=cpu,cuda", "device=cpu,cuda has several values"),
        ("out_dir=${oc.env:HOME}/x", "cannot be an interpolation in a sweep: give its value"),
        ("name=mine", "name=mine cannot be set in a sweep, because it names the folders of its runs"),
        ("++budget.name=mine", "budget.name=mine cannot be set in a sweep"),
        ("seed=range(3,3)", "seed has no values: give at least one, such as seed=0"),
    ],
)
def test_overrides_that_leave_the_folders_open_are_refused(override, message):
    with pytest.raises(BnrnnError) as error:
        plan.expand(["experiment=quickstart", override])
    assert message in str(error.value)


def test_done_begun_and_left_cells_are_distinguished(arguments):
    first, second, *_ = plan.cells(arguments)
    train(first.cfg, first.folder, first.overrides)
    with pytest.raises(SystemExit):
        interrupt_at(2, second.cfg, second.folder)
    planned = plan.cells(arguments)
    assert [(c.state, c.done) for c in planned] == [("finished", 4), ("begun", 3), ("to do", 0), ("to do", 0)]
    cost = plan.Cost(updates=4, seconds_per_update=10.0, evaluation_seconds=8.0, gib=0.5)
    text = plan.render(planned, {plan._kind(c): cost for c in planned})
    assert "3 of 4 | 10 | 8.0 seconds | 12.0 seconds | 0.5 |" in text
    assert "1 of 4 runs are done. The other 3 take 108.0 seconds one after the other" in text


@pytest.mark.parametrize("model", ["lstm", "bn_lstm"])
@pytest.mark.parametrize("data", ["ToyCharacters", "ToyWords"])
def test_a_cost_is_measured_and_nothing_written(model, data, tmp_path):
    cfg = compose_config(
        f"data._target_=tests.toy.{data}", f"model={model}", "optim=sgd", "init@model.init=glorot", "batch_size=4",
        "population_batch_size=4", "model.hidden_size=8", "budget.updates=10", "budget.eval_every=4",
        f"out_dir={tmp_path}",
    )  # fmt: skip
    record = OmegaConf.to_container(cfg, resolve=True)
    cost = plan.measure(record)
    assert cost.updates == 10 and 0 < cost.seconds_per_update < 5 and 0 < cost.evaluation_seconds < 60
    assert 0.05 < cost.gib < 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["lstm", "bn_lstm", "input_bn_lstm_sequence"])
@pytest.mark.parametrize(("every", "evaluate_train"), [(None, False), (1, False), (2, False), (None, True)])
def test_the_passes_that_are_planned_are_those_of_a_run(model, every, evaluate_train, tmp_path, monkeypatch):
    cfg = compose_config(
        "data._target_=tests.toy.ToyWords", f"model={model}", "optim=sgd", "init@model.init=glorot", "batch_size=4",
        "population_batch_size=4", "model.hidden_size=8", "budget.updates=9", "budget.eval_every=2",
        f"population_every={every or 'null'}", "wandb.mode=disabled", f"evaluate_train={evaluate_train}",
    )  # fmt: skip
    count, one_pass = Counter({"valid": 0, "test": 0, "train": 0}), Trainer._pass

    def counted(self, split, batch_size):
        count[split] += 1
        return one_pass(self, split, batch_size)

    monkeypatch.setattr(Trainer, "_pass", counted)
    monkeypatch.setattr(Trainer, "_better", lambda self, metrics, best: False)  # so that the last model is not the best
    train(cfg, tmp_path)
    built, _, _, network = build(cfg)
    assert plan.passes(built, network) == count


def test_durations_are_in_a_readable_unit():
    assert [plan.duration(s) for s in (5, 300, 9000, 400_000)] == [
        "5.0 seconds", "5.0 minutes", "2.5 hours", "4.6 days",
    ]  # fmt: skip


@pytest.mark.parametrize(("override", "message"), [("sed=0", "did you mean seed?"), ("seed=a", "seed=a is not valid")])
def test_a_plan_of_wrong_options_is_one_message(monkeypatch, arguments, override, message):
    monkeypatch.setattr("sys.argv", ["bnrnn-plan", *arguments, override])
    with pytest.raises(SystemExit) as ended:
        plan.cli()
    assert message in str(ended.value.code)


def test_a_plan_of_nothing_is_refused():
    with pytest.raises(BnrnnError, match="experiment=<paper>/<table> is missing"):
        plan.cells(["seed=0"])
