"""Learning curves: ours as lines, the paper's points as open circles."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor

from bnrnn.evidence import Run, load_claim, load_runs, longest, sweep

COLORS = ["#4c6a92", "#d1603d", "#5b8c5a", "#8d6a9f", "#c9a227"]
LABELS = {"lstm": "LSTM", "bn_lstm": "BN-LSTM", "input_bn_lstm": "input-BN LSTM", "rnn": "RNN", "bn_rnn": "BN-RNN",
          "smnist": "sequential MNIST", "pmnist": "permuted MNIST (authors' 501 pixels)",
          "pmnist_permutation": "permuted MNIST (true permutation)", "digits": "8x8 digits, pixel by pixel",
          "valid/accuracy": "validation accuracy (batch statistics)", "train/loss": "training cross-entropy (nats)",
          "valid/loss": "validation cross-entropy (nats)"}  # fmt: skip


def label(name: str) -> str:
    return LABELS.get(name, name)


def draw_runs(ax: Axes, runs: list[Run], metric: str, color: str, name: str) -> int:
    """Thin lines for the seeds, a thick one for their mean where all have a point; returns the last update."""
    series = [run.series(metric) for run in runs if run.records]
    if not series:
        return 0
    shared = sorted(set.intersection(*(set(s) for s in series)))
    for s in series if len(series) > 1 else []:
        ax.plot(list(s), list(s.values()), color=color, alpha=0.35, linewidth=0.8)
    ax.plot(shared, [mean(s[u] for s in series) for u in shared], color=color, linewidth=2.0, label=name)
    return max(max(s) for s in series)


def draw_panel(
    ax: Axes, runs: list[Run], rows: list[str], at: Callable[[Run, str], bool], metric: str,
    points: dict[str, dict[int, float]],
) -> None:  # fmt: skip
    """One line a row, with the paper's points as far as our runs go."""
    lasts = []
    for color, row in zip(COLORS, rows, strict=False):
        mine = [run for run in runs if at(run, row)]
        lasts.append(draw_runs(ax, mine, metric, color, f"{label(row)}{', ours' if points else ''} (n={len(mine)})"))
    last = max(lasts, default=0)
    for color, row in zip(COLORS, rows, strict=False):
        shown = {u: y for u, y in points.get(row, {}).items() if u <= 1.02 * last or not last}
        ax.plot(list(shown), list(shown.values()), "o", color=color, markerfacecolor="none", markersize=7,
                markeredgewidth=1.5, label=f"{label(row)}, paper" if shown else None)  # fmt: skip
    if last:
        ax.set_xlim(0, 1.03 * last)
    ax.set_xlabel("updates")
    ax.set_ylabel(label(metric))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, fontsize=8)


def draw_curve(key: str, curve: dict[str, Any], results_dir: Path, path: Path) -> None:
    """The figure of a claim: one panel a dataset."""
    claim, runs = load_claim(key), longest(run for run in load_runs(key, results_dir) if not run.stale)
    rows = sweep(key)[claim["rows"]]
    cols = [c for c in sweep(key)[claim["cols"]] if any(r.overrides[claim["cols"]] == c for r in runs)]
    fig, axes = plt.subplots(1, max(1, len(cols)), figsize=(6 * max(1, len(cols)), 4.2), squeeze=False)
    for ax, col in zip(axes[0], cols, strict=False):
        at = [run for run in runs if run.overrides[claim["cols"]] == col]
        points = {row: of_row[col] for row, of_row in curve["points"].items() if col in of_row}
        draw_panel(ax, at, rows, lambda r, row: r.overrides[claim["rows"]] == row, curve["metric"], points)
        ax.set_title(label(col), fontsize=10)
    save(fig, path)


def draw_sweep(key: str, results_dir: Path, path: Path) -> None:
    """Validation accuracy and training loss of an experiment that no paper has."""
    runs = longest(load_runs(key, results_dir))
    fig, axes = plt.subplots(1, 2, figsize=(12, 4.2))
    for ax, metric in zip(axes, ("valid/accuracy", "train/loss"), strict=True):
        draw_panel(ax, runs, sweep(key)["model"], lambda r, row: r.overrides["model"] == row, metric, {})
    save(fig, path)


def draw_gradient_norms(log10: dict[str, Tensor], claim: dict[str, Any], path: Path) -> None:
    """Fig. 1a: log10 of the gradient norm (draws, T), a line a gamma for the median, the paper's points as circles."""
    fig, ax = plt.subplots(figsize=(9, 5))
    colors = plt.get_cmap("viridis")
    for k, (gamma, values) in enumerate(log10.items()):
        color = colors(k / len(log10))
        ax.plot(values.median(0).values, color=color, label=f"gamma {gamma}")
        paper = claim["log10"][gamma]
        ax.plot(claim["steps"][: len(paper)], paper, "o", color=color, markerfacecolor="none", markersize=5)
    ax.set(xlabel="time step t", ylabel="log10 of |dloss / dh_t|", xlim=(0, 800), ylim=(-27, 1))
    ax.set_title(
        "Gradients through a batch-normalized tanh RNN: median of our draws (lines), the paper's one draw (circles)",
        fontsize=10,
    )
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(fig, path)


def draw_tanh_derivative(result: dict[str, Any], points: dict[str, dict[float, float]], path: Path) -> None:
    """Fig. 1b: mean and quartiles of the derivative, exact values as open circles."""
    fig, ax = plt.subplots(figsize=(6, 4.5))
    ax.fill_between(result["sigma"], result["quartile_25"], result["quartile_75"], alpha=0.25, color=COLORS[0],
                    linewidth=0, label="25th to 75th percentile")  # fmt: skip
    ax.plot(result["sigma"], result["mean"], color=COLORS[0], label="mean of 1000 samples")
    for k, exact in enumerate(points.values()):
        ax.plot(list(exact), list(exact.values()), "o", color=COLORS[1], markerfacecolor="none",
                label="exact integration" if k == 0 else None)  # fmt: skip
    ax.set(xlabel="standard deviation of the input", ylabel="derivative of tanh", xlim=(0, 1.01), ylim=(0, 1.01))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, fontsize=8, loc="lower left")
    save(fig, path)


def save(fig: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.tight_layout()
    fig.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(fig)
