"""The figure of README.md: the runs of full length on permuted MNIST beside the paper's curve."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from bnrnn.report.claims import load_claim
from bnrnn.report.plots import named
from bnrnn.report.run import Run
from bnrnn.report.runs import load_runs
from bnrnn.report.style import LOOKS, save
from bnrnn.report.unfinished import BUDGET, load_unfinished

KEY, DATA, METRIC = "cooijmans2016/table1", "pmnist", "valid/accuracy"
FIGURE = "cooijmans2016/fig2_pmnist.png"
FLOOR = 0.55  # the lower end of the axis: the curves of the first updates leave the figure


def of_full_length(results_dir: Path) -> list[Run]:
    """Finished and unfinished runs on permuted MNIST with the paper's number of updates, LSTM first."""
    runs = [run for run in load_runs(KEY, results_dir) if run.budget == BUDGET] + load_unfinished(KEY, results_dir)
    return [run for run in runs if run.overrides["data"] == DATA and not run.stale]


def draw(results_dir: Path) -> None:
    """Plot every run with its number of updates, and the paper's curves to their end."""
    claim = load_claim(KEY)
    planned, points = claim["paper_updates"], claim["curves"][0]["points"]
    fig, ax = plt.subplots(figsize=(9, 4.6))
    is_pale = False
    for look, model in zip(LOOKS, points, strict=False):
        name = named("model", model)
        for run in (run for run in of_full_length(results_dir) if run.overrides["model"] == model):
            curve = run.series(METRIC)
            early = {u: y for u, y in curve.items() if u < run.file_order_until}
            is_pale = is_pale or bool(early)
            later = {u: y for u, y in curve.items() if u not in early}
            ax.plot(list(early), list(early.values()), color=look.color, alpha=0.4, linewidth=1.2)
            label = f"{name}, ours: {run.result.updates:,} of {planned:,} updates, seed {run.seed}"
            ax.plot(list(later), list(later.values()), color=look.color, linewidth=1.6, label=label)
        paper = points[model][DATA]
        ax.plot(list(paper), list(paper.values()), ":", color=look.color, linewidth=1.8, label=f"{name}, the paper")
    note = "\npale: evaluated in another order of images than the paper's, which lowers BN-LSTM" if is_pale else ""
    ax.set(xlim=(0, planned), ylim=(FLOOR, 1.0), xlabel=f"updates{note}", ylabel="validation accuracy")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, 0))
    ax.set_title("Reading MNIST digits pixel by pixel, in a permuted order")
    ax.legend(loc="lower right")
    save(fig, results_dir / FIGURE)
