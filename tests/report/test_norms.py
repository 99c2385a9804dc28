"""The comparison of norms with and without zoneout: which runs count, its numbers in words, and the steps it times."""

import pytest
import torch

from bnrnn.report.claims import analysis_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.summary import has_gamma
from bnrnn.training.build import build
from bnrnn.training.results import FILE, config_record
from tests.helpers import composed
from tests.report.test_runs import change, put

norms = analysis_of("beyond/norms").module()
PMNIST = norms.TASKS[0]
ROWS = [f"{model}{ending}" for model, ending in norms.ROWS]


def result(**scores: list[float | None]) -> dict:
    """A result in which every row has an accuracy of a half in three seeds, except these rows on permuted MNIST."""
    even = {row: {str(seed): 0.5 for seed in range(3)} for row in ROWS}
    mine = {row: {str(seed): score for seed, score in enumerate(values)} for row, values in scores.items()}
    cost = {task.recipe: {row: 1.0 + number for number, row in enumerate(ROWS)} for task in norms.TIMED}
    return {"scores": {task.data: even for task in norms.TASKS} | {"pmnist": even | mine}, "milliseconds": cost}


def line(text: str, *cells: str) -> list[str]:
    """The cells of the only row of a table that begins with these."""
    (found,) = (row for row in text.splitlines() if row.startswith("| " + " | ".join(cells) + " |"))
    return found.strip("| ").split(" | ")


def test_only_whole_runs_of_a_cell_count_and_a_diverged_one_is_kept(tmp_path):
    key, cell = "beyond/norms_pixels_zoneout", {"data": "pmnist", "model": "bn_lstm"}
    for seed, accuracy in (("0", 0.5), ("1", 0.6)):
        put(tmp_path, key, {**cell, "seed": seed}, {"test/accuracy": accuracy})
    put(tmp_path, key, {**cell, "model": "lstm", "seed": "0"}, {"test/accuracy": 0.1})
    put(tmp_path, key, {**cell, "data": "smnist", "seed": "0"}, {"test/accuracy": 0.2})
    put(tmp_path, key, {**cell, "seed": "2", "budget.updates": "10"}, {"test/accuracy": 0.3})
    put(tmp_path, "beyond/norms_pixels", {**cell, "seed": "0"}, {"test/accuracy": 0.4})
    change(tmp_path / key / "paper/data=pmnist,model=bn_lstm,seed=1" / FILE, {"status": "diverged"})
    assert norms.scores(PMNIST, "bn_lstm", "_zoneout", Evidence(tmp_path)) == {"0": 0.5, "1": None}
    assert norms.scores(PMNIST, "bn_lstm", "", Evidence(tmp_path)) == {"0": 0.4}


def test_the_table_has_the_scores_and_the_cost_of_every_row():
    text = norms.table(result(bn_lstm=[0.7, 0.8, None], ln_lstm_zoneout=[]))
    assert line(text, "`batch`", "no")[2:4] == ["75.0 ± 7.1 (n=2), 1 diverged", "50.0 ± 0.0 (n=3)"]
    assert line(text, "`layer`", "yes")[2] == "–"
    assert [line(text, f"`{norms.NORMS[m]}`", norms.ZONEOUT[z])[-1] for m, z in norms.ROWS] == [
        f"{factor}.00" for factor in range(1, 9)
    ]
    assert "permuted MNIST (authors' 501 pixels), accuracy in % ↑" in text and "perplexity per word ↓" in text


def test_the_best_row_has_three_seeds_none_of_which_diverged():
    text = norms.best(result(bn_lstm=[0.9, 0.9, None], ln_lstm_zoneout=[0.6, 0.7, 0.8]))
    assert line(text, norms.TASKS[0].title)[1:] == ["`layer`, with zoneout", "20.0 [-4.8, 44.8] points"]
    assert line(text, norms.TASKS[-1].title)[1:] == ["`none`", "–"]
    missing = norms.best(result(bn_lstm=[0.9, 0.9]))
    assert line(missing, norms.TASKS[0].title)[1:] == ["–", "7 of 8 rows have 3 seeds"]


def test_of_perplexities_the_lowest_is_best():
    words = norms.TASKS[-1]
    found = result()
    found["scores"][words.data] = {row: {"0": 200.0, "1": 201.0, "2": 202.0} for row in ROWS}
    found["scores"][words.data]["input_bn_lstm"] = {"0": 190.0, "1": 191.0, "2": 192.0}
    assert line(norms.best(found), words.title)[1:] == ["`input_batch`", "10.0 [10.0, 10.0]"]


def test_the_page_and_the_figure_have_every_row(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(norms, "save", lambda figure, path: figures.append(figure))
    found = result(bn_lstm=[0.7, None], ln_lstm=[])
    assert norms.render(found).count("\n| `") == len(ROWS)
    norms.draw(found, tmp_path / "norms.png")
    (figure,) = figures
    assert len(figure.axes) == len(norms.TASKS) + 1
    assert len(figure.axes[0].get_yticklabels()) == len(ROWS)
    marks = {(x, y) for line in figure.axes[0].lines for x, y in zip(*line.get_data(), strict=True)}
    assert (70.0, ROWS.index("bn_lstm")) in marks and not any(y == ROWS.index("ln_lstm") for _, y in marks)


@pytest.mark.parametrize("model", norms.NORMS)
def test_a_timed_step_computes_the_gradients_of_a_batch(monkeypatch, model):
    cfg = composed("experiment=beyond/norms_pixels_zoneout", f"model={model}", "data=digits", "batch_size=4")
    kept = []
    monkeypatch.setattr(norms, "build", lambda cfg: kept.append(build(cfg)) or kept[0])
    step = norms.training_step(cfg)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        step()
        found.append([parameter.grad.clone() for parameter in kept[0][-1].parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), "no sums over steps"
    assert all(gradient.isfinite().all() for gradient in found[0]) and found[0][-1].abs().sum() > 0
    assert kept[0][-1].layer.layers[0].zoneout == (0.15, 0.15)


def test_layer_norm_is_no_batch_norm_in_a_configuration():
    model = {name: config_record(composed(f"model={name}"))["model"] for name in norms.NORMS}
    assert {name: has_gamma(config) for name, config in model.items()} == {
        "lstm": False, "input_bn_lstm": True, "bn_lstm": True, "ln_lstm": False,
    }  # fmt: skip
