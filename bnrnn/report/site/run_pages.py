"""The page of a run: outcome, curves, configuration, environment and pieces, as values for a template."""

from html import escape
from typing import Any

import yaml

from bnrnn.metrics import metric_of
from bnrnn.report.claim_types import Table
from bnrnn.report.claims import tables
from bnrnn.report.evidence import Evidence
from bnrnn.report.run import Run, order_in_words
from bnrnn.report.site.curves import title
from bnrnn.report.site.parts import filtered_table, hours, page_of, raw_html


def all_runs(evidence: Evidence) -> list[tuple[Table, Run]]:
    """All runs of all tables and figures, with their tables."""
    return [(table, run) for table in tables() for run in evidence.runs(table.key)]


def context(table: Table, run: Run, evidence: Evidence) -> dict[str, Any]:
    """The values of a run's page for `docs/site/templates/run.html`."""
    result = run.result
    facts = {
        "state": result.status + (", stale: the recipe has changed since" if run.stale else ""),
        "updates": f"{result.updates:,}; the selected model is that of update {result.best_update:,}",
        "time of training updates": hours(result.seconds) + _cpu(run),
        "time of an update": f"{run.seconds_per_update:.4g} s",
        "engine": run.engine,
        "parameters": f"{result.num_parameters:,}",
        "data": result.data or "not recorded",
        "order of evaluations": order_in_words(run),
        "finished on": result.date or "not recorded",
    }
    arguments = [f"experiment={table.key}", f"budget={run.budget}", *(f"{k}={v}" for k, v in run.overrides.items())]
    return {
        "title": f"{title(run)}, {table.title}",
        "heading": title(run),
        "table": table.title,
        "table_page": f"results/{table.key}",
        "command": f"python -m bnrnn.train {' '.join(arguments)} out_dir=results",
        "folder": str(run.folder.relative_to(evidence.folder.parent)),
        "facts_of_run": facts,
        "metrics": [[name, _in_words(name), f"{value:.6g}"] for name, value in sorted(result.metrics.items())],
        "config": yaml.safe_dump(result.config, sort_keys=False),
        "environment": {**result.environment, "commits": ", ".join(result.commits)},
        "pieces": result.pieces,
    }


def _cpu(run: Run) -> str:
    return f" ({hours(run.result.cpu_seconds)} of CPU time)" if run.result.cpu_seconds is not None else ""


def _in_words(name: str) -> str:
    metric = metric_of(name)
    return metric.title if metric else ""


def render_all(evidence: Evidence) -> str:
    """The page that lists all runs, as a table that can be filtered."""
    rows = []
    for table, run in all_runs(evidence):
        data = {"paper": table.paper, "table": table.key, "state": run.result.status}
        cells = [
            f'<a href="../{page_of(run, evidence)}.html">{escape(title(run))}</a>',
            f'<a href="{table.key}.html">{escape(table.key)}</a>',
            run.budget,
            run.result.status + (", stale" if run.stale else ""),
        ]
        cells = "".join(f"<td>{cell}</td>" for cell in cells)
        numbers = f'<td data-sort="{run.result.updates}">{run.result.updates:,}</td>'
        numbers += f'<td data-sort="{run.result.seconds}">{hours(run.result.seconds)}</td>'
        rows.append((data, cells + numbers))
    header = ["run", "table or figure", "budget", "state", "updates", "time"]
    text = raw_html(filtered_table("runs", header, rows, ["table", "state"]))
    about = "Every finished run, with its configuration, curves, environment and pieces."
    return f"# All runs\n\n{about}\n\n{text}"
