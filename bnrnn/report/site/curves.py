"""The data of interactive plots: lines and the paper's points, as a script that a page loads.

A page that is opened from a folder cannot read a JSON file, so the data are assigned to a variable in a script.
`docs/site/static/curves.js` plots them.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bnrnn.metrics import axis_title
from bnrnn.report.claim_types import Table
from bnrnn.report.evidence import in_figures
from bnrnn.report.run import Run, longest, name_of
from bnrnn.report.style import EXPLODED, LOOKS, looks_of, named
from bnrnn.system.files import write_text

UPDATES, SECONDS, EPOCHS = "updates", "seconds of training updates", "epochs"
AXES = (UPDATES, SECONDS, EPOCHS)


@dataclass
class Line:
    """One line of a plot.

    Args:
        row: the name in the legend, such as a model. Lines of a row have one color and one mean.
        member: the name among the lines of its row, such as a seed.
        x: the values of each horizontal axis.
        page: the address of the run's page, relative to the root of the site.
        diverged: whether the line ends because the run diverged.
    """

    row: str
    x: dict[str, list[Any]]
    y: list[float | None]
    panel: str = ""
    member: str = ""
    metric: str = ""
    name: str = ""
    page: str = ""
    diverged: bool = False


@dataclass
class Plot:
    """A plot. Its `metrics` are the titles of the vertical axis by metric; `axes` are the horizontal axes.

    Args:
        points: the paper's points.
        members: what the members are, such as "seed".
        log_y: whether the vertical axis is logarithmic at first.
        colors: the colors of rows that do not have the page's own.
    """

    axes: list[str]
    metrics: dict[str, str]
    lines: list[Line]
    points: list[Line] = field(default_factory=list)
    members: str = "seed"
    log_y: bool = False
    colors: dict[str, str] = field(default_factory=dict)


def write(plot: Plot, path: Path) -> None:
    """Write the script that defines the data of a page's plot. Values that are not finite become null."""
    text = json.dumps(asdict(plot), separators=(",", ":"), allow_nan=False)
    write_text(path, f"window.bnrnnPlot = {text};\n")


def shortened(value: float | None) -> float | None:
    """The value with six significant digits; None if it is not finite."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def updates_per_epoch(run: Run) -> float | None:
    """The number of updates of an epoch; None if it was not recorded and the budget is in updates."""
    if run.result.updates_per_epoch is not None:
        return float(run.result.updates_per_epoch)
    epochs = run.result.config["budget"].get("epochs")
    return run.result.updates / float(epochs) if epochs and run.result.status == "finished" else None


def line_of(run: Run, metric: str, series: dict[int, float], page: str, row: str, panel: str = "") -> Line:
    """A run's curve of one metric against updates, seconds and, where an epoch's length is known, epochs."""
    seconds, per_epoch = run.series("seconds"), updates_per_epoch(run)
    x: dict[str, list[float]] = {UPDATES: list(series)}
    if all(update in seconds for update in series):
        x[SECONDS] = [seconds[update] for update in series]
    if per_epoch:
        x[EPOCHS] = [round(update / per_epoch, 3) for update in series]
    y = [shortened(value) for value in series.values()]
    diverged = run.result.status == "diverged"
    return Line(row, x, y, panel, run.seed, metric, title(run), page, diverged)


def title(run: Run) -> str:
    """The name of a run in text: what distinguishes it from the other runs of its experiment."""
    return name_of(run.overrides.items()) or "the only run"


def recorded(runs: list[Run]) -> list[str]:
    """The metrics that the runs recorded, validation first."""
    names = dict.fromkeys(k for run in runs for record in run.records for k in record if "/" in k)
    return sorted(names, key=lambda name: name.startswith("train/"))


def of_experiment(table: Table, runs: list[Run], pages: dict[Path, str]) -> Plot | None:
    """The plot of a table or figure: its runs and the points of the paper; None if it has neither.

    As in the figures, each run counts with its longest budget, and training metrics are averaged between evaluations.

    Args:
        pages: the page of each finished run by its folder.
    """
    shown = longest(in_figures(table.key, runs))
    first = [curve.metric for curve in table.curves]
    metrics = list(dict.fromkeys([*first, *recorded(shown)]))
    lines, points = [], []
    for run in shown:
        row, col = run.overrides.get(table.rows, ""), run.overrides.get(table.cols, "")
        for metric in metrics:
            if (series := run.series(metric)) or run.result.status == "diverged":
                place: dict[str, Any] = {"row": named(table.rows, row), "panel": named(table.cols, col)}
                lines.append(line_of(run, metric, series, pages.get(run.folder, ""), **place))
    for curve in table.curves:
        for row, cols in curve.points.items():
            for col, values in cols.items():
                x, y = {UPDATES: list(values)}, list(values.values())
                points.append(Line(named(table.rows, row), x, y, named(table.cols, col), metric=curve.metric))
    has = {line.metric for line in [*lines, *points]}
    if not has:
        return None
    axes = [axis for axis in AXES if axis == UPDATES or any(axis in line.x for line in lines)]
    titles = {metric: axis_title(metric) for metric in metrics if metric in has}
    log_y = any(y is not None and y > EXPLODED for line in lines if line.metric.endswith("/loss") for y in line.y)
    lines, points = (_in_order(part, table) for part in (lines, points))
    return Plot(axes, titles, lines, points, log_y=log_y, colors=_colors(table))


def _colors(table: Table) -> dict[str, str]:
    """The colors of rows that are numbers, which are those of the figure; other rows have them anyway."""
    looks = looks_of(table.row_names)
    if looks is LOOKS:
        return {}
    return {named(table.rows, row): look.color for row, look in zip(table.row_names, looks, strict=True)}


def _in_order(lines: list[Line], table: Table) -> list[Line]:
    """The lines in the order of the rows in the grid, so that a row has the same color in every plot of the page."""
    order = [named(table.rows, value) for value in table.row_names]
    return sorted(lines, key=lambda line: order.index(line.row) if line.row in order else len(order))


def of_run(run: Run) -> Plot:
    """The plot of all values that a run recorded."""
    lines = []
    for metric in recorded([run]):
        series = {int(r["update"]): r[metric] for r in run.records if metric in r}
        lines.append(line_of(run, metric, series, "", row=metric))
    axes = [axis for axis in AXES if any(axis in line.x for line in lines)] or [UPDATES]
    return Plot(axes, {metric: axis_title(metric) for metric in recorded([run])}, lines)
