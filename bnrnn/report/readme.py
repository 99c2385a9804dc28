"""What README.md shows of the results: the runs of full length on permuted MNIST as a figure, and three sentences."""

from itertools import pairwise
from statistics import mean

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from bnrnn.report.bench_page import render_ratio
from bnrnn.report.claims import table_of, tables
from bnrnn.report.evidence import BUDGET, Evidence
from bnrnn.report.markdown import markdown
from bnrnn.report.outcome import NOT_RUN
from bnrnn.report.run import Run
from bnrnn.report.style import LOOKS, named, save
from bnrnn.report.tables import published_rows
from bnrnn.system.files import read_record

KEY, DATA, METRIC = "cooijmans2016/table1", "pmnist", "valid/accuracy"
FIGURE = "cooijmans2016/fig2_pmnist.png"
FLOOR = 0.55  # the lower end of the axis: the curves of the first updates leave the figure


def render_facts(evidence: Evidence) -> str:
    """A list of three items: the curve, the published numbers, the speed."""
    speed = render_ratio(read_record(evidence.folder / "bench/cpu-quick.json", "make bench QUICK=1"))
    return f"- {curve_in_words(of_full_length(evidence))}\n- {published_in_words(evidence)}\n- {speed}\n"


def of_full_length(evidence: Evidence) -> list[Run]:
    """Finished and unfinished runs on permuted MNIST with the paper's number of updates, LSTM first."""
    runs = [run for run in evidence.runs(KEY) if run.budget == BUDGET] + evidence.unfinished(KEY)
    of_data = [run for run in runs if run.overrides["data"] == DATA and not run.stale]
    return sorted(of_data, key=lambda run: table_of(KEY).row_names.index(run.overrides["model"]))


def curve_in_words(runs: list[Run]) -> str:
    """The mean validation accuracy of our runs and the paper's in the last window of updates, for each model.

    It is the last window that a run of this model has passed, and the mean is over all runs that have passed it.
    Windows in which a run was evaluated in another order of images than the paper's do not count for it.
    """
    curve, parts = table_of(KEY).curves[0], []
    for model in dict.fromkeys(run.overrides["model"] for run in runs):
        passed = {
            (low, high): [run for run in runs if run.overrides["model"] == model and _has_passed(run, low, high)]
            for low, high in pairwise(curve.windows)
        }
        if any(passed.values()):
            low, high = max(window for window, found in passed.items() if found)
            values = (run.mean_within(METRIC, low, high) for run in passed[low, high])
            ours = [value for value in values if value is not None]
            paper = mean(y for update, y in curve.points[model][DATA].items() if low < update <= high)
            parts.append(
                f"our {named('model', model)} has {100 * mean(ours):.1f} % in {len(ours)} run{'s' * (len(ours) > 1)} "
                f"(the paper: {100 * paper:.1f} %) from update {low:,} to {high:,}"
            )
    return f"Mean validation accuracy on permuted MNIST: {'; '.join(parts)}."


def _has_passed(run: Run, low: int, high: int) -> bool:
    return run.file_order_until <= low and high <= max(run.series(METRIC), default=0)


def render_table1(evidence: Evidence) -> str:
    """The cells of Table 1 of Cooijmans et al. with a published number: the paper's test accuracy, and ours."""
    table, rows = table_of(KEY), []
    for row, col, *numbers in published_rows(table, table.published[0], evidence.runs(KEY)):
        if col.strip("`") in ("smnist", DATA):  # the other columns are our variants of the second one
            rows.append([f"{named('model', row.strip('`'))}, {named('data', col.strip('`'))}", *numbers])
    return markdown(["Table 1, test accuracy in %", "the paper", "ours", "difference", "verdict"], rows)


def published_in_words(evidence: Evidence) -> str:
    """How many published numbers have runs of the paper's length, and how many of these are reproduced."""
    parts = [(table, part) for table in tables() for part in table.published]
    rows = [row for table, part in parts for row in published_rows(table, part, evidence.runs(table.key))]
    verdicts = [row[-1] for row in rows if row[-1] != NOT_RUN]
    counted = sum("reproduced" in verdict for verdict in verdicts)
    are = "are" if counted > 1 else "is"
    reproduced = f"{counted or 'none'} of them {are} reproduced{'' if counted else ' yet'}"
    return (
        f"Of {len(rows)} published numbers, {len(verdicts)} have runs of the paper's length, or long enough that "
        f"validation has passed its minimum; {reproduced}. The others are missing because their runs take hundreds of "
        "core hours."
    )


def draw(evidence: Evidence) -> None:
    """Plot every run with its number of updates, and the paper's curves to their end."""
    table = table_of(KEY)
    planned, points, is_pale = table.paper_updates, table.curves[0].points, False
    assert planned is not None
    fig, ax = plt.subplots(figsize=(9, 4.6))
    for look, model in zip(LOOKS, points, strict=False):
        name = named("model", model)
        for run in (run for run in of_full_length(evidence) if run.overrides["model"] == model):
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
    save(fig, evidence.folder / FIGURE)
