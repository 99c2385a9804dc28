"""Renders the comparison of norms by examples/choosing.py: the tables of docs/choosing.md, and its figure."""

from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from bnrnn.config import ROOT
from bnrnn.report.markdown import NONE, markdown
from bnrnn.report.style import LOOKS, save

FILE = ROOT / "results/choosing/choosing.json"
FIGURE = ROOT / "results/choosing/choosing.png"
COMMAND = "python examples/choosing.py --out results/choosing/choosing.json"
TASKS = {
    "phones": "phones, accuracy ↑",
    "characters": "characters, bits per character ↓",
    "words": "words without an error, share ↑",
}
PLAIN = "as described"
SPAN = 0.2  # the least range of an axis: a smaller one would exaggerate differences


class Column(NamedTuple):
    """A column of a table: the score of all norms in one task, by the way it was trained and evaluated."""

    title: str
    task: str
    case: str = PLAIN
    statistics: str = "exact"


TABLES = {
    "choosing": [Column(title, task) for task, title in TASKS.items()],
    "choosing/statistics": [Column(f"{task}, {kind}", task, statistics=kind)
                            for task in TASKS for kind in ("running", "exact")],
    "choosing/small": [Column(f"{task}, {size}", task, case) for task in ("phones", "characters")
                       for size, case in (("batches of 32", PLAIN), ("of 4", "batches of 4"))],
    "choosing/padding": [Column("similar lengths", "phones"), Column("mixed lengths", "phones", "mixed lengths")],
    "choosing/windows": [
        Column("carried", "characters"),
        Column("carried, beyond `t_max`", "characters", statistics="beyond t_max"),
        Column("not carried", "characters", "state not carried"),
    ],
}  # fmt: skip


def norms(result: dict[str, Any]) -> list[str]:
    """The norms, in the order of the runs."""
    return list(dict.fromkeys(run["norm"] for run in result["runs"]))


def has_statistics(norm: str) -> bool:
    """Whether the norm keeps statistics of the batch, which evaluation needs."""
    return "batch" in norm


def scores(result: dict[str, Any], column: Column, norm: str) -> list[float]:
    """The scores of all seeds. A norm without statistics of the batch has one score, which stands in every column."""
    of = {"task": column.task, "case": column.case, "norm": norm}
    runs = [run for run in result["runs"] if of.items() <= run.items()]
    return [run[column.statistics if has_statistics(norm) else "none"] for run in runs]


def cell(values: list[float]) -> str:
    """Mean ± standard deviation."""
    if not values:
        return NONE
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def render(result: dict[str, Any], name: str) -> str:
    """A table of `TABLES`; under the first one stands how it was measured."""
    columns = TABLES[name]
    rows = [[f"`{norm}`", *(cell(scores(result, column, norm)) for column in columns)] for norm in norms(result)]
    table = markdown(["norm", *(column.title for column in columns)], rows)
    return f"{table}\n{about(result)}" if name == "choosing" else table


def about(result: dict[str, Any]) -> str:
    """How the runs were made."""
    of, seeds = result["settings"], len({run["seed"] for run in result["runs"]})
    minutes = sum(run["seconds"] for run in result["runs"]) / 60
    days = sorted({run["date"] for run in result["runs"]})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"Mean ± standard deviation over {seeds} seeds, exact statistics, on validation data. One layer of "
        f"{of['units']} units, Adam at {of['lr']}, {of['updates']:,} updates of {of['batch_size']} sequences, gradient "
        f"clipping at {of['clip']:g}: the same for all norms, chosen before norms were compared. "
        f"Training all {len(result['runs'])} runs "
        f"of this page took {minutes:.0f} minutes of one core; torch {result['versions']['torch']}, {when}.\n"
    )


def draw(result: dict[str, Any], path: Path = FIGURE) -> None:
    """Plot one panel per task: every seed is a small mark, the mean a large one."""
    fig, axes = plt.subplots(1, len(TASKS), figsize=(11, 3.5), sharey=True)
    names = norms(result)
    for ax, (task, title) in zip(axes, TASKS.items(), strict=True):
        for kind, look, shift in (("exact", LOOKS[0], -0.13), ("running", LOOKS[1], 0.13)):
            for place, norm in enumerate(names):
                values = scores(result, Column(title, task, statistics=kind), norm)
                if kind == "running" and not has_statistics(norm):
                    continue
                at = place + (shift if has_statistics(norm) else 0)
                color = look.color if has_statistics(norm) else "black"
                ax.plot(values, [at] * len(values), look.marker, color=color, markersize=4, alpha=0.4)
                ax.plot(mean(values), at, look.marker, color=color, markersize=9)
        ax.set(xlabel=title.replace(" ↑", "\n(more is better)").replace(" ↓", "\n(less is better)"))
        low, high = ax.get_xlim()
        if high - low < SPAN:
            ax.set_xlim((low + high - SPAN) / 2, (low + high + SPAN) / 2)
        ax.set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    for kind, look in (("exact statistics", LOOKS[0]), ("running statistics", LOOKS[1])):
        axes[-1].plot([], [], look.marker, color=look.color, label=kind)
    axes[-1].plot([], [], LOOKS[0].marker, color="black", label="no statistics of the batch")
    fig.legend(loc="outside lower center", ncols=3)
    save(fig, path)
