"""Renders result pages: our numbers beside the published ones, short runs beside the paper's curve, and summaries."""

from functools import partial
from itertools import pairwise, product
from statistics import mean

from bnrnn.report.claim_types import Curve, Published, Quantity, Search, Table
from bnrnn.report.claims import table_of
from bnrnn.report.evidence import Evidence, in_figures
from bnrnn.report.markdown import NONE, markdown, spread
from bnrnn.report.outcome import CONTRADICTED, HOLDS, LEAST_PAIRS, NOT_RUN, within
from bnrnn.report.run import Run, group, longest, marked, with_footnote
from bnrnn.report.run_tables import render_scores, render_summary, render_unfinished
from bnrnn.training.results import MODELS

WINDOWS = """Means over all points of the paper's curve, and over all our evaluations, within windows of updates (above
the first bound, up to the second); ours are mean ± standard deviation over runs.
"""
REACH = """Updates and seconds until the first evaluation that reaches the level or a better one: mean ± standard
deviation over the runs that reached it, and their number n of all runs. Runs are evaluated every {every} updates, so
updates and seconds are rounded up to the next evaluation. Seconds are wall-clock time of training updates, without
evaluations. The machines also had other work, so compare seconds only within a row, and only roughly. Levels that no
run of an engine has reached are left out.
"""


def render(key: str, evidence: Evidence) -> str:
    """The page of a table or figure: its sections, its figures, and all its runs."""
    table, runs, unfinished, shown = table_of(key), evidence.runs(key), evidence.unfinished(key), evidence.shown(key)
    notes = f"experiments/{table.paper}/notes.md"
    parts = [f"# {table.title}\n", f"Recipe: `conf/experiment/{key}.yaml`. Deviations: `{notes}`.\n"]
    parts += [f"## {title}\n\n{text}" for title, text in sections(table, shown, unfinished).items()]
    if table.cited:
        parts.append(f"## {table.title}: quoted from the paper, not ours\n\n{render_cited(table)}")
    parts += [f"## {curve.title}: time to each level\n\n{render_reach(table, curve, shown)}"
              for curve in table.curves if curve.reach]  # fmt: skip
    figures: list[Curve | Search] = [*drawn(table, [*shown, *unfinished]), *([table.search] if table.search else [])]
    parts += [f"![{figure.title}]({figure.figure}.png)\n" for figure in figures]
    if any("test/bleu4" in run.result.metrics for run in runs):
        parts.append(f"## Scores of captions\n\n{render_scores(runs)}")
    if (evidence.folder / key / MODELS).exists():
        parts.append(
            f"[Trained models]({table.name}/{MODELS}/README.md) of finished runs can be loaded in three lines.\n"
        )
    if unfinished:
        parts.append(f"## Unfinished runs\n\n{render_unfinished(unfinished)}")
    parts.append(f"## All finished runs\n\n{render_summary(runs)}")
    return "\n".join(parts)


def drawn(table: Table, runs: list[Run]) -> list[Curve]:
    """The curves of an entry for which there are runs: a figure without any would be empty."""
    shown = in_figures(table.key, runs)
    measured = {name for run in shown for record in run.records for name in record}
    return [curve for curve in table.curves if shown and (not curve.like or curve.metric in measured)]


def sections(table: Table, runs: list[Run], unfinished: list[Run], collapse: bool = False) -> dict[str, str]:
    """The title and the table of each comparison with the paper; `collapse` as in `render_published`.

    Args:
        runs: the finished runs.
        unfinished: runs that are shown only in comparisons at equal updates.
    """
    texts = {}
    for part in table.published:
        title = f"{table.title}, {part.what}: published and ours at the paper's length"
        text = render_published(table, part, runs, collapse)
        texts[title] = f"{text}\n{part.note}\n" if part.note else text
    for curve in drawn(table, [*runs, *unfinished]) or table.curves:
        if curve.points:
            title = curve.title + ": the paper's curve and ours at equal updates"
            texts[title] = render_windows(table, curve, [*runs, *unfinished])
    if table.measured:
        texts[f"{table.title}: ours, with no paper's number to compare"] = render_measured(table, runs)
    if table.search:
        texts[f"{table.title}: the best settings, the paper's and ours"] = render_search(table, table.search, runs)
    return texts


def render_search(table: Table, search: Search, runs: list[Run]) -> str:
    """For each model, the best setting that the paper found, and ours with the number of trials."""
    rows = []
    for model, published in search.published.items():
        trials = [run for run in runs if run.overrides.get(table.rows) == model and not run.stale]
        finished = [run for run in trials if run.result.status == "finished"]
        rows.append([f"`{model}`", "paper", *(f"{value:g}" for value in published.values())])
        if finished:
            best = min(finished, key=lambda run: run.lowest(search.metric))
            found = [f"{best.drawn[k]:g}" for k in published if k in best.drawn]
            counted = f"{len(trials)} trials, {len(trials) - len(finished)} diverged"
            ours = f"ours, {best.result.updates:,} updates ({counted})"
            rows.append(["", ours, *found, f"{best.lowest(search.metric):.3f}"])
    return markdown([table.row_title, "", *next(iter(search.published.values()))], rows)


def render_published(table: Table, part: Published, runs: list[Run], collapse: bool = False) -> str:
    """Published and our numbers, difference and verdict of every cell. Only whole runs count (`Run.is_whole`).

    Our number is the `measured` one of the selected model or, with `best: min`, the lowest recorded value.

    Args:
        collapse: whether one line below the table replaces the rows without runs.
    """
    rows = published_rows(table, part, runs)
    without = [f"{row} on {col} ({published})" for row, col, published, *_, verdict in rows if verdict == NOT_RUN]
    if not collapse and rows and len(without) == len(rows):
        text = markdown([table.row_title, table.cols, "published"], [row[:3] for row in rows])
        return f"{text}\nNot run yet at the paper's length.\n"
    shown = [row for row in rows if not (collapse and row[-1] == NOT_RUN)]
    text = markdown([table.row_title, table.cols, "published", "ours", "difference", "verdict"], shown)
    missing = f"Not run (published): {', '.join(without)}.\n"
    return "\n".join([text] * bool(shown) + [missing] * bool(collapse and without))


def published_rows(table: Table, part: Published, runs: list[Run]) -> list[list[str]]:
    """[row, column, published, ours, difference, verdict] of every cell with a published number."""
    rows, whole = [], longest(run for run in runs if run.is_whole(table.enough_updates))
    for col in table.col_names:
        for row, published in part.cells.items():
            if col in published:
                cell = [run for run in whole if table.has_cell(run.overrides, row, col)]
                ours, difference, verdict = _verdict(cell, part, published[col], table.num_seeds)
                if least := min((run.result.updates for run in cell if not run.is_whole()), default=0):
                    verdict += f", {least:,} of {table.paper_updates:,} updates"
                rows.append([f"`{row}`", f"`{col}`", f"{published[col]}", ours, difference, verdict])
    return rows


def render_cited(table: Table) -> str:
    """Numbers that the paper prints and that none of our recipes produces, such as those of models of other papers."""
    rows = [[c.model, f"`{col}`", c.what, f"{value:,}"] for c in table.cited for col, value in c.values.items()]
    return markdown([table.row_title, table.cols, "quantity", "quoted"], rows)


def render_measured(table: Table, runs: list[Run]) -> str:
    """The results of every cell, with a row for each budget of its runs, for quantities without a published number."""
    rows = []
    for row, col in product(table.row_names, table.col_names):
        of_cell = [run for run in runs if table.has_cell(run.overrides, row, col) and not run.stale]
        for cell in group(of_cell).values():
            finished = [run for run in cell if run.result.status == "finished"]
            shown = ["diverged"] * len(table.measured)
            if finished:
                shown = [_spread_of(finished, part, table.num_seeds) for part in table.measured]
            rows.append([f"`{row}`", f"`{col}`", f"{max(run.result.updates for run in cell):,}", *shown])
    if not rows:
        return "No run has finished yet.\n"
    return with_footnote(
        markdown([table.row_title, table.cols, "updates", *(part.what for part in table.measured)], rows)
    )


def _spread_of(finished: list[Run], part: Quantity, planned: int) -> str:
    text = spread([number_of(run, part) for run in finished], part.digits, planned)
    return marked(text, finished, part.metric if part.best else "")


def number_of(run: Run, part: Quantity) -> float:
    """The number of a run in a table: with `best`, the largest or smallest recorded value, else the `measured` one."""
    extreme = {"max": run.peak, "min": run.lowest, None: run.measured}[part.best]
    return part.scale * extreme(part.metric)


def _verdict(cell: list[Run], part: Published, published: float, planned: int) -> list[str]:
    """[ours, difference, verdict] of the runs of one cell."""
    if not cell:
        return [NONE, NONE, NOT_RUN]
    if any(run.stale for run in cell):
        return [NONE, NONE, "stale: the recipe has changed since"]
    diverged = sum(run.result.status == "diverged" for run in cell)
    if diverged:
        return [NONE, NONE, f"{diverged} of {len(cell)} diverged"]
    values = [number_of(run, part) for run in cell]
    difference, digits = mean(values) - published, part.digits
    outcome = within(values, published, part.tolerance)
    if outcome.n < LEAST_PAIRS:
        verdict = f"{'within' if outcome.num_agreeing == outcome.n else 'outside'} tolerance, n={outcome.n}"
    else:
        verdict = {HOLDS: "reproduced", CONTRADICTED: "differs"}.get(outcome.verdict, "undecided")
    return [spread(values, digits, planned), f"{difference:+.{digits}f}", f"{verdict} (tolerance {part.tolerance})"]


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
        return "No run of a row that the paper shows has passed one of the windows in which curves are compared.\n"
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
