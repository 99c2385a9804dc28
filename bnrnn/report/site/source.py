"""Writes the source of the site: documents, pages of results, front page, gallery and the reference of the API.

Its folders are those of the repository, so that links between documents work in both.
"""

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from bnrnn.config import ROOT
from bnrnn.report.claims import claim_keys, load_claim, load_paper, read_claims
from bnrnn.report.markdown import markdown
from bnrnn.report.pages import RESULTS, claims, measured_keys
from bnrnn.report.site import api, claims_table, front, gallery, notebook, programs, run_pages
from bnrnn.report.site.experiment import render_page, rendered, runs_of
from bnrnn.report.verdicts import NOT_RUN
from bnrnn.system.files import write_text

FIGURES = (".png", ".svg")
NOTEBOOK = "examples/gamma"
FIRST = (
    "docs/choosing",
    "docs/layer",
    "examples",
    NOTEBOOK,
    "docs/engines",
)  # the documents of those who use the layers
TOCTREE = """```{{toctree}}
:hidden:
:maxdepth: 2
:caption: {caption}

{entries}
```
"""


def write(folder: Path, with_plot: Collection[str]) -> None:
    """Write the source into a new folder.

    Args:
        with_plot: the keys `<paper>/<table>` of pages with an interactive plot.
    """
    documents = copy_documents(folder)
    for path in RESULTS.glob("*/*"):
        if path.suffix in FIGURES:
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for key in claim_keys():
        write_text(folder / "results" / f"{key}.md", render_page(key, key in with_plot))
    papers = [write_paper(folder, paper) for paper in sorted({key.split("/")[0] for key in claim_keys()})]
    write_text(folder / "results" / "README.md", rendered("README.md"))
    write_claims(folder)
    write_text(folder / "results" / "runs.md", run_pages.render_all())
    write_text(folder / "gallery.md", gallery.render())
    write_text(folder / "examples.md", examples())
    notebook.write(ROOT / f"{NOTEBOOK}.ipynb", folder / f"{NOTEBOOK}.md")
    write_text(folder / f"{programs.KEY}.md", programs.render())
    for name, text in api.pages().items():
        write_text(folder / f"{name}.md", text)
    benchmarks = sorted(f"results/bench/{path.stem}" for path in (RESULTS / "bench").glob("*.md"))
    contents = {
        "Using the layers": [*FIRST, "api/index"],
        "Results": ["results/README", "results/claims", *papers, "results/runs", "gallery", programs.KEY, *benchmarks],
        "The repository": [name for name in documents if name not in FIRST and not name.startswith("results")],
    }
    navigation = [TOCTREE.format(caption=k, entries="\n".join(v)) for k, v in contents.items()]
    write_text(folder / "index.md", front.render(front.readme(), "\n".join(navigation)))


def copy_documents(folder: Path) -> list[str]:
    """Copy the documents that people write, and return their names without ending."""
    names = []
    for pattern in ("docs/*.md", "experiments/*/notes.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/bench/*.md"):
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT)
            write_text(folder / name, path.read_text())
            names.append(str(name.with_suffix("")))
    return names


def write_paper(folder: Path, paper: str) -> str:
    """Write the page of a paper, which lists its tables and figures, and return its name."""
    rows, keys = [], [key for key in claim_keys() if key.startswith(f"{paper}/")]
    for key in keys:
        runs = runs_of(key)
        has = f"{len(runs)} runs" if runs else "measured" if key in measured_keys() else NOT_RUN
        rows.append([f"[{load_claim(key)['title']}]({key.split('/')[1]}.md)", has])
    needs = read_claims(ROOT / "experiments" / paper / "claims.yaml").get("needs", {})
    for name, parts in needs.items():
        if f"{paper}/{name}" not in keys:
            links = ", ".join(f"[{part}]({part}.md)" for part in parts)
            rows.append([f"{in_words(name)}: {links}", ""])
    about = f"# {load_paper(paper)}\n\n[Deviations and notes on the runs](../../experiments/{paper}/notes.md)\n\n"
    entries = "\n".join(key.split("/")[1] for key in keys)
    contents = f"```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
    text = f"{about}{markdown(['table or figure', 'results'], rows)}\n{contents}"
    write_text(folder / "results" / paper / "index.md", text)
    return f"results/{paper}/index"


def in_words(name: str) -> str:
    """The name of a table or figure as papers write it: fig2 as Fig. 2."""
    return re.sub(r"^fig", "Fig. ", re.sub(r"^table", "Table ", name)).replace("_", " ")


def write_claims(folder: Path) -> None:
    """Write the page of all claims, and that of each claim."""
    names = [claim.name for claim in claims()]
    for name in names:
        write_text(folder / "results" / "claims" / f"{name}.md", claims_table.colored(rendered(f"claims/{name}.md")))
    entries = "\n".join(f"{name} <claims/{name}>" for name in names)
    contents = f"```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
    write_text(folder / "results" / "claims.md", f"{claims_table.render(claims(), rendered('claims.md'))}\n{contents}")


def examples() -> str:
    """The example programs, each with its introduction and its code."""
    parts = ["# Examples\n\nShort programs that use the layers as an installed package.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        title = path.stem.replace("_", " ").capitalize()
        parts.append(f"## {title}\n\n`examples/{path.name}`\n\n```python\n{path.read_text()}```\n")
    return "\n".join(parts)
