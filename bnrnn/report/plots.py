"""Figures. Our results are lines; points of a paper are open circles."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from bnrnn.config import label, sweep
from bnrnn.files import atomic_write
from bnrnn.metrics import axis_title
from bnrnn.report.claims import load_claim
from bnrnn.report.runs import Run, load_runs, longest

EXPLODED = 100.0  # a loss above so many nats does not determine the range of an axis
COLORS = ["#4c6a92", "#d1603d", "#5b8c5a", "#8d6a9f", "#c9a227", "#3aa6b9", "#7a5c3e"]
AXES = {None: "updates", 1.0: "seconds of training updates, evaluation excluded",
        60.0: "minutes of training updates, evaluation excluded",
        3600.0: "hours of training updates, evaluation excluded"}  # fmt: skip


def time_unit(runs: list[Run]) -> float:
    """The largest unit of time, in seconds, of which the longest run takes at least two."""
    last = max(run.result.seconds for run in runs)
    return next((unit for unit in (3600.0, 60.0) if last >= 2 * unit), 1.0)


def draw_runs(ax: Axes, runs: list[Run], metric: str, color: str, name: str, unit: float | None) -> float:
    """Plot thin lines for the seeds and a thick line for their mean, at updates where all have a point.

    Args:
        unit: the unit of the time axis in seconds; None plots against updates.

    Returns the largest x.
    """
    curves = []
    for run in runs:
        seconds = run.series("seconds") if unit else {}
        curves.append({u: (seconds[u] / unit if unit else float(u), y) for u, y in run.series(metric).items()})
    curves = [curve for curve in curves if curve]
    if not curves:
        if runs:  # all runs diverged before their first evaluation
            ax.plot([], [], "x", color=color, label=name)
        return 0.0
    for curve in curves if len(curves) > 1 else []:
        ax.plot(*zip(*curve.values(), strict=True), color=color, alpha=0.35, linewidth=0.8)
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = [[mean(curve[u][k] for curve in curves) for u in shared] for k in (0, 1)]
    ax.plot(*means, color=color, linewidth=2.0, label=name)
    return max(x for curve in curves for x, _ in curve.values())


def draw_panel(
    ax: Axes, runs: list[Run], rows: dict[str, str], at: Callable[[Run, str], bool], metric: str,
    points: dict[str, dict[int, float]], unit: float | None = None,
) -> None:  # fmt: skip
    """Plot one curve per row of the table, with the paper's points up to the length of our runs.

    Args:
        rows: the label of each row.
        at: decides whether a run belongs to a row.
        points: the paper's points by row and update.
        unit: as in `draw_runs`.
    """
    lasts = []
    for color, row in zip(COLORS, rows, strict=False):
        mine = [run for run in runs if at(run, row)]
        lost = sum(run.result.status == "diverged" for run in mine)
        counted = f"n={len(mine)}, {lost} diverged" if lost else f"n={len(mine)}"
        name = f"{rows[row]}{', ours' if points else ''} ({counted})"
        lasts.append(draw_runs(ax, mine, metric, color, name, unit))
    last = max(lasts, default=0)
    for color, row in zip(COLORS, rows, strict=False):
        shown = {u: y for u, y in points.get(row, {}).items() if u <= 1.02 * last or not last}
        ax.plot(list(shown), list(shown.values()), "o", color=color, markerfacecolor="none", markersize=7,
                markeredgewidth=1.5, label=f"{rows[row]}, paper" if shown else None)  # fmt: skip
    if last:
        ax.set_xlim(0, 1.03 * last)
    ax.set_xlabel(AXES[unit])
    ax.set_ylabel(axis_title(metric))
    if metric.endswith("loss") and ax.get_ylim()[1] > EXPLODED:
        # Curves that diverge leave the plot, so that the other curves remain readable.
        drawn = [np.asarray(line.get_ydata()) for line in ax.get_lines()]
        ax.set_ylim(0, 1.5 * min(float(y[0]) for y in drawn if len(y)))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, fontsize=8)


def draw_curve(key: str, curve: dict[str, Any], results_dir: Path, path: Path) -> None:
    """The figure of a claim: one panel per dataset and, if the claim has `reach`, our runs against time below it."""
    claim, runs = load_claim(key), [run for run in load_runs(key, results_dir) if not run.stale and run.in_grid(key)]
    rows = {row: label(claim["rows"], row) for row in sweep(key)[claim["rows"]]}
    cols = [c for c in sweep(key)[claim["cols"]] if any(r.overrides.get(claim["cols"]) == c for r in runs)]
    height, width = 2 if "reach" in curve else 1, max(1, len(cols))
    fig, axes = plt.subplots(height, width, figsize=(6 * width, 4.2 * height), squeeze=False, sharey="col")

    def at(run: Run, row: str) -> bool:
        return run.overrides.get(claim["rows"]) == row

    for column, col in zip(axes.T, cols, strict=False):
        mine = [run for run in runs if run.overrides.get(claim["cols"]) == col]
        points = {row: of_row[col] for row, of_row in curve.get("points", {}).items() if col in of_row}
        draw_panel(column[0], longest(mine), rows, at, curve["metric"], points)
        named = label(claim["cols"], col)
        column[0].set_title(named if named != col else f"{claim['cols']} {col}", fontsize=10)
        for ax in column[1:]:
            engine, timed = commonest_engine(mine, claim["rows"])
            draw_panel(ax, timed, rows, at, curve["metric"], {}, time_unit(timed))
            ax.set_title(f"our runs, engine {engine}", fontsize=10)
    save(fig, path)


def commonest_engine(runs: list[Run], key: str) -> tuple[str, list[Run]]:
    """The engine that ran the most models (then the most runs), and its runs. Engines differ in speed."""
    by_engine = {e: longest(run for run in runs if run.engine == e) for e in sorted({run.engine for run in runs})}
    return max(by_engine.items(), key=lambda item: (len({run.overrides.get(key) for run in item[1]}), len(item[1])))


def draw_sweep(key: str, results_dir: Path, path: Path) -> None:
    """Validation accuracy and training loss of an experiment without a paper."""
    runs = longest(load_runs(key, results_dir))
    rows = {row: label("model", row) for row in sweep(key)["model"]}
    fig, axes = plt.subplots(1, 2, figsize=(12, 4.2))
    for ax, metric in zip(axes, ("valid/accuracy", "train/loss"), strict=True):
        draw_panel(ax, runs, rows, lambda r, row: r.overrides.get("model") == row, metric, {})
    save(fig, path)


def draw_search(key: str, search: dict[str, Any], results_dir: Path, path: Path) -> None:
    """Plot the trials of a random search as dots, the paper's best as a circle, and diverged trials along the top."""
    claim, runs = load_claim(key), [run for run in load_runs(key, results_dir) if not run.stale]
    fig, ax = plt.subplots(figsize=(8, 4.5))
    for color, (row, best) in zip(COLORS, search["published"].items(), strict=False):
        trials = [run for run in runs if run.overrides.get(claim["rows"]) == row]
        title = label(claim["rows"], row)
        done = [run for run in trials if run.result.status == "finished"]
        name = f"{title}, ours (n={len(done)})"
        values = [run.measured(search["metric"]) for run in done]
        ax.plot([run.drawn[search["x"]] for run in done], values, ".", color=color, markersize=8, label=name)
        lost = [run.drawn[search["x"]] for run in trials if run.result.status == "diverged"]
        if lost:
            ax.plot(lost, [0.97] * len(lost), "x", color=color, label=f"{title}, diverged",
                    transform=ax.get_xaxis_transform())  # fmt: skip
        ax.plot(best[search["x"]], best[search["metric"]], "o", color=color, markerfacecolor="none", markersize=9,
                label=f"{title}, the paper's best")  # fmt: skip
    ax.set(xscale="log", xlabel=search["x"], ylabel=axis_title(search["metric"]))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, fontsize=8)
    save(fig, path)


def draw_gallery(images: list[dict[str, Any]], pixels: list[Any], path: Path) -> None:
    """Small images with the captions of the models and, if there is a `reference`, the caption of a person."""
    fig, panels = plt.subplots(len(images), 2, figsize=(9, 1.5 * len(images)), width_ratios=[1, 4], squeeze=False)
    for (ax, text), image, own_pixels in zip(panels, images, pixels, strict=True):
        ax.imshow(own_pixels)
        lines = [f"{label('setting', setting)}: {caption}" for setting, caption in image["captions"].items()]
        if "reference" in image:
            lines.append(f"a person: {image['reference']}")
        text.text(0, 0.5, "\n".join(lines), va="center", fontsize=9)
        ax.axis("off")
        text.axis("off")
    save(fig, path)


def save(fig: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.tight_layout()
    with atomic_write(path) as file:
        fig.savefig(file, format=path.suffix[1:], dpi=120, metadata={"Software": None})
    plt.close(fig)
