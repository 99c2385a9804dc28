"""Figures of runs. Our results are lines, crosses where runs diverged; points of a paper are open circles."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from bnrnn.config import label, sweep
from bnrnn.metrics import axis_title
from bnrnn.report.claim_types import Curve, Search, Table
from bnrnn.report.evidence import Evidence, in_figures
from bnrnn.report.outcome import student_interval
from bnrnn.report.run import Run, depends_on_order, longest
from bnrnn.report.style import ACROSS, EXPLODED, LOOKS, PANEL, Look, legend_below, looks_of, named, save

WIDE = 10.0  # losses or perplexities that differ by more than this factor have a logarithmic axis
FEW = 15  # curves with at most so many points have markers
MANY = 25  # the paper's points are circles up to this number, and a dotted line beyond it
WIDTH = 105  # characters of a line of a caption
HEIGHT = 44  # characters of a vertical line: the title of an axis
SPAN = 0.2  # the least range of an axis of accuracies or errors: a smaller one would exaggerate differences
AXES = {None: "updates", 1.0: "seconds of training updates, evaluation excluded",
        60.0: "minutes of training updates, evaluation excluded",
        3600.0: "hours of training updates, evaluation excluded"}  # fmt: skip


def time_unit(runs: list[Run]) -> float:
    """The largest unit of time, in seconds, of which the longest run takes at least two."""
    last = max(run.result.seconds for run in runs)
    return next((unit for unit in (3600.0, 60.0) if last >= 2 * unit), 1.0)


def draw_runs(
    ax: Axes, runs: list[Run], metric: str, look: Look, name: str, unit: float | None, most: float | None = None
) -> float:
    """Plot thin lines for the seeds and a thick line for their mean, at updates where all have a point. The line of a
    seed that was trained longer than all others is stronger after their end.

    From three seeds on, the 95 % interval of the mean (Student's t) is shaded. Runs that diverged end with a cross at
    their last finite point, or have one at the top of the panel if they have no point.

    Args:
        unit: the unit of the time axis in seconds; None plots against updates.
        most: the largest x to show. A curve ends with its first point beyond it.

    Returns the largest x.
    """
    curves = []
    for run in runs:
        seconds = run.series("seconds") if unit else {}
        curve = {u: (seconds[u] / unit if unit else float(u), y) for u, y in run.series(metric).items()}
        beyond = [x for x, _ in curve.values() if most is not None and x > most]
        curve = {u: point for u, point in curve.items() if not beyond or point[0] <= beyond[0]}
        curves += [curve] if curve else []
        if run.result.status == "diverged":
            end = (run.result.seconds / unit if unit else run.result.updates, 0.97)
            ax.plot(*(list(curve.values())[-1] if curve else end), "X", color=look.color, markersize=9,
                    markeredgecolor="white", clip_on=False, zorder=3,
                    transform=ax.transData if curve else ax.get_xaxis_transform())  # fmt: skip
    if not curves:
        if any(run.result.status == "diverged" for run in runs):  # before their first evaluation
            ax.plot([], [], "X", color=look.color, label=name)
        return 0.0
    if len(curves) > 1:
        for curve in curves:
            ax.plot(*zip(*curve.values(), strict=True), color=look.color, alpha=0.35, linewidth=0.8)
        *_, second, first = sorted(curves, key=max)
        alone = {update: point for update, point in first.items() if update >= max(second)}
        until = max(run.file_order_until for run in runs if max(run.series(metric), default=0) >= max(first))
        for part, alpha in _parts(alone, until if depends_on_order(metric) else 0):
            ax.plot(*zip(*part, strict=True), color=look.color, alpha=alpha, linewidth=1.2)
    until = max(run.file_order_until for run in runs) if depends_on_order(metric) else 0.0
    _draw_mean(ax, curves, until, look, name)
    return max(x for curve in curves for x, _ in curve.values())


def _draw_mean(ax: Axes, curves: list[dict[int, Any]], until: float, look: Look, name: str) -> None:
    """Plot the mean of curves, pale up to the update until which they were evaluated in the order of the file."""
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    x, y = ([mean(curve[u][k] for curve in curves) for u in shared] for k in (0, 1))
    marker, early = look.marker if len(x) <= FEW else None, sum(update < until for update in shared)
    wide: dict[str, Any] = {"color": look.color, "linestyle": look.line, "marker": marker, "markersize": 5}
    if early:
        ax.plot(x[: early + 1], y[: early + 1], **wide, linewidth=1.6, alpha=0.5, label=f"{name}*")
    if early < len(shared):
        ax.plot(x[early:], y[early:], **wide, linewidth=2.0, label=name)
    if len(curves) >= 3:
        low, high = zip(*(student_interval([curve[u][1] for curve in curves]) for u in shared), strict=True)
        lines = ax.dataLim.frozen()
        ax.fill_between(x, low, high, color=look.color, alpha=0.15, linewidth=0)
        ax.dataLim.set(lines)  # a wide interval does not determine the range of the axis


def _parts(curve: dict[int, Any], until: float) -> list[tuple[list[Any], float]]:
    """The points of a curve up to this update and from it on, with their opacities; the parts meet in one point."""
    points = list(curve.values())
    early = sum(update < until for update in curve)
    return [(part, alpha) for part, alpha in ((points[: early + 1], 0.45), (points[early:], 0.9)) if len(part) > 1]


def draw_panel(
    ax: Axes, runs: list[Run], rows: dict[str, str], at: Callable[[Run, str], bool], metric: str,
    points: dict[str, dict[int, float]], unit: float | None = None, chance: float | None = None,
    most: float | None = None,
) -> None:  # fmt: skip
    """Plot one curve per row of the table, with the paper's points up to the length of our runs.

    Args:
        rows: the label of each row.
        at: decides whether a run belongs to a row.
        points: the paper's points by row and update.
        unit: as in `draw_runs`.
        chance: the value of guessing, drawn as a line if it lies within the panel.
        most: the largest x to show.
    """
    lasts, looks = [], looks_of(rows)
    for look, row in zip(looks, rows, strict=False):
        mine = [run for run in runs if at(run, row)]
        lost = sum(run.result.status == "diverged" for run in mine)
        counted = f"n={len(mine)}, {lost} diverged" if lost else f"n={len(mine)}"
        name = f"{rows[row]}{', ours' if points else ''} ({counted})"
        lasts.append(draw_runs(ax, mine, metric, look, name, unit, most))
    last = min(max(lasts, default=0), most or math.inf)
    for look, row in zip(looks, rows, strict=False):
        shown = {u: y for u, y in points.get(row, {}).items() if u <= 1.02 * last or not last}
        paper: dict[str, Any] = {"color": look.color, "label": f"{rows[row]}, paper" if shown else None}
        if len(points.get(row, {})) > MANY:
            ax.plot(list(shown), list(shown.values()), linestyle=(0, (1, 1)), linewidth=1.2, alpha=0.9, **paper)
        else:
            ax.plot(list(shown), list(shown.values()), "o", markerfacecolor="none", markersize=8, markeredgewidth=1.5,
                    **paper)  # fmt: skip
    if last:
        ax.set_xlim(0, 1.03 * last)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    pale = depends_on_order(metric) and any(run.in_file_order for run in runs)
    ax.set_xlabel(AXES[unit] + ("\n(*, pale: evaluated in the order of the file)" if pale else ""))
    title = axis_title(metric)
    ax.set_ylabel(title if len(title) <= HEIGHT else title.replace(" (", "\n("))
    _choose_range(ax, metric)
    if chance is not None and ax.get_ylim()[0] <= chance <= ax.get_ylim()[1]:
        ax.axhline(chance, color="grey", linestyle=":", linewidth=1.2, label="guessing")
    legend_below(ax)


def _choose_range(ax: Axes, metric: str) -> None:
    """A range of the vertical axis that neither hides curves nor exaggerates differences."""
    low, high = ax.get_ylim()
    lines = [np.asarray(line.get_ydata()) for line in ax.get_lines() if line.get_transform() == ax.transData]
    drawn = [float(y) for line in lines for y in line]
    if metric.endswith(("loss", "ppl")) and drawn and max(drawn) > WIDE * min(drawn) > 0:
        # Curves that diverge leave the plot, so that the other curves remain readable.
        ax.set_yscale("log")
        ax.set_ylim(0.9 * min(drawn), 1.1 * min(max(drawn), EXPLODED * min(drawn)))
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    elif metric.endswith(("accuracy", "error")) and high - low < SPAN:
        low = min(max(0.0, (low + high - SPAN) / 2), 1.0 - SPAN)
        ax.set_ylim(low, low + SPAN)


def draw_curve(table: Table, curve: Curve, evidence: Evidence, path: Path) -> None:
    """The figure of a claim: one panel per dataset and, if the claim has `reach`, our runs against time below it.

    Unfinished runs are shown against updates only: they were often trained on several machines.
    """
    finished = in_figures(table.key, evidence.shown(table.key))
    runs = [*finished, *in_figures(table.key, evidence.unfinished(table.key))]
    rows = {row: named(table.rows, row) for row in table.row_names}
    cols = [col for col in table.col_names if any(run.overrides.get(table.cols) == col for run in runs)]
    below = bool(curve.reach)
    width = min(ACROSS, max(1, len(cols)))
    height = math.ceil(max(1, len(cols)) / width) * (1 + below)
    entries = len(rows) + len(curve.points)  # of the legend, two beside each other
    high = PANEL[1] + 0.2 * max(0, math.ceil(entries / 2) - 3)
    fig, axes = plt.subplots(height, width, figsize=(PANEL[0] * width, high * height), squeeze=False)

    def at(run: Run, row: str) -> bool:
        return run.overrides.get(table.rows) == row

    for k, col in enumerate(cols):
        ax = axes[k // width * (1 + below), k % width]
        mine = [run for run in runs if run.overrides.get(table.cols) == col]
        points = {row: of_row[col] for row, of_row in curve.points.items() if col in of_row}
        ends = sorted(max((r.result.updates for r in mine if at(r, row)), default=0) for row in rows)
        most = float(ends[-2]) if table.borrows and len(ends) > 1 and ends[-2] else None  # borrowed: much longer
        draw_panel(ax, longest(mine), rows, at, curve.metric, points, chance=curve.chance.get(col), most=most)
        ax.set_title(named(table.cols, col))
        of_col = [run for run in finished if run.overrides.get(table.cols) == col]
        if below and of_col:
            under = axes[k // width * 2 + 1, k % width]
            engine, timed = commonest_engine(of_col, table.rows)
            draw_panel(under, timed, rows, at, curve.metric, {}, time_unit(timed))
            under.set_title(f"our runs, engine {engine}")
            under.set_ylim(ax.get_ylim())
    for ax in axes.flat:
        if not ax.get_title():
            ax.remove()
    save(fig, path)


def commonest_engine(runs: list[Run], key: str) -> tuple[str, list[Run]]:
    """The engine that ran the most models (then the most runs), and its runs. Engines differ in speed."""
    by_engine = {e: longest(run for run in runs if run.engine == e) for e in sorted({run.engine for run in runs})}
    return max(by_engine.items(), key=lambda item: (len({run.overrides.get(key) for run in item[1]}), len(item[1])))


def draw_sweep(key: str, evidence: Evidence, path: Path) -> None:
    """Validation accuracy and training loss of an experiment without a paper."""
    runs = longest(evidence.runs(key))
    rows = {row: label("model", row) for row in sweep(key)["model"]}
    fig, axes = plt.subplots(1, 2, figsize=(2 * PANEL[0], PANEL[1]))
    for ax, metric in zip(axes, ("valid/accuracy", "train/loss"), strict=True):
        draw_panel(ax, runs, rows, lambda r, row: r.overrides.get("model") == row, metric, {})
    save(fig, path)


def draw_search(table: Table, search: Search, evidence: Evidence, path: Path) -> None:
    """Plot the trials of a random search as dots, the paper's best as a circle, and diverged trials along the top."""
    runs = [run for run in evidence.runs(table.key) if not run.stale]
    fig, ax = plt.subplots(figsize=(8, 4.5))
    for look, (row, best) in zip(LOOKS, search.published.items(), strict=False):
        trials = [run for run in runs if run.overrides.get(table.rows) == row]
        title = label(table.rows, row)
        done = [run for run in trials if run.result.status == "finished"]
        name = f"{title}, ours (n={len(done)})"
        values = [run.lowest(search.metric) for run in done]
        drawn = [run.drawn[search.x] for run in done]
        ax.plot(drawn, values, look.marker, color=look.color, markersize=5, label=name)
        lost = [run.drawn[search.x] for run in trials if run.result.status == "diverged"]
        if lost:
            ax.plot(lost, [0.97] * len(lost), "X", color=look.color, label=f"{title}, diverged",
                    transform=ax.get_xaxis_transform())  # fmt: skip
        ax.plot(best[search.x], best[search.metric], look.marker, color=look.color, markerfacecolor="none",
                markersize=11, label=f"{title}, the paper's best")  # fmt: skip
    ax.set(xscale="log", xlabel=search.x, ylabel=axis_title(search.metric))
    legend_below(ax)
    save(fig, path)


def gallery(images: list[dict[str, Any]], pixels: list[Any]) -> Figure:
    """Small images with their captions, by model, and, if there is a `reference`, the caption of a person.

    Args:
        pixels: the images (height, width, 3); [] if only their captions are known.
    """
    fig, panels = plt.subplots(len(images), 2, figsize=(9, 1.5 * len(images)), width_ratios=[1, 4], squeeze=False)
    for (ax, text), image, own_pixels in zip(panels, images, pixels or [None] * len(images), strict=True):
        if own_pixels is not None:
            ax.imshow(own_pixels)
        lines = [f"{label('setting', model)}: {caption}" for model, caption in image["captions"].items()]
        if "reference" in image:
            lines.append(f"a person: {image['reference']}")
        wrapped = "\n".join(fill(line, WIDTH) for line in lines)
        text.text(0, 0.5, wrapped, va="center", fontsize=9).set_in_layout(False)  # long captions would move the images
        ax.axis("off")
        text.axis("off")
    return fig
