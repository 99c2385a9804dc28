"""Writes the source of the site: documents, pages of results, front page, gallery and the reference of the API.

Its folders are those of the repository, so that links between documents work in both.
"""

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from bnrnn.config import ROOT
from bnrnn.report.claim_types import Paper
from bnrnn.report.claims import entries, papers
from bnrnn.report.evidence import Evidence
from bnrnn.report.judging import judge_claims
from bnrnn.report.markdown import markdown
from bnrnn.report.outcome import NOT_RUN
from bnrnn.report.site import api, claims_table, front, gallery, notebook, programs, run_pages
from bnrnn.report.site.experiment import render_page, rendered, runs_of
from bnrnn.report.site.parts import colored, toctree
from bnrnn.system.files import write_text
from bnrnn.training.results import MODELS

FIGURES = (".png", ".svg")
NOTEBOOK = "examples/gamma"
FIRST = ("docs/choosing", "docs/layer", "examples", NOTEBOOK, "docs/engines")  # for those who use the layers


def write(folder: Path, evidence: Evidence, with_plot: Collection[str]) -> None:
    """Write the source into a new folder.

    Args:
        with_plot: the keys `<paper>/<table>` of pages with an interactive plot.
    """
    documents = copy_documents(folder)
    for path in evidence.folder.glob("*/*"):
        if path.suffix in FIGURES:
            target = folder / "results" / path.relative_to(evidence.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for entry in entries():
        write_text(folder / "results" / f"{entry.key}.md", render_page(entry, evidence, entry.key in with_plot))
    of_papers = [write_paper(folder, paper, evidence) for paper in papers()]
    write_text(folder / "results" / "README.md", rendered("README.md", evidence))
    write_claims(folder, evidence)
    write_text(folder / "results" / "runs.md", run_pages.render_all(evidence))
    write_text(folder / "gallery.md", gallery.render(evidence))
    write_text(folder / "examples.md", examples())
    notebook.write(ROOT / f"{NOTEBOOK}.ipynb", folder / f"{NOTEBOOK}.md")
    write_text(folder / f"{programs.KEY}.md", programs.render(evidence))
    for name, text in api.pages().items():
        write_text(folder / f"{name}.md", text)
    benchmarks = sorted(f"results/bench/{path.stem}" for path in (evidence.folder / "bench").glob("*.md"))
    contents = {
        "Using the layers": [*FIRST, "api/index"],
        "Results": ["results/README", "results/claims", *of_papers, "results/runs", "gallery", programs.KEY,
                    *benchmarks, *(name for name in documents if f"/{MODELS}/" in name)],
        "The repository": [name for name in documents if name not in FIRST and not name.startswith("results")],
    }  # fmt: skip
    navigation = [toctree(v, ":maxdepth: 2", f":caption: {k}") for k, v in contents.items()]
    write_text(folder / "index.md", front.render("\n".join(navigation)))


def copy_documents(folder: Path) -> list[str]:
    """Copy the documents that people write, and return their names without ending."""
    names = []
    written = ("docs/*.md", "experiments/*/notes.md", "CONTRIBUTING.md", "CHANGELOG.md")
    for pattern in (*written, "results/bench/*.md", f"results/*/*/{MODELS}/README.md"):
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT)
            write_text(folder / name, path.read_text())
            names.append(str(name.with_suffix("")))
    return names


def write_paper(folder: Path, paper: Paper, evidence: Evidence) -> str:
    """Write the page of a paper, which lists its tables and figures, and return its name."""
    rows = []
    for name, entry in paper.entries.items():
        runs = runs_of(entry, evidence)
        has = f"{len(runs)} runs" if runs else "measured" if evidence.is_measured(entry) else NOT_RUN
        rows.append([f"[{entry.title}]({name}.md)", has])
    for name, parts in paper.needs.items():
        if name not in paper.entries:
            links = ", ".join(f"[{part}]({part}.md)" for part in parts)
            rows.append([f"{in_words(name)}: {links}", ""])
    about = f"# {paper.title}\n\n[Deviations and notes on the runs](../../experiments/{paper.key}/notes.md)\n\n"
    text = f"{about}{markdown(['table or figure', 'results'], rows)}\n{toctree(paper.entries)}"
    write_text(folder / "results" / paper.key / "index.md", text)
    return f"results/{paper.key}/index"


def in_words(name: str) -> str:
    """The name of a table or figure as papers write it: fig2 as Fig. 2."""
    return re.sub(r"^fig", "Fig. ", re.sub(r"^table", "Table ", name)).replace("_", " ")


def write_claims(folder: Path, evidence: Evidence) -> None:
    """Write the page of all claims, and that of each claim."""
    claims, target = judge_claims(evidence), folder / "results"
    names = [judged.claim.name for judged in claims]
    for name in names:
        text = colored(rendered(f"claims/{name}.md", evidence))
        write_text(target / "claims" / f"{name}.md", text)
    contents = toctree(f"{name} <claims/{name}>" for name in names)
    write_text(target / "claims.md", f"{claims_table.render(claims, rendered('claims.md', evidence))}\n{contents}")


def examples() -> str:
    """The example programs, each with its introduction and its code."""
    parts = ["# Examples\n\nShort programs that use the layers as an installed package.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        title = path.stem.replace("_", " ").capitalize()
        parts.append(f"## {title}\n\n`examples/{path.name}`\n\n```python\n{path.read_text()}```\n")
    return "\n".join(parts)
