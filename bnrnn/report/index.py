"""Renders results/README.md: the tables of all papers that have results."""

from collections.abc import Collection

from bnrnn.report.claim_types import PaperEntry, Table
from bnrnn.report.claims import papers
from bnrnn.report.evidence import Evidence
from bnrnn.report.tables import sections

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


def render_index(measured: Collection[str], evidence: Evidence) -> str:
    """The page results/README.md.

    Args:
        measured: the keys `<paper>/<table>` of tables and figures with results. The others share one line per paper.
    """
    parts = ["# Results", INTRODUCTION]
    for paper in papers():
        parts.append(f"## {paper.title}\n\n{NOTES.format(paper=paper.key)}\n")
        texts = [(e, _render_tables(e, evidence)) for e in paper.entries.values() if e.key in measured]
        parts += [f"### {_link(entry)}\n\n{text}" for entry, text in texts if text]
        if without := [f"- {_link(entry)}\n" for entry, text in texts if not text]:
            parts.append(f"### Analyses, and runs without a published number\n\n{''.join(without)}")
        if missing := [f"`{name}`" for name, entry in paper.entries.items() if entry.key not in measured]:
            parts.append(f"Tables and figures without any run: {', '.join(missing)}.\n")
    benchmarks = sorted(path.stem for path in (evidence.folder / "bench").glob("*.json"))
    if benchmarks:
        parts.append("## Benchmarks\n\n" + "".join(f"- [{name}](bench/{name}.md)\n" for name in benchmarks))
    return "\n".join(parts)


def _link(entry: PaperEntry) -> str:
    return f"[{entry.title}]({entry.key}.md)"


def _render_tables(entry: PaperEntry, evidence: Evidence) -> str:
    """The comparisons of a table or figure with its paper; "" if it has none."""
    if not isinstance(entry, Table):
        return ""
    parts = []
    texts = sections(entry, evidence.shown(entry.key), evidence.unfinished(entry.key), collapse=True)
    for title, text in texts.items():
        short = title.removeprefix(entry.title).lstrip(",: ")
        parts.append(f"**{short[0].upper()}{short[1:]}**\n\n{text}")
    return "\n".join(parts)
