"""Every rendered file: the pages and figures of results/, and the blocks in README.md, docs/ and notes."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from bnrnn.config import ROOT
from bnrnn.report import choosing_page, facts, main_figure, plots, running_page
from bnrnn.report.bench_page import render_brief, render_file, render_padded
from bnrnn.report.claims import claim_keys, load_analysis, load_claim
from bnrnn.report.claims_page import claim_pages, render_short
from bnrnn.report.index import render_index
from bnrnn.report.markdown import markdown
from bnrnn.report.rule_history import has_history
from bnrnn.report.runs import load_borrowed, load_runs, run_files
from bnrnn.report.tables import drawn, render, render_summary
from bnrnn.report.unfinished import load_unfinished
from bnrnn.report.verdicts import Claim, load_claims
from bnrnn.system.files import read_record
from bnrnn.training.pairs import KINDS, fitting

RESULTS = ROOT / "results"
DOCUMENTS = [ROOT / "docs" / f"{name}.md" for name in ("choosing", "data", "engines", "layer")]  # with blocks
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def measured_keys() -> list[str]:
    """The keys `<paper>/<table>` that have results."""

    def is_measured(key: str) -> bool:
        return (RESULTS / f"{key}.json").exists() if "analysis" in load_claim(key) else bool(run_files(key, RESULTS))

    return [key for key in claim_keys() if is_measured(key)]


def page(key: str) -> str:
    """The page of a table or figure."""
    analysis = load_analysis(key)
    return analysis.render(stored(key, RESULTS)) if analysis else render(key, RESULTS)


def stored(key: str, results_dir: Path) -> dict[str, Any]:
    """The numbers of an analysis."""
    return read_record(results_dir / f"{key}.json", f"make reproduce-{key.replace('/', '-')}")


def draw(key: str, results_dir: Path) -> list[Path]:
    """Plot the figures of an experiment and return their paths."""
    claim, analysis = load_claim(key), load_analysis(key)
    if analysis:
        path = results_dir / f"{key}.png"
        analysis.draw(stored(key, results_dir), path)
        return [path] if path.exists() else []  # some figures need images that are not part of the repository
    if not claim:
        path = results_dir / f"{key}.png"
        plots.draw_sweep(key, results_dir, path)
        return [path]
    runs = [*load_runs(key, results_dir), *load_borrowed(key, results_dir), *load_unfinished(key, results_dir)]
    curves = drawn(key, claim, runs)
    paths = {results_dir / Path(key).parent / f"{curve['figure']}.png": curve for curve in curves}
    for path, curve in paths.items():
        plots.draw_curve(key, curve, results_dir, path)
    if "search" in claim:
        path = results_dir / Path(key).parent / f"{claim['search']['figure']}.png"
        plots.draw_search(key, claim["search"], results_dir, path)
        return [*paths, path]
    return list(paths)


def texts() -> dict[Path, str]:
    """The expected content of every rendered file."""
    measured = measured_keys()
    pages = {RESULTS / f"{key}.md": page(key) for key in measured}
    if has_history():  # without the history it is unknown whether rules were committed before their runs
        pages |= claim_pages(claims(), RESULTS, measured)
    pages[RESULTS / "README.md"] = render_index(measured, RESULTS)
    benchmarks = {path.with_suffix(".md"): render_file(path) for path in sorted((RESULTS / "bench").glob("*.json"))}
    with_blocks = (ROOT / "README.md", *DOCUMENTS, *sorted((ROOT / "experiments").glob("*/notes.md")))
    filled = {p: BLOCK.sub(lambda m: f"{m[1]}{block(m[2])}{m[3]}", p.read_text()) for p in with_blocks}
    return {**pages, **benchmarks, **filled}


@cache
def claims() -> list[Claim]:
    """The claims, judged by the stored runs; judging takes seconds, so it is done once."""
    return load_claims(RESULTS)


def block(key: str) -> str:
    """The content of a block: claims, norms, running statistics, the table of an analysis, a benchmark."""
    if key.startswith("running/"):
        return running_page.render(read_record(running_page.FILE, "make running"), key.partition("/")[2])
    if key.partition("/")[0] == "choosing":
        result = read_record(choosing_page.FILE, choosing_page.COMMAND)
        return choosing_page.short(result) if key == "choosing/short" else choosing_page.render(result, key)
    if key == "claims":
        return render_short(claims())
    if key == "pairs":
        return render_pairs()
    if key == "facts":
        return facts.render(RESULTS)
    if key in measured_keys():  # an analysis with a table
        analysis: Any = load_analysis(key)
        return analysis.table(stored(key, RESULTS))
    return render_file(RESULTS / f"{key}.json", render_padded if key.endswith("padded") else render_brief)


def draw_all() -> None:
    """Plot every figure of results/."""
    for key in measured_keys():
        draw(key, RESULTS)
    main_figure.draw(RESULTS)
    choosing_page.draw(read_record(choosing_page.FILE, choosing_page.COMMAND))


def render_pairs() -> str:
    """The table of the kinds of data, with the datasets and the models of each."""
    rows = ([kind, *(", ".join(f"`{name}`" for name in fitting(group, kind)) for group in ("data", "model"))]
            for kind in KINDS)  # fmt: skip
    return markdown(["kind of data", "`data=`", "`model=`"], rows)


def show(key: str, results_dir: Path) -> None:
    """Print the table of an experiment and the paths of its figures."""
    print(render(key, results_dir) if load_claim(key) else render_summary(load_runs(key, results_dir)))
    for path in draw(key, results_dir):
        print(f"Figure: {path.resolve().as_uri()}")  # terminals make it a link
