"""The runs that are missing for a table or figure, and what they cost."""

from bnrnn.report.claim_types import Analysis, PaperEntry
from bnrnn.report.costs import hours_of_cell
from bnrnn.report.evidence import Evidence
from bnrnn.report.markdown import NONE, markdown
from bnrnn.training.cells import Cell, expand
from bnrnn.training.progress import total_updates
from bnrnn.training.results import FILE

ABOUT = """The time of an update is that of the most similar runs that have been timed, on one core of a machine that \
also had other work. Evaluations are not counted.
"""


def render(entry: PaperEntry, evidence: Evidence) -> str:
    """The cells of the grid without a run of the paper's length, by their overrides, with the hours that they take."""
    if isinstance(entry, Analysis):
        models = f" It needs the models of `{entry.models}`, trained first." if entry.models else ""
        return "Nothing.\n" if evidence.is_measured(entry) else f"The analysis has not been run.{models}\n"
    cells = expand([f"experiment={entry.key}", "budget=paper", f"out_dir='{evidence.folder}'"])
    missing = [cell for cell in cells if not (cell.folder / FILE).exists()]
    if not missing:
        return "Nothing: every run of the grid has the paper's length.\n"
    by_kind: dict[str, list[Cell]] = {}
    for cell in missing:
        kind = " ".join(f"`{k}={v}`" for k, v in cell.overrides.items() if k not in ("seed", "search.trial"))
        by_kind.setdefault(kind, []).append(cell)
    rows = [[kind, *_row(of_kind, evidence)] for kind, of_kind in by_kind.items()]
    hours = [hours_of_cell(cell, evidence) for cell in missing]
    total = f"They take about {sum(hour or 0.0 for hour in hours):,.0f} core hours. "
    if None in hours:
        total = "Where the table has no hours, no similar run has been timed yet; `make plan-...` measures it. "
    count = f"{len(missing)} of {len(cells)} runs of the paper's length are missing. "
    return f"{count}{total}{ABOUT}\n{markdown(['runs', 'seeds or trials', 'updates', 'core hours of each'], rows)}"


def _row(cells: list[Cell], evidence: Evidence) -> list[str]:
    """[seeds, updates, hours] of cells that differ only in their seed or trial."""
    names = [cell.overrides.get("search.trial", cell.overrides.get("seed", "")) for cell in cells]
    shown = ", ".join(names) if len(names) < 6 else f"{len(names)} of them"
    updates = total_updates(cells[0], evidence.known(cells[0].experiment))
    hours = hours_of_cell(cells[0], evidence)
    return [shown, NONE if updates is None else f"{updates:,}", NONE if hours is None else f"{hours:,.1f}"]
