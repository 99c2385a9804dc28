import json

import pytest

from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.report.evidence import Evidence
from bnrnn.report.terminal import default_metric, plot, read_curves


def put(folder, values: dict[int, float]) -> None:
    folder.mkdir(parents=True)
    lines = [json.dumps({"update": u, "valid/bpc": v}) for u, v in values.items()]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))


def test_seeds_are_averaged_and_the_differing_overrides_name_the_curves(tmp_path):
    put(tmp_path / "a/paper/data=text8,model=lstm,log_every=1,seed=0", {10: 3.0, 20: 2.0})
    put(tmp_path / "a/paper/data=text8,model=lstm,log_every=1,seed=1", {10: 4.0})  # still being trained
    put(tmp_path / "a/paper/data=text8,model=captioner/rhn,log_every=1,seed=0", {10: 1.0, 20: 0.5})
    put(tmp_path / "a/cpu/data=text8,model=lstm,log_every=1,seed=0", {10: 2.0})
    panels = read_curves(["a"], Evidence(tmp_path), "valid/bpc")
    assert {name: set(curves) for name, curves in panels.items()} == {
        "paper, data=text8": {"model=lstm", "model=captioner/rhn"}, "cpu, data=text8": {"model=lstm"}
    }  # fmt: skip
    text = plot(panels["paper, data=text8"], "valid/bpc", "paper", colored=False)
    assert "a model=captioner/rhn (n=1): 0.5 at update 20" in text
    assert "b model=lstm (n=2): 3.5 at update 10" in text
    drawn = [line for line in text.splitlines() if "│" in line or "┤" in line]
    assert [sum(line.count(letter) for line in drawn) for letter in "ab"] == [2, 1]
    assert "\x1b" not in text and "\x1b" in plot(panels["paper, data=text8"], "valid/bpc", "paper", colored=True)


def test_a_metric_that_no_run_has_is_named_with_those_that_there_are(tmp_path):
    put(tmp_path / "a/paper/model=lstm,seed=0", {10: 3.0})
    with pytest.raises(BnrnnError, match=r"no curve of valid/ppl: its metrics are valid/bpc"):
        read_curves(["a"], Evidence(tmp_path), "valid/ppl")
    assert default_metric("cooijmans2016/table2") == "valid/bpc" and default_metric("quickstart") == "valid/accuracy"


def test_several_experiments_are_plotted_together_and_what_differs_names_their_curves(tmp_path):
    put(tmp_path / "a/paper/data=text8,model=lstm,seed=0", {10: 3.0})
    put(tmp_path / "b/paper/data=text8,model=lstm,optim.lr=10,seed=0", {10: 2.0})
    put(tmp_path / "b/paper/data=text8,model=lstm,optim.lr=2,seed=0", {10: 1.0})
    panels = read_curves(["a", "b"], Evidence(tmp_path), "valid/bpc")
    assert list(panels) == ["paper, data=text8"]
    assert list(panels["paper, data=text8"]) == [
        "experiment=a", "experiment=b, optim.lr=2", "experiment=b, optim.lr=10"
    ]  # fmt: skip


def test_the_gammas_of_fig_6_are_in_the_order_of_their_values_with_the_one_of_table_1():
    panels = read_curves(["cooijmans2016/fig6_pmnist"], Evidence(ROOT / "results"), "train/loss")
    (curves,) = panels.values()
    gammas = [float(name.removeprefix("model.layer.gamma_init=")) for name in curves]
    assert gammas == sorted(gammas)
    assert {0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 1.0} <= set(gammas)
    assert {len(of_seeds) for of_seeds in curves.values()} == {3}
    assert max(max(curve) for curve in curves["model.layer.gamma_init=0.1"]) == 2500
