"""The page of a table or figure: results, figures, plot, recipe, deviations, provenance, missing runs."""

import re
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from bnrnn.config import CONF, ROOT, sweep
from bnrnn.report.claims import load_analysis, load_claim, load_paper
from bnrnn.report.markdown import NONE, markdown
from bnrnn.report.pages import RESULTS, measured_keys, stored
from bnrnn.report.run import Run
from bnrnn.report.runs import load_borrowed, load_runs
from bnrnn.report.site import curves, missing
from bnrnn.report.tables import render
from bnrnn.report.unfinished import load_unfinished
from bnrnn.system.files import read_text
from bnrnn.training.cells import expand
from bnrnn.training.results import config_record

FIGURE = re.compile(r"^!\[(.*?)\]\((\S+?)\.png\)$", re.MULTILINE)
IMAGE = re.compile(r"^!\[(.*?)\]\((\S+?\.(?:png|svg))\)\n", re.MULTILINE)
LATER = re.compile(  # headings of sections that come after the figures
    r"^## (?:.*: quoted from the paper, not ours|.*: time to each level|Scores of captions|"
    r"Unfinished runs|All finished runs)$",
    re.MULTILINE,
)
DEVIATION = re.compile(r"^\| ([A-Z]\d+) \|(.*)\|$", re.MULTILINE)
PLOT = """## Interactive plot

{about}

<div id="curves" class="curves"><noscript>The plot needs JavaScript.</noscript></div>
"""
EMBEDDED, LINKED = "![{title}]({path})\n\n", "All panels in one figure: [{title}]({path}).\n\n"
OF_RUNS = """Thin lines are runs, thick lines their means over the seeds that are switched on, circles or dotted \
lines the paper's curve. A cross marks the last finite value of a run that diverged. Click on a name in the legend to \
hide it, and on a run's line to open its page. Seconds were measured on machines that also had other work."""
OF_ANALYSIS = "Lines of one color belong together; click on a name in the legend to hide it. Circles are the paper's."


@cache
def runs_of(key: str) -> list[Run]:
    """All finished runs of an experiment; an analysis has none of its own."""
    return [] if "analysis" in load_claim(key) else load_runs(key, RESULTS)


def page_of(run: Run) -> str:
    """The address of a run's page in the site, without its ending."""
    return "runs/" + re.sub(r"[^\w./-]", "-", str(run.folder.relative_to(RESULTS)))


def plot_of(key: str) -> curves.Plot | None:
    """The interactive plot of a table or figure, if there is something to plot."""
    analysis = load_analysis(key)
    if analysis:
        is_measured = (RESULTS / f"{key}.json").exists()
        return curves.of_analysis(analysis, stored(key, RESULTS)) if is_measured else None
    runs = [*runs_of(key), *load_borrowed(key, RESULTS)]
    pages = {run.folder: f"{page_of(run)}.html" for run in runs}
    return curves.of_experiment(key, [*runs, *load_unfinished(key, RESULTS)], pages)


def render_page(key: str, has_plot: bool) -> str:
    """The page of a table or figure as MyST Markdown, to stand at results/<key>.md in the source of the site."""
    is_measured = key in measured_keys()
    claim, runs = load_claim(key), runs_of(key)
    if is_measured:
        body = rendered(f"{key}.md")
    elif "analysis" in claim:
        body = f"# {claim['title']}\n\nThis analysis has not been run yet.\n"
    else:
        body = render(key, RESULTS)
    title, _, body = with_figures(body, RESULTS / key.split("/")[0]).partition("\n")
    shown = LINKED if has_plot and has_many_panels(claim, key) else EMBEDDED
    figures = [shown.format(title=match[1], path=match[2]) for match in IMAGE.finditer(body)]
    first, rest = split(IMAGE.sub("", body))
    about = OF_ANALYSIS if "analysis" in claim else OF_RUNS
    parts = [title, f"*{load_paper(key.split('/')[0])}.* {again(key)}\n", first.strip() + "\n"]
    plot = [PLOT.format(about=about)] if has_plot else []
    parts += [*plot, *figures, rest] if shown is LINKED else [*figures, *plot, rest]
    if runs:
        parts.append(f"### Pages of the runs\n\n{render_runs(key, runs)}")
    parts += [recipe(key), deviations(key), provenance(key, runs)]
    parts.append(f"## What is missing\n\n{missing.render(key, RESULTS)}")
    return "\n".join(part for part in parts if part)


def has_many_panels(claim: dict[str, Any], key: str) -> bool:
    """Whether the figures of runs have so many panels that a page is too narrow for them; a plot shows them large."""
    return "analysis" not in claim and len(sweep(key)[claim["cols"]]) > 2


def rendered(name: str) -> str:
    """A page of results/ as `make tables` wrote it; `make check` verifies it. Raises BnrnnError if it is missing."""
    return read_text(RESULTS / name, "run `make tables`", "a page of results")


def split(body: str) -> tuple[str, str]:
    """The comparisons with the paper, which come before the figures, and the other sections of a page."""
    match = LATER.search(body)
    return (body[: match.start()], body[match.start() :]) if match else (body, "")


def again(key: str) -> str:
    """The command that makes the table or figure."""
    paper, name = key.split("/")
    target = name if paper == "cooijmans2016" else f"{paper}-{name}"
    return f"Make it again with `make reproduce-{target}`."


def with_figures(text: str, folder: Path) -> str:
    """The text with figures as vector graphics where they exist, and without figures that do not exist."""

    def shown(match: re.Match[str]) -> str:
        for ending in ("svg", "png"):
            if (folder / f"{match[2]}.{ending}").exists():
                return f"![{match[1]}]({match[2]}.{ending})"
        return ""

    return FIGURE.sub(shown, text)


def render_runs(key: str, runs: list[Run]) -> str:
    """A table with a link to every run's page."""
    depth = "../" * (key.count("/") + 1)
    rows = []
    for run in runs:
        state = ", ".join([run.result.status, *(["stale"] if run.stale else [])])
        name = f'<a href="{depth}{page_of(run)}.html">{curves.title(run)}</a>'
        rows.append([name, run.budget, state, f"{run.result.updates:,}", hours(run.result.seconds)])
    return markdown(["run", "budget", "state", "updates", "time"], rows)


def hours(seconds: float) -> str:
    """A duration in hours or minutes."""
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def recipe(key: str) -> str:
    """The grid, the recipe, and the resolved configuration of one of its cells."""
    claim = load_claim(key)
    if "analysis" in claim:
        program = f"experiments/{key.split('/')[0]}/{claim['analysis']}"
        text = (ROOT / program).read_text()
        return f"## Recipe\n\nThe program `{program}`:\n\n{folded('The program', 'python', text)}"
    run = next((run for run in runs_of(key) if not run.stale and run.in_grid(key)), None)
    cell = expand([f"experiment={key}", "budget=paper"])[0]
    choices = run.overrides if run else cell.overrides
    # Composing takes a good part of a second, and a result that is not stale has the same configuration.
    record = run.result.config if run else config_record(cell.cfg)
    swept = [[f"`{k}`", ", ".join(f"`{value}`" for value in values)] for k, values in sweep(key).items()]
    at = ", ".join(f"`{k}={v}`" for k, v in choices.items())
    source = (CONF / "experiment" / f"{key}.yaml").read_text()
    return (
        f"## Recipe\n\nThe grid of runs:\n\n{markdown(['option', 'values'], swept)}\n"
        f"{folded(f'conf/experiment/{key}.yaml', 'yaml', source)}"
        f"{folded(f'The whole configuration, resolved, for {at}', 'yaml', yaml.safe_dump(record, sort_keys=False))}"
    )


def folded(title: str, language: str, text: str) -> str:
    """A block of code that opens with a click."""
    shown = re.sub(r"`(.*?)`", r"<code>\1</code>", title)
    return f"<details><summary>{shown}</summary>\n\n```{language}\n{text.rstrip()}\n```\n\n</details>\n\n"


def deviations(key: str) -> str:
    """The rows of the paper's notes that apply: those whose numbers claims.yaml lists for this table or figure."""
    paper, listed = key.split("/")[0], load_claim(key).get("deviations", [])
    if not listed:
        return ""
    rows = dict(DEVIATION.findall((ROOT / "experiments" / paper / "notes.md").read_text()))
    lines = [f"| {number} |{rows[number]}|" for number in listed]
    header = "| | kind | what | switch and default |\n| --- | --- | --- | --- |"
    about = f"Those that apply here, out of [all deviations and notes](../../experiments/{paper}/notes.md):"
    return "\n".join(["## Deviations from the paper\n", f"{about}\n", header, *lines, ""])


def provenance(key: str, runs: list[Run]) -> str:
    """What measured the results: commits, versions, engines and hardware, with the time that the runs took."""
    if not runs:
        if key not in measured_keys():
            return ""
        return provenance_of(stored(key, RESULTS))
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        environment = run.result.environment
        versions = f"Python {environment['python']}, torch {environment['torch']}"
        groups.setdefault((", ".join(run.result.commits), versions, run.engine), []).append(run)
    rows = []
    for (commits, versions, engine), members in groups.items():
        seconds = [run.result.seconds for run in members]
        cpu = [run.result.cpu_seconds for run in members if run.result.cpu_seconds is not None]
        cost = hours(sum(cpu)) if len(cpu) == len(members) else NONE
        times = [hours(mean(seconds)), hours(sum(seconds)), cost]
        rows.append([f"`{commits}`", versions, engine, str(len(members)), *times])
    header = ["commit", "versions", "engine", "runs", "time of a run", "of all", "CPU time of all"]
    return "## Provenance\n\nTimes are those of training updates.\n\n" + markdown(header, rows)


def provenance_of(result: dict[str, Any]) -> str:
    """The date, the commit and the environment of an analysis. Old results have no date."""
    found = {"date": result.get("date", "not recorded"), "commit": result["commit"], **result["environment"]}
    return "## Provenance\n\n" + markdown(["", ""], [[k, f"`{v}`"] for k, v in found.items()])
