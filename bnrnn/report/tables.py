"""Renders result pages: our numbers beside the published ones, short runs beside the paper's curve, and summaries."""

from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from bnrnn.config import key_label, sweep
from bnrnn.metrics import METRICS, SCORES, in_words
from bnrnn.report.claims import load_claim, rows_of
from bnrnn.report.markdown import NONE, markdown, spread
from bnrnn.report.outcome import CONTRADICTED, HOLDS, LEAST_PAIRS, within
from bnrnn.report.run import Run
from bnrnn.report.runs import group, in_figures, load_borrowed, load_runs, longest
from bnrnn.report.unfinished import load_unfinished, render_unfinished
from bnrnn.report.verdicts import NOT_RUN
from bnrnn.report.windows import in_cell, marked, render_curve, with_footnote

COLUMNS = [  # the columns of a summary: title, and metric, with {m} for the main metric of the run
    ("valid, batch", "valid/{m}"),
    ("valid, population", "valid/{m}_population_statistics"),
    ("valid, shared over time", "valid/{m}_shared_statistics"),
    ("test, population", "test/{m}"),
    ("test, shared over time", "test/{m}_shared_statistics"),
    ("test, batch", "test/{m}_batch_statistics"),
    ("test as one sequence", "test/{m}_one_sequence"),
    ("test in segments of 1,000", "test/{m}_segments_1000"),
]
STATISTICS = (
    "*Batch*: batch normalization used the statistics of each batch. *Population*: it used averages over the training "
    "set (population statistics), which are estimated after training."
)
REACH = """Updates and seconds until the first evaluation that reaches the level or a better one: mean ± standard
deviation over the runs that reached it, and their number n of all runs. Runs are evaluated every {every} updates, so
updates and seconds are rounded up to the next evaluation. Seconds are wall-clock time of training updates, without
evaluations. The machines also had other work, so compare seconds only within a row, and only roughly. Levels that no
run of an engine has reached are left out.
"""


def render(key: str, results_dir: Path) -> str:
    """The page of a table or figure: its sections, its figures, and all its runs."""
    claim, runs, unfinished = load_claim(key), load_runs(key, results_dir), load_unfinished(key, results_dir)
    shown = [*runs, *load_borrowed(key, results_dir)]
    notes = f"experiments/{key.split('/')[0]}/notes.md"
    parts = [f"# {claim['title']}\n", f"Recipe: `conf/experiment/{key}.yaml`. Deviations: `{notes}`.\n"]
    parts += [f"## {title}\n\n{table}" for title, table in sections(key, claim, shown, unfinished).items()]
    if "cited" in claim:
        parts.append(f"## {claim['title']}: quoted from the paper, not ours\n\n{render_cited(claim)}")
    for curve in claim["curves"]:
        if "reach" in curve:
            parts.append(f"## {curve['title']}: time to each level\n\n{render_reach(key, claim, curve, shown)}")
    figures = [*drawn(key, claim, [*shown, *unfinished]), *([claim["search"]] if "search" in claim else [])]
    parts += [f"![{figure['title']}]({figure['figure']}.png)\n" for figure in figures]
    if any("test/bleu4" in run.result.metrics for run in runs):
        parts.append(f"## Scores of captions\n\n{render_scores(runs)}")
    if unfinished:
        parts.append(f"## Unfinished runs\n\n{render_unfinished(unfinished)}")
    parts.append(f"## All finished runs\n\n{render_summary(runs)}")
    return "\n".join(parts)


def drawn(key: str, claim: dict[str, Any], runs: list[Run]) -> list[dict[str, Any]]:
    """The curves of an entry for which there are runs: a figure without any would be empty."""
    shown = in_figures(key, runs)
    measured = {name for run in shown for record in run.records for name in record}
    return [curve for curve in claim["curves"] if shown and ("like" not in curve or curve["metric"] in measured)]


def sections(
    key: str, claim: dict[str, Any], runs: list[Run], unfinished: list[Run], collapse: bool = False
) -> dict[str, str]:
    """The title and the table of each comparison with the paper; `collapse` as in `render_published`.

    Args:
        runs: the finished runs.
        unfinished: runs that are shown only in comparisons at equal updates.
    """
    tables = {}
    for part in claim.get("published", []):
        title = f"{claim['title']}, {part['what']}: published and ours at the paper's length"
        table = render_published(key, claim, part, runs, collapse)
        tables[title] = f"{table}\n{part['note']}\n" if "note" in part else table
    for curve in drawn(key, claim, [*runs, *unfinished]) or claim["curves"]:
        if "points" in curve:
            title = curve["title"] + ": the paper's curve and ours at equal updates"
            tables[title] = render_curve(key, claim, curve, [*runs, *unfinished])
    if "measured" in claim:
        tables[f"{claim['title']}: ours, with no paper's number to compare"] = render_measured(key, claim, runs)
    if "search" in claim:
        tables[f"{claim['title']}: the best settings, the paper's and ours"] = render_search(claim, runs)
    return tables


def render_search(claim: dict[str, Any], runs: list[Run]) -> str:
    """For each model, the best setting that the paper found, and ours with the number of trials."""
    search, rows = claim["search"], []
    for model, published in search["published"].items():
        trials = [run for run in runs if run.overrides.get(claim["rows"]) == model and not run.stale]
        finished = [run for run in trials if run.result.status == "finished"]
        rows.append([f"`{model}`", "paper", *(f"{value:g}" for value in published.values())])
        if finished:
            best = min(finished, key=lambda run: run.lowest(search["metric"]))
            found = [
                *(f"{best.drawn[k]:g}" for k in published if k in best.drawn),
                f"{best.lowest(search['metric']):.3f}",
            ]
            counted = f"{len(trials)} trials, {len(trials) - len(finished)} diverged"
            rows.append(["", f"ours, {best.result.updates:,} updates ({counted})", *found])
    return markdown([key_label(claim["rows"]), "", *next(iter(search["published"].values()))], rows)


def render_published(
    key: str, claim: dict[str, Any], part: dict[str, Any], runs: list[Run], collapse: bool = False
) -> str:
    """Published and our numbers, difference and verdict of every cell. Only runs of the paper's length count.

    Our number is the `measured` one of the selected model or, with `best: min`, the lowest recorded value.

    Args:
        collapse: whether one line below the table replaces the rows without runs.
    """
    rows = published_rows(key, claim, part, runs)
    without = [f"{row} on {col} ({published})" for row, col, published, *_, verdict in rows if verdict == NOT_RUN]
    if not collapse and rows and len(without) == len(rows):
        published = markdown([key_label(claim["rows"]), claim["cols"], "published"], [row[:3] for row in rows])
        return f"{published}\nNot run yet at the paper's length.\n"
    shown = [row for row in rows if not (collapse and row[-1] == NOT_RUN)]
    table = markdown([key_label(claim["rows"]), claim["cols"], "published", "ours", "difference", "verdict"], shown)
    missing = f"Not run (published): {', '.join(without)}.\n"
    return "\n".join([table] * bool(shown) + [missing] * bool(collapse and without))


def published_rows(key: str, claim: dict[str, Any], part: dict[str, Any], runs: list[Run]) -> list[list[str]]:
    """[row, column, published, ours, difference, verdict] of every cell with a published number."""
    planned, rows = len(sweep(key)["seed"]), []
    for col in sweep(key)[claim["cols"]]:
        for row, published in part["cells"].items():
            if col in published:
                cell = [r for r in runs if r.full_length and in_cell(key, r, claim, row, col)]
                rows.append(
                    [f"`{row}`", f"`{col}`", f"{published[col]}", *_verdict(cell, part, published[col], planned)]
                )
    return rows


def render_cited(claim: dict[str, Any]) -> str:
    """Numbers that the paper prints and that none of our recipes produces, such as those of models of other papers."""
    rows = [[c["model"], f"`{col}`", c["what"], f"{v:,}"] for c in claim["cited"] for col, v in c["values"].items()]
    return markdown([key_label(claim["rows"]), claim["cols"], "quantity", "quoted"], rows)


def render_measured(key: str, claim: dict[str, Any], runs: list[Run]) -> str:
    """The results of every cell, with a row for each budget of its runs, for quantities without a published number."""
    rows, parts, planned = [], claim["measured"], len(sweep(key)["seed"])
    for row, col in product(rows_of(key), sweep(key)[claim["cols"]]):
        of_cell = [run for run in runs if not run.stale and in_cell(key, run, claim, row, col)]
        for (_, _), cell in group(of_cell).items():
            finished = [run for run in cell if run.result.status == "finished"]
            shown = [
                marked(
                    spread([_shown(run, p) for run in finished], p["digits"], planned),
                    finished,
                    p["metric"] if "best" in p else "",
                )
                for p in parts
            ]
            updates = f"{max(run.result.updates for run in cell):,}"
            rows.append([f"`{row}`", f"`{col}`", updates, *(shown if finished else ["diverged"] * len(parts))])
    if not rows:
        return "No run has finished yet.\n"
    return with_footnote(
        markdown([key_label(claim["rows"]), claim["cols"], "updates", *(part["what"] for part in parts)], rows)
    )


def _shown(run: Run, part: dict[str, Any]) -> float:
    """The number of a run in a table: with `best`, the largest or smallest recorded value, else the `measured` one."""
    extreme = {"max": run.peak, "min": run.lowest, None: run.measured}[part.get("best")]
    return part.get("scale", 1) * extreme(part["metric"])


def _verdict(cell: list[Run], part: dict[str, Any], published: float, planned: int) -> list[str]:
    """[ours, difference, verdict] of the runs of one cell."""
    if not cell:
        return [NONE, NONE, NOT_RUN]
    if any(run.stale for run in cell):
        return [NONE, NONE, "stale: the recipe has changed since"]
    diverged = sum(run.result.status == "diverged" for run in cell)
    if diverged:
        return [NONE, NONE, f"{diverged} of {len(cell)} diverged"]
    values = [_shown(run, part) for run in cell]
    difference, digits = mean(values) - published, part["digits"]
    outcome = within(values, published, part["tolerance"])
    if outcome.n < LEAST_PAIRS:
        verdict = f"{'within' if outcome.agree == outcome.n else 'outside'} tolerance, n={outcome.n}"
    else:
        verdict = {HOLDS: "reproduced", CONTRADICTED: "differs"}.get(outcome.verdict, "undecided")
    return [spread(values, digits, planned), f"{difference:+.{digits}f}", f"{verdict} (tolerance {part['tolerance']})"]


def render_reach(key: str, claim: dict[str, Any], curve: dict[str, Any], runs: list[Run]) -> str:
    """Updates and seconds to each level, with one column per model and one row per engine: engines differ in speed."""
    metric, models, runs = curve["metric"], rows_of(key), [run for run in runs if not run.stale]
    rows = []
    for col, levels in curve["reach"].items():
        wanted = {f"{level}": partial(Run.reached, metric=metric, level=level) for level in levels}
        if "steady" in curve:
            wanted[f"its own best + {curve['steady']:.0%}"] = partial(Run.steady, metric=metric, share=curve["steady"])
        for engine in sorted({run.engine for run in runs}):
            kept = longest(run for run in runs if run.engine == engine)
            cells = [[run for run in kept if in_cell(key, run, claim, model, col)] for model in models]
            for name, first in wanted.items():
                times = [[time for run in cell if (time := first(run))] for cell in cells]
                if any(times):
                    updates, seconds = (
                        [
                            marked(_spread_reached([time[k] for time in t], cell), cell, metric)
                            for t, cell in zip(times, cells, strict=True)
                        ]
                        for k in (0, 1)
                    )
                    rows.append([f"`{col}`", engine, name, *updates, *seconds])
    if not rows:
        return "No run has reached one of these levels.\n"
    lengths = [run.result.config["budget"]["eval_every"] or next(iter(run.series(metric)), 0) for run in runs]
    every = " or ".join(f"{n:,}" for n in sorted(set(lengths)) if n)
    header = [claim["cols"], "engine", metric]
    header += [f"`{model}`, {what}" for what in (f"updates in steps of {every}", "seconds") for model in models]
    return with_footnote(f"{REACH.format(every=every)}\n{markdown(header, rows)}")


def _spread_reached(values: list[float], cell: list[Run]) -> str:
    if not cell:
        return NOT_RUN
    return spread(values, 0, len(cell)) if values else f"{NONE} (n=0 of {len(cell)})"


def render_summary(runs: list[Run]) -> str:
    """The results of all finished runs, with one row for runs that differ only in their seed."""
    if not runs:
        return "No run has finished yet.\n"
    columns = [c for c in COLUMNS if any(c[1].format(m=run.metric) in run.result.metrics for run in runs)]
    rows = []
    for (budget, cell), members in group(runs).items():
        finished = [run for run in members if run.result.status == "finished"]
        notes = [f"{len(members) - len(finished)} diverged"] if len(finished) < len(members) else []
        notes += ["stale"] if any(run.stale for run in members) else []
        rows.append(
            [
                " ".join(f"{k.split('.')[-1]}={v}" for k, v in [*cell, *members[0].drawn.items()]),
                budget,
                f"{max(run.result.updates for run in members):,}",
                *(marked(_summarize(finished, name), finished, name) for _, name in columns),
                f"{mean(run.seconds_per_update for run in members):.3f}",
                ", ".join(sorted({run.engine for run in members})),
                ", ".join(notes),
            ]
        )
    measured = {run.metric for run in runs if run.result.metrics}  # a diverged run has no metrics
    units = ", ".join(in_words(m) for m in METRICS.values() if m.name in measured) or "nothing"
    header = ["run", "budget", "updates", *(title for title, _ in columns), "s / update", "engine", ""]
    data = "".join(f"\nData: {text}.\n" for text in sorted({run.result.data for run in runs} - {""}))
    return with_footnote(f"Measured: {units}. {STATISTICS}\n{data}\n{markdown(header, rows)}")


def render_scores(runs: list[Run]) -> str:
    """The scores of captions of the test images, from greedy and from beam search."""
    rows = []
    for (budget, cell), members in group(runs).items():
        finished = [run.result.metrics for run in members if run.result.status == "finished"]
        run = " ".join(f"{k.split('.')[-1]}={v}" for k, v in cell)
        for how, suffix in (("greedy", ""), ("beam of 3", "_beam3")):
            values = [[m[key] for m in finished if (key := f"test/{name}{suffix}") in m] for name in SCORES]
            rows.append([run, budget, how, *(spread(of_score, 3) for of_score in values)])
    has_meteor = any("test/meteor" in run.result.metrics for run in runs)
    note = "" if has_meteor else "METEOR was not computed, because Java was not installed.\n\n"
    return note + markdown(["run", "budget", "captions", *(METRICS[name].title for name in SCORES)], rows)


def _summarize(finished: list[Run], name: str) -> str:
    """Mean and standard deviation of a metric; {m} in its name stands for the main metric of a run."""
    if not finished:
        return NONE
    metric = METRICS[finished[0].metric]
    named = [(run.result.metrics, name.format(m=run.metric)) for run in finished]
    return spread([metric.scale * metrics[key] for metrics, key in named if key in metrics], metric.digits)
