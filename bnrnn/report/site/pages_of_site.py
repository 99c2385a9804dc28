"""What the pages of the site need from Sphinx beside Markdown: the pages of runs, and the scripts of each page."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bnrnn.report.evidence import Evidence
from bnrnn.report.site import gallery, run_pages
from bnrnn.report.site.experiment import page_of

NAVIGATION: dict[Any, str] = {}
PLOTS = "plots"  # the folder of the plots' data in _static


def connect(app: Any, evidence: Evidence) -> None:
    """Connect to the events of a Sphinx application."""
    app.connect("html-collect-pages", partial(collect, evidence=evidence))
    app.connect("html-page-context", add_scripts)
    app.connect("html-page-context", share_navigation, priority=100)  # before that of the theme


def collect(app: Any, evidence: Evidence) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The page of every run, made by a template and not by Sphinx's parser, because there are hundreds."""
    for table, run in run_pages.all_runs(evidence):
        name = page_of(run, evidence)
        values = run_pages.context(table, run, evidence)

        def link(target: str, name: str = name) -> str:
            return app.builder.get_relative_uri(name, target)

        body = app.builder.templates.render("run.html", {**values, "facts_of_run": values["facts"], "link": link})
        yield name, {"title": values["title"], "body": body}, "page.html"


def share_navigation(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Compute the navigation of run pages once: it is the same for all of one depth, and takes most of their time."""
    if pagename.startswith("runs/"):
        toctree, depth = context["toctree"], pagename.count("/")
        context["toctree"] = lambda **options: _navigation(depth, toctree, **options)


def _navigation(depth: int, toctree: Callable[..., str], **options: Any) -> str:
    key = (depth, *sorted(options.items()))
    if key not in NAVIGATION:
        NAVIGATION[key] = toctree(**options)
    return NAVIGATION[key]


def add_scripts(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Load plotly.js and the data of a plot on pages that have one."""
    name = gallery.STATISTICS if pagename == "gallery" else pagename.removeprefix("results/")
    data = app.outdir / "_static" / PLOTS / f"{name}.js"
    if data.exists():
        for script in ("plotly.min.js", f"{PLOTS}/{name}.js", "gallery.js" if pagename == "gallery" else "curves.js"):
            app.add_js_file(script, loading_method="defer")
    if 'class="docutils filtered"' in context.get("body", ""):
        app.add_js_file("tables.js", loading_method="defer")
