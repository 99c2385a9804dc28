"""Renders results/README.md: the tables of all papers that have results."""

from collections.abc import Collection
from itertools import groupby
from pathlib import Path

from bnrnn.report.claims import claim_keys, load_claim, load_paper
from bnrnn.report.runs import load_borrowed, load_runs
from bnrnn.report.tables import sections
from bnrnn.report.unfinished import load_unfinished

INTRODUCTION = """
A program writes every page in this folder from the stored runs. [claims.md](claims.md) judges the claims of the papers.
Each title below links to a page with the figures and with all runs behind a table.

- *Published* is the number in the paper. *Ours* is the mean ± standard deviation over n seeds.
- A published number is compared only with runs of the paper's own length. Shorter and unfinished runs are compared with
  points of the paper's curve after the same number of updates.
- A number is *reproduced* if at least three seeds agree with it within a tolerance that was fixed before training. With
  fewer seeds it is only *within* or *outside tolerance*.
- Models, data and settings have the names of their files in `conf/`.
"""
NOTES = "Deviations from the paper, and notes on the runs: [notes.md](../experiments/{paper}/notes.md)."


def render_index(measured: Collection[str], results_dir: Path) -> str:
    """The page results/README.md.

    Args:
        measured: the keys `<paper>/<table>` of tables and figures with results. The others share one line per paper.
    """
    parts = ["# Results", INTRODUCTION]
    for paper, group in groupby(claim_keys(), key=lambda key: key.split("/")[0]):
        keys = list(group)
        parts.append(f"## {load_paper(paper)}\n\n{NOTES.format(paper=paper)}\n")
        tables = {key: _render_tables(key, results_dir) for key in keys if key in measured}
        parts += [f"### {_link(key)}\n\n{text}" for key, text in tables.items() if text]
        if without := [f"- {_link(key)}\n" for key, text in tables.items() if not text]:
            parts.append(f"### Analyses, and runs without a published number\n\n{''.join(without)}")
        if missing := [f"`{key.split('/')[1]}`" for key in keys if key not in measured]:
            parts.append(f"Tables and figures without any run: {', '.join(missing)}.\n")
    benchmarks = sorted(path.stem for path in (results_dir / "bench").glob("*.json"))
    if benchmarks:
        parts.append("## Benchmarks\n\n" + "".join(f"- [{name}](bench/{name}.md)\n" for name in benchmarks))
    return "\n".join(parts)


def _link(key: str) -> str:
    return f"[{load_claim(key)['title']}]({key}.md)"


def _render_tables(key: str, results_dir: Path) -> str:
    """The comparisons of a table or figure with its paper; "" if it has none."""
    claim = load_claim(key)
    if "analysis" in claim:
        return ""
    parts = []
    runs, unfinished = (
        [*load_runs(key, results_dir), *load_borrowed(key, results_dir)],
        load_unfinished(key, results_dir),
    )
    for title, table in sections(key, claim, runs, unfinished, collapse=True).items():
        short = title.removeprefix(claim["title"]).lstrip(",: ")
        parts.append(f"**{short[0].upper()}{short[1:]}**\n\n{table}")
    return "\n".join(parts)
