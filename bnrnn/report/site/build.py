"""Builds the site: writes its source from documents, claims and results, and starts Sphinx."""

import shutil
from pathlib import Path

from plotly.offline import get_plotlyjs
from sphinx.application import Sphinx
from sphinx.util.console import nocolor

from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.report.claims import entries
from bnrnn.report.evidence import Evidence
from bnrnn.report.site import curves, programs, source
from bnrnn.report.site.experiment import page_of, plot_of
from bnrnn.report.site.pages_of_site import PLOTS, connect
from bnrnn.report.site.run_pages import all_runs
from bnrnn.system.files import write_text

CONFIGURATION = ROOT / "docs" / "site"
WORK = ROOT / "build" / "site"


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
    for _, run in all_runs(evidence):
        curves.write(curves.of_run(run), static / PLOTS / f"{page_of(run, evidence)}.js")
    write_text(static / "plotly.min.js", get_plotlyjs())
    source.write(WORK / "source", evidence, with_plot=set(plots))
    nocolor()
    app = Sphinx(WORK / "source", CONFIGURATION, out_dir, WORK / "doctrees", "html", warningiserror=True)
    connect(app, evidence)
    app.build()
    if app.statuscode:
        raise BnrnnError("the site was not built without warnings: correct what they name, and build it again")
