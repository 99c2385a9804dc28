"""Tables of runs: the results of the finished ones, the scores of their captions, and how far the others are."""

from statistics import mean

from bnrnn.metrics import METRICS, READ, SCORES, in_words
from bnrnn.report.markdown import NONE, markdown, spread
from bnrnn.report.run import Run, group, marked, name_of, with_footnote

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
                name_of([*cell, *members[0].drawn.items()]),
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
        for how, suffix in (("greedy", ""), ("beam of 3", "_beam3")):
            values = [[m[key] for m in finished if (key := f"test/{name}{suffix}") in m] for name in SCORES]
            rows.append([name_of(cell), budget, how, *(spread(of_score, 3) for of_score in values)])
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


def render_unfinished(runs: list[Run]) -> str:
    """A table of unfinished runs: how far they are, their last validation, and their time."""
    rows = []
    for run in runs:
        metric = next((m for m in READ if run.series(f"valid/{m}")), None)
        last = NONE
        if metric is not None:
            update, value = list(run.series(f"valid/{metric}").items())[-1]
            shown = METRICS[metric]
            last = f"{shown.title} {shown.scale * value:.{shown.digits}f} at update {update:,}"
        state = "stale" if run.stale else ""
        name, updates = name_of(run.overrides.items()), f"{run.result.updates:,}"
        rows.append([name, updates, last, f"{run.seconds_per_update:.3f}", run.engine, state])
    about = "Their curves are in the comparisons and figures above. Tables of results and claims do not use them.\n"
    return f"{about}\n{markdown(['run', 'updates', 'last validation, batch', 's / update', 'engine', ''], rows)}"
