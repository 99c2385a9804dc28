"""Tables of curves: ours and the paper's within windows of updates, and the time until a curve reaches a level."""

from functools import partial
from itertools import pairwise
from statistics import mean

from bnrnn.report.claim_types import Curve, Table
from bnrnn.report.markdown import NONE, markdown, spread
from bnrnn.report.outcome import NOT_RUN
from bnrnn.report.run import Run, longest, marked, with_footnote

WINDOWS = """Means over all points of the paper's curve, and over all our evaluations, within windows of updates (above
the first bound, up to the second); ours are mean ± standard deviation over runs.
"""
REACH = """Updates and seconds until the first evaluation that reaches the level or a better one: mean ± standard
deviation over the runs that reached it, and their number n of all runs. Runs are evaluated every {every} updates, so
updates and seconds are rounded up to the next evaluation. Seconds are wall-clock time of training updates, without
evaluations. The machines also had other work, so compare seconds only within a row, and only roughly. Levels that no
run of an engine has reached are left out.
"""


def render_windows(table: Table, curve: Curve, runs: list[Run]) -> str:
    """The means of the paper's points and of our evaluations, in every window of updates that a run has passed."""
    rows, fresh = [], longest(run for run in runs if not run.stale)
    for row, cols in curve.points.items():
        for col, points in cols.items():
            cell = [run for run in fresh if table.has_cell(run.overrides, row, col)]
            for low, high in pairwise(curve.windows):
                published = [value for update, value in points.items() if low < update <= high]
                passed = [run for run in cell if max(run.series(curve.metric), default=0) >= high]
                ours = [value for run in passed if (value := run.mean_within(curve.metric, low, high)) is not None]
                if published and ours:
                    in_file = [run for run in passed if run.file_order_until > low]
                    shown = marked(spread(ours, 3), in_file, curve.metric)
                    window = f"{low:,} to {high:,}"
                    theirs = f"{mean(published):.3f} (points: {len(published)})"
                    difference = f"{mean(ours) - mean(published):+.3f}"
                    rows.append([f"`{row}`", f"`{col}`", window, theirs, shown, difference])
    if not rows:
        return "No run has passed one of the windows of updates in which curves are compared.\n"
    text = markdown([table.row_title, table.cols, "updates", "paper", "ours", "difference"], rows)
    return with_footnote(f"{WINDOWS}\n{text}")


def render_reach(table: Table, curve: Curve, runs: list[Run]) -> str:
    """Updates and seconds to each level, with one column per model and one row per engine: engines differ in speed."""
    metric, models, runs, rows = curve.metric, table.row_names, [run for run in runs if not run.stale], []
    for col, levels in curve.reach.items():
        wanted = {f"{level}": partial(Run.reached, metric=metric, level=level) for level in levels}
        if curve.steady is not None:
            wanted[f"its own best + {curve.steady:.0%}"] = partial(Run.steady, metric=metric, share=curve.steady)
        for engine in sorted({run.engine for run in runs}):
            kept = longest(run for run in runs if run.engine == engine)
            cells = [[run for run in kept if table.has_cell(run.overrides, model, col)] for model in models]
            for name, first in wanted.items():
                times = [[time for run in cell if (time := first(run))] for cell in cells]
                found = [
                    marked(_spread_reached([time[k] for time in of_cell], cell), cell, metric)
                    for k in (0, 1)
                    for of_cell, cell in zip(times, cells, strict=True)
                ]
                rows += [[f"`{col}`", engine, name, *found]] if any(times) else []
    if not rows:
        return "No run has reached one of these levels.\n"
    lengths = [run.result.config["budget"]["eval_every"] or next(iter(run.series(metric)), 0) for run in runs]
    every = " or ".join(f"{n:,}" for n in sorted(set(lengths)) if n)
    header = [table.cols, "engine", metric]
    header += [f"`{model}`, {what}" for what in (f"updates in steps of {every}", "seconds") for model in models]
    return with_footnote(f"{REACH.format(every=every)}\n{markdown(header, rows)}")


def _spread_reached(values: list[float], cell: list[Run]) -> str:
    if not cell:
        return NOT_RUN
    return spread(values, 0, len(cell)) if values else f"{NONE} (n=0 of {len(cell)})"
