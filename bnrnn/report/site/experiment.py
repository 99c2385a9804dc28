"""The page of a table or figure: results, figures, plot, recipe, deviations, provenance, missing runs."""

import re
from pathlib import Path
from statistics import mean

import yaml

from bnrnn.config import CONF, ROOT, sweep
from bnrnn.report.claim_types import Analysis, PaperEntry, Table
from bnrnn.report.claims import in_grid, paper_of
from bnrnn.report.costs import hours_of_cell
from bnrnn.report.evidence import Evidence
from bnrnn.report.markdown import NONE, markdown
from bnrnn.report.run import Run
from bnrnn.report.site import curves
from bnrnn.report.site.parts import CURVES, again, folded, hours, page_of, provenance_of
from bnrnn.report.tables import render
from bnrnn.system.files import read_text
from bnrnn.training.cells import Cell
from bnrnn.training.progress import total_updates
from bnrnn.training.results import FILE, config_record

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

{curves}
"""
OF_COST = """The time of an update is that of the most similar runs that have been timed, on one core of a machine \
that also had other work. Evaluations are not counted.
"""
EMBEDDED, LINKED = "![{title}]({path})\n\n", "All panels in one figure: [{title}]({path}).\n\n"
OF_RUNS = """Thin lines are runs, thick lines their means over the seeds that are switched on, circles or dotted \
lines the paper's curve. A cross marks the last finite value of a run that diverged. Click on a name in the legend to \
hide it, and on a run's line to open its page. Seconds were measured on machines that also had other work."""
OF_ANALYSIS = "Lines of one color belong together; click on a name in the legend to hide it. Circles are the paper's."


def runs_of(entry: PaperEntry, evidence: Evidence) -> list[Run]:
    """All finished runs of an entry; an analysis has none of its own."""
    return evidence.runs(entry.key) if isinstance(entry, Table) else []


def plot_of(entry: PaperEntry, evidence: Evidence) -> curves.Plot | None:
    """The interactive plot of a table or figure, if there is something to plot."""
    if isinstance(entry, Analysis):
        module = entry.module() if evidence.is_measured(entry) else None
        return module.plot(evidence.numbers(entry.key)) if module and hasattr(module, "plot") else None
    assert isinstance(entry, Table)
    runs = evidence.shown(entry.key)
    pages = {run.folder: f"{page_of(run, evidence)}.html" for run in runs}
    return curves.of_experiment(entry, [*runs, *evidence.unfinished(entry.key)], pages)


def render_page(entry: PaperEntry, evidence: Evidence, has_plot: bool) -> str:
    """The page of a table or figure as MyST Markdown, to stand at results/<key>.md in the source of the site."""
    runs = runs_of(entry, evidence)
    if evidence.is_measured(entry):
        body = rendered(f"{entry.key}.md", evidence)
    elif isinstance(entry, Analysis):
        body = f"# {entry.title}\n\nThis analysis has not been run yet.\n"
    else:
        body = render(entry.key, evidence)
    title, _, body = with_figures(body, evidence.folder / entry.paper).partition("\n")
    shown = LINKED if has_plot and has_many_panels(entry) else EMBEDDED
    figures = [shown.format(title=match[1], path=match[2]) for match in IMAGE.finditer(body)]
    first, rest = split(IMAGE.sub("", body))
    about = OF_ANALYSIS if isinstance(entry, Analysis) else OF_RUNS
    parts = [title, f"*{paper_of(entry.key).title}.* {again(entry)}\n", first.strip() + "\n"]
    plot = [PLOT.format(about=about, curves=CURVES)] if has_plot else []
    parts += [*plot, *figures, rest] if shown is LINKED else [*figures, *plot, rest]
    if runs:
        parts.append(f"### Pages of the runs\n\n{render_runs(entry.key, runs, evidence)}")
    parts += [recipe(entry, runs, evidence), deviations(entry), provenance(entry, runs, evidence)]
    parts.append(f"## What is missing\n\n{missing(entry, evidence)}")
    return "\n".join(part for part in parts if part)


def has_many_panels(entry: PaperEntry) -> bool:
    """Whether the figures of runs have so many panels that a page is too narrow for them; a plot shows them large."""
    return isinstance(entry, Table) and len(entry.col_names) > 2


def rendered(name: str, evidence: Evidence) -> str:
    """A page of results/ as `make tables` wrote it; `make check` verifies it. Raises BnrnnError if it is missing."""
    return read_text(evidence.folder / name, "run `make tables`", "a page of results")


def split(body: str) -> tuple[str, str]:
    """The comparisons with the paper, which come before the figures, and the other sections of a page."""
    match = LATER.search(body)
    return (body[: match.start()], body[match.start() :]) if match else (body, "")


def with_figures(text: str, folder: Path) -> str:
    """The text with figures as vector graphics where they exist, and without figures that do not exist."""

    def shown(match: re.Match[str]) -> str:
        for ending in ("svg", "png"):
            if (folder / f"{match[2]}.{ending}").exists():
                return f"![{match[1]}]({match[2]}.{ending})"
        return ""

    return FIGURE.sub(shown, text)


def render_runs(key: str, runs: list[Run], evidence: Evidence) -> str:
    """A table with a link to every run's page."""
    depth = "../" * (key.count("/") + 1)
    rows = []
    for run in runs:
        state = ", ".join([run.result.status, *(["stale"] if run.stale else [])])
        name = f'<a href="{depth}{page_of(run, evidence)}.html">{curves.title(run)}</a>'
        rows.append([name, run.budget, state, f"{run.result.updates:,}", hours(run.result.seconds)])
    return markdown(["run", "budget", "state", "updates", "time"], rows)


def recipe(entry: PaperEntry, runs: list[Run], evidence: Evidence) -> str:
    """The grid, the recipe, and the resolved configuration of one of its cells."""
    if isinstance(entry, Analysis):
        text = (ROOT / entry.program).read_text()
        return f"## Recipe\n\nThe program `{entry.program}`:\n\n{folded('The program', 'python', text)}"
    key = entry.key
    run = next((run for run in runs if in_grid(key, run.overrides) and not run.stale), None)
    cell = evidence.cells(key)[0]
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


def deviations(entry: PaperEntry) -> str:
    """The rows of the paper's notes that apply: those whose numbers claims.yaml lists for this table or figure."""
    if not entry.deviations:
        return ""
    rows = dict(DEVIATION.findall((ROOT / "experiments" / entry.paper / "notes.md").read_text()))
    lines = [f"| {number} |{rows[number]}|" for number in entry.deviations]
    header = "| | kind | what | switch and default |\n| --- | --- | --- | --- |"
    about = f"Those that apply here, out of [all deviations and notes](../../experiments/{entry.paper}/notes.md):"
    return "\n".join(["## Deviations from the paper\n", f"{about}\n", header, *lines, ""])


def provenance(entry: PaperEntry, runs: list[Run], evidence: Evidence) -> str:
    """What measured the results: commits, versions, engines and hardware, with the time that the runs took."""
    if not runs:
        return provenance_of(evidence.numbers(entry.key)) if evidence.has_numbers(entry.key) else ""
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


def missing(entry: PaperEntry, evidence: Evidence) -> str:
    """The cells of the grid without a run of the paper's length, by their overrides, with the hours that they take."""
    if isinstance(entry, Analysis):
        models = f" It needs the models of `{entry.models}`, trained first." if entry.models else ""
        return "Nothing.\n" if evidence.is_measured(entry) else f"The analysis has not been run.{models}\n"
    cells = evidence.cells(entry.key)
    absent = [cell for cell in cells if not (cell.folder / FILE).exists()]
    if not absent:
        return "Nothing: every run of the grid has the paper's length.\n"
    by_kind: dict[str, list[Cell]] = {}
    for cell in absent:
        kind = " ".join(f"`{k}={v}`" for k, v in cell.overrides.items() if k not in ("seed", "search.trial"))
        by_kind.setdefault(kind, []).append(cell)
    rows = [[kind, *_row(of_kind, evidence)] for kind, of_kind in by_kind.items()]
    costs = [hours_of_cell(cell, evidence) for cell in absent]
    total = f"They take about {sum(cost or 0.0 for cost in costs):,.0f} core hours. "
    if None in costs:
        total = "Where the table has no hours, no similar run has been timed yet; `make plan-...` measures it. "
    count = f"{len(absent)} of {len(cells)} runs of the paper's length are missing. "
    return f"{count}{total}{OF_COST}\n{markdown(['runs', 'seeds or trials', 'updates', 'core hours of each'], rows)}"


def _row(cells: list[Cell], evidence: Evidence) -> list[str]:
    """[seeds, updates, hours] of cells that differ only in their seed or trial."""
    names = [cell.overrides.get("search.trial", cell.overrides.get("seed", "")) for cell in cells]
    shown = ", ".join(names) if len(names) < 6 else f"{len(names)} of them"
    updates = total_updates(cells[0], evidence.known(cells[0].experiment))
    cost = hours_of_cell(cells[0], evidence)
    return [shown, NONE if updates is None else f"{updates:,}", NONE if cost is None else f"{cost:,.1f}"]
