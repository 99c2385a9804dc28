"""The analyses that claims.yaml names: those of Fig. 1 against independent computations, and what they keep."""

import itertools
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import nn

from bnrnn.config import ROOT, compose_config, sweep
from bnrnn.errors import BnrnnError
from bnrnn.inputs import IGNORE, Batch
from bnrnn.report import analyses
from bnrnn.report.claims import analysis_of, needed, papers
from bnrnn.report.evidence import Evidence
from bnrnn.report.judging import judge
from bnrnn.system.files import write_record
from tests.report.claim_files import claim_test

fig1a = analysis_of("cooijmans2016/fig1a").module()
fig1b = analysis_of("cooijmans2016/fig1b").module()
POPULATION_IS_BETTER = {"population": 0.0, "batch": 0.1}


def test_gradient_norms_are_those_of_a_loop_over_batchnorm1d():
    T, B = 6, 10
    x, labels = torch.rand(T, B, 1), torch.arange(B)
    targets = torch.full((T, B), IGNORE)
    targets[-1] = labels
    torch.manual_seed(3)
    norms = fig1a.gradient_norms("0.5", Batch(x, targets))

    torch.manual_seed(3)
    model = instantiate(compose_config("model=bn_rnn").model, input_size=1, output_size=10, t_max=T).double()
    (layer,) = model.layer.layers
    norm = nn.BatchNorm1d(100).double()
    nn.init.constant_(norm.weight, 0.5)
    h, hs = torch.zeros(B, 100, dtype=torch.float64), []
    for x_t in x.double():
        h = torch.tanh(norm(h @ layer.weight_hh.T + x_t @ layer.weight_ih.T))
        h.retain_grad()
        hs.append(h)
    F.cross_entropy(model.head(h), labels).backward()
    assert norms == pytest.approx([h.grad.norm(dim=1).mean().item() for h in hs], rel=1e-3)


def test_the_derivative_of_tanh_is_that_of_the_exact_integral():
    result = fig1b.measure(num=1000)
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    for sigma in (0.1, 0.5, 0.9):
        exact = torch.trapezoid((1 - (sigma * z).tanh().square()) * density, z).item()
        assert fig1b.at(result, "mean", sigma) == pytest.approx(exact, abs=0.005)
    assert result["mean"][0] == 1.0


def test_missing_data_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fig1a.py", "--data-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^error: .* is missing: run `make data`"):
        runpy.run_path(str(ROOT / "experiments/cooijmans2016/fig1a.py"), run_name="__main__")


def test_the_smoke_run_of_an_analysis_measures_one_draw(monkeypatch):
    measured = []
    monkeypatch.setattr(fig1a, "measure", lambda data_dir, num_draws, gammas: measured.append(num_draws))
    monkeypatch.setattr(fig1a, "publish", lambda *result: None)
    for options in ([], ["--smoke"]):
        monkeypatch.setattr(sys, "argv", ["fig1a.py", *options])
        fig1a.main()
    assert measured == [10, 1]


def test_needed_lists_recipes_and_analyses_of_a_figure():
    assert needed("cooijmans2016/fig3") == (["cooijmans2016/table2"], [Path("experiments/cooijmans2016/fig3b.py")])
    assert needed("laurent2015/fig1") == (["laurent2015/table1"], [])
    assert needed("cooijmans2016/fig1")[0] == [] and len(needed("cooijmans2016/fig1")[1]) == 2
    assert needed("cooijmans2016/table1") == (["cooijmans2016/table1"], [])
    with pytest.raises(BnrnnError, match="has no entry 'fig99'"):
        needed("cooijmans2016/fig99")
    with pytest.raises(BnrnnError, match="nobody2000/table1 is unknown"):
        needed("nobody2000/table1")


def test_everything_that_a_figure_needs_exists():
    for paper in papers():
        for name in paper.needs:
            recipes, analyses = needed(f"{paper.key}/{name}")
            assert all(sweep(recipe) for recipe in recipes) and all((ROOT / a).exists() for a in analyses)


def test_an_analysis_keeps_what_it_measured_on_models_that_are_gone(tmp_path, monkeypatch):
    fig3b, key = analysis_of("cooijmans2016/fig3b").module(), "cooijmans2016/fig3b"
    state = {"models": ["lstm", "bn_lstm"], "seeds": ["1"], "updates": 1582, "bpc": 1.5, "commit": "aaaaaaa"}

    def trained(key, evidence):
        result = SimpleNamespace(updates=state["updates"], data="text")
        both = itertools.product(state["seeds"], state["models"])
        return [SimpleNamespace(seed=s, budget="paper", result=result, overrides={"model": m}) for s, m in both]

    def curves(run, data_dir, lengths, most, device):
        return {f"bn_lstm, {kind}": [state["bpc"] + more] * len(lengths) for kind, more in POPULATION_IS_BETTER.items()}

    monkeypatch.setattr(fig3b, "trained_runs", trained)
    monkeypatch.setattr(fig3b, "curves", curves)
    monkeypatch.setattr(analyses, "provenance", lambda device: {"commit": state["commit"]})

    def measured(**changes):
        state.update(changes)
        result = fig3b.measure("data", tmp_path, [100, 200], None)
        write_record(tmp_path / f"{key}.json", result)
        return result

    first = measured()
    assert list(first["bpc"]["bn_lstm, batch"]) == ["1"] and "commits" not in first
    second = measured(seeds=["0"], bpc=1.7, commit="bbbbbbb")
    assert second["bpc"]["bn_lstm, population"] == {"0": [1.7, 1.7], "1": [1.5, 1.5]}
    assert second["commits"] == ["aaaaaaa", "bbbbbbb"]
    assert measured(seeds=["1"], bpc=1.4)["bpc"]["bn_lstm, population"] == {"0": [1.7, 1.7], "1": [1.4, 1.4]}

    def judged(updates=1582):
        test = {"scope": "shorter", "rule": "property", "analysis": "fig3b", "updates": updates,
                "property": "population_beats_batch"}  # fmt: skip
        return judge(claim_test(test), Evidence(tmp_path))

    assert judged().outcome.effects == (1.0, 1.0) and judged().commits == ("aaaaaaa", "bbbbbbb")
    with pytest.raises(BnrnnError, match="has no finished run of bn_lstm with its model"):
        measured(models=["lstm"])
    longer = measured(models=["lstm", "bn_lstm"], updates=3164, bpc=1.3)
    assert list(longer["bpc"]["bn_lstm, batch"]) == ["1"]  # models of another length are not mixed, and not forgotten
    assert [other["updates"] for other in longer["others"]] == [1582]
    assert judged().outcome.effects == (1.0, 1.0)
    assert judged(3164).outcome.effects == (1.0,)
    assert judged(10).outcome is None
    again = measured(updates=1582, seeds=["2"])
    assert sorted(again["bpc"]["bn_lstm, batch"]) == ["0", "1", "2"]
    assert [other["updates"] for other in again["others"]] == [3164]
    (tmp_path / f"{key}.json").write_text("{")
    with pytest.raises(BnrnnError, match=r"fig3b.json .*delete it and run the analysis again"):
        measured()
