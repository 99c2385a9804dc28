"""Build the site: documents, claims and results as pages for a browser.

python scripts/make_site.py [--out-dir site]
"""

import argparse
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from plotly.offline import get_plotlyjs
from sphinx.application import Sphinx
from sphinx.util.console import nocolor

from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.report.claims import entries
from bnrnn.report.evidence import Evidence
from bnrnn.report.site import curves, gallery, programs, run_pages, source
from bnrnn.report.site.experiment import plot_of
from bnrnn.report.site.parts import page_of
from bnrnn.system.files import write_text

CONFIGURATION = ROOT / "docs" / "site"
WORK = ROOT / "build" / "site"
PLOTS = "plots"  # the folder of the plots' data in _static
NAVIGATION: dict[Any, str] = {}


def build(evidence: Evidence, out_dir: Path) -> None:
    """Build the site into a folder, whose former content is removed. Raises BnrnnError if Sphinx warns of anything."""
    for folder in (WORK, out_dir):
        shutil.rmtree(folder, ignore_errors=True)
    static = out_dir / "_static"
    plots = {entry.key: plot for entry in entries() if (plot := plot_of(entry, evidence)) is not None}
    if evidence.has_numbers(programs.KEY):
        plots[programs.KEY] = programs.program().plot(evidence.numbers(programs.KEY))
    for key, plot in plots.items():
        curves.write(plot, static / PLOTS / f"{key}.js")
    for _, run in run_pages.all_runs(evidence):
        curves.write(curves.of_run(run), static / PLOTS / f"{page_of(run, evidence)}.js")
    write_text(static / "plotly.min.js", get_plotlyjs())
    source.write(WORK / "source", evidence, with_plot=set(plots))
    nocolor()
    app = Sphinx(WORK / "source", CONFIGURATION, out_dir, WORK / "doctrees", "html", warningiserror=True)
    app.connect("html-collect-pages", partial(collect, evidence=evidence))
    app.connect("html-page-context", add_scripts)
    app.connect("html-page-context", share_navigation, priority=100)  # before that of the theme
    app.build()
    if app.statuscode:
        raise BnrnnError("the site was not built without warnings: correct what they name, and build it again")


def collect(app: Any, evidence: Evidence) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The page of every run, made by a template and not by Sphinx's parser, because there are hundreds."""
    for table, run in run_pages.all_runs(evidence):
        name = page_of(run, evidence)
        values = run_pages.context(table, run, evidence)
        body = app.builder.templates.render("run.html", {**values, "link": partial(app.builder.get_relative_uri, name)})
        yield name, {"title": values["title"], "body": body}, "page.html"


def add_scripts(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Load plotly.js and the data of a plot on pages that have one."""
    name = gallery.STATISTICS if pagename == "gallery" else pagename.removeprefix("results/")
    if (app.outdir / "_static" / PLOTS / f"{name}.js").exists():
        for script in ("plotly.min.js", f"{PLOTS}/{name}.js", "gallery.js" if pagename == "gallery" else "curves.js"):
            app.add_js_file(script, loading_method="defer")
    if 'class="docutils filtered"' in context.get("body", ""):
        app.add_js_file("tables.js", loading_method="defer")


def share_navigation(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Compute the navigation of run pages once: it is the same for all of one depth, and takes most of their time."""
    if pagename.startswith("runs/"):
        context["toctree"] = partial(_navigation, pagename.count("/"), context["toctree"])


def _navigation(depth: int, toctree: Callable[..., str], **options: Any) -> str:
    key = (depth, *sorted(options.items()))
    if key not in NAVIGATION:
        NAVIGATION[key] = toctree(**options)
    return NAVIGATION[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-dir", type=Path, default=ROOT / "site", metavar="DIR")
    args = parser.parse_args()
    build(Evidence(ROOT / "results"), args.out_dir.resolve())
    print(f"Open {args.out_dir / 'index.html'}")


if __name__ == "__main__":
    report_errors(main, HydraException)
