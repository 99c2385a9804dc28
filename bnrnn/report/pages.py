"""Every rendered file: the pages and figures of results/, and the blocks in README.md, docs/ and notes."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from bnrnn.config import ROOT
from bnrnn.report import choosing_page, emulated_page, model_card, plots, readme, running_page
from bnrnn.report.bench_page import render as render_benchmark
from bnrnn.report.bench_page import render_brief, render_file, render_padded
from bnrnn.report.claim_types import Analysis, PaperEntry, Table
from bnrnn.report.claims import analysis_of, entries, entry_of, has_entry, papers, table_of
from bnrnn.report.claims_page import claim_pages, render_short
from bnrnn.report.evidence import Evidence
from bnrnn.report.judging import judge_claims
from bnrnn.report.markdown import BLOCK, markdown
from bnrnn.report.rule_history import has_history
from bnrnn.report.run_tables import render_summary
from bnrnn.report.tables import drawn, render, sections
from bnrnn.report.verdicts import JudgedClaim
from bnrnn.system.files import read_record
from bnrnn.training.pairs import KINDS, fitting
from bnrnn.training.results import MODELS

RESULTS = ROOT / "results"
WITH_BLOCKS = ("README.md", *(f"docs/{name}.md" for name in ("choosing", "data", "engines", "layer")),
               "experiments/*/notes.md")  # fmt: skip
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


def measured_keys(evidence: Evidence) -> list[str]:
    """The keys `<paper>/<table>` that have results."""
    return [entry.key for entry in entries() if evidence.is_measured(entry)]


def page(key: str, evidence: Evidence) -> str:
    """The page of a table or figure."""
    entry = entry_of(key)
    if isinstance(entry, Analysis):
        return entry.module().render(evidence.numbers(key))
    return render(key, evidence)


def draw(key: str, evidence: Evidence) -> list[Path]:
    """Plot the figures of an experiment and return their paths."""
    path = evidence.folder / f"{key}.png"
    if not has_entry(key):
        plots.draw_sweep(key, evidence, path)
        return [path]
    entry = entry_of(key)
    if isinstance(entry, Analysis):
        entry.module().draw(evidence.numbers(key), path)
        return [path] if path.exists() else []  # some figures need images that are not part of the repository
    table, paths = table_of(key), []
    for curve in drawn(table, [*evidence.shown(key), *evidence.unfinished(key)]):
        paths.append(path.with_name(f"{curve.figure}.png"))
        plots.draw_curve(table, curve, evidence, paths[-1])
    if table.search:
        paths.append(path.with_name(f"{table.search.figure}.png"))
        plots.draw_search(table, table.search, evidence, paths[-1])
    return paths


def texts(evidence: Evidence) -> dict[Path, str]:
    """The expected content of every rendered file: those in the folder of the evidence, and those beside it."""
    measured, results, claims = measured_keys(evidence), evidence.folder, judge_claims(evidence)
    pages = {results / f"{key}.md": page(key, evidence) for key in measured}
    if has_history():  # without the history it is unknown whether rules were committed before their runs
        pages |= claim_pages(claims, evidence, measured)
    pages[results / "README.md"] = render_index(measured, evidence)
    pages |= {path.with_suffix(".md"): _benchmark(path) for path in sorted((results / "bench").glob("*.json"))}
    pages |= {path / "README.md": model_card.render(path, results) for path in sorted(results.glob(f"*/*/{MODELS}"))}
    for path in (path for pattern in WITH_BLOCKS for path in sorted(results.parent.glob(pattern))):
        pages[path] = BLOCK.sub(lambda m: f"{m[1]}{block(m[2], evidence, claims)}{m[3]}", path.read_text())
    return pages


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


def _benchmark(path: Path) -> str:
    renders = {"emulated": emulated_page.render, "executed": _executed}
    return render_file(path, renders.get(path.stem, render_benchmark))


def _executed(result: dict[str, Any]) -> str:
    return emulated_page.render_executed(result, read_record(emulated_page.FILE, "make emulate"))


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


def block(key: str, evidence: Evidence, claims: list[JudgedClaim]) -> str:
    """The content of a block: claims, norms, running statistics, the table of an analysis, a benchmark."""
    if key.startswith("running/"):
        return running_page.render(read_record(running_page.FILE, "make running"), key.partition("/")[2])
    if key.partition("/")[0] == "choosing":
        result = read_record(choosing_page.FILE, choosing_page.COMMAND)
        return choosing_page.render(result, key)
    if key == "claims":
        return render_short(claims)
    if key == "pairs":
        return render_pairs()
    if key == "facts":
        return readme.render_facts(evidence)
    if key == "table1":
        return readme.render_table1(evidence)
    if key in measured_keys(evidence):  # an analysis with a table
        analysis: Any = analysis_of(key).module()
        return analysis.table(evidence.numbers(key))
    if key == "bench/emulated":
        return render_file(evidence.folder / f"{key}.json", emulated_page.render_brief)
    if key == "bench/executed":
        return render_file(evidence.folder / f"{key}.json", emulated_page.render_executed_brief)
    if key == "bench/emulated/times":
        return render_file(evidence.folder / "bench/emulated.json", emulated_page.render_times)
    return render_file(evidence.folder / f"{key}.json", render_padded if key.endswith("padded") else render_brief)


def draw_all(evidence: Evidence) -> None:
    """Plot every figure of results/."""
    for key in measured_keys(evidence):
        draw(key, evidence)
    readme.draw(evidence)
    choosing_page.draw(read_record(choosing_page.FILE, choosing_page.COMMAND))


def render_pairs() -> str:
    """The table of the kinds of data, with the datasets and the models of each."""
    rows = ([kind, *(", ".join(f"`{name}`" for name in fitting(group, kind)) for group in ("data", "model"))]
            for kind in KINDS)  # fmt: skip
    return markdown(["kind of data", "`data=`", "`model=`"], rows)


def show(key: str, evidence: Evidence) -> None:
    """Print the table of an experiment and the paths of its figures."""
    print(render(key, evidence) if has_entry(key) else render_summary(evidence.runs(key)))
    for path in draw(key, evidence):
        print(f"Figure: {path.resolve().as_uri()}")  # terminals make it a link
