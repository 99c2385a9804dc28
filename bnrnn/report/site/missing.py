"""The runs that are missing for a table or figure, and what they cost."""

from pathlib import Path

from bnrnn.report.claims import load_claim
from bnrnn.report.markdown import NONE, markdown
from bnrnn.training.cells import Cell, expand
from bnrnn.training.progress import Known, load_known, nearest_speed, total_updates
from bnrnn.training.results import FILE

ABOUT = """The time of an update is that of the most similar runs that have been timed, on one core of a machine that \
also had other work. Evaluations are not counted.
"""


def render(key: str, results_dir: Path) -> str:
    """The cells of the grid without a run of the paper's length, by their overrides, with the hours that they take."""
    claim = load_claim(key)
    if "analysis" in claim:
        has = (results_dir / f"{key}.json").exists()
        models = f" It needs the models of `{claim['models']}`, trained first." if "models" in claim else ""
        return "Nothing.\n" if has else f"The analysis has not been run.{models}\n"
    cells = expand([f"experiment={key}", "budget=paper", f"out_dir='{results_dir}'"])
    missing = [cell for cell in cells if not (cell.folder / FILE).exists()]
    if not missing:
        return "Nothing: every run of the grid has the paper's length.\n"
    known = load_known(results_dir / key)
    by_kind: dict[str, list[Cell]] = {}
    for cell in missing:
        kind = " ".join(f"`{k}={v}`" for k, v in cell.overrides.items() if k not in ("seed", "search.trial"))
        by_kind.setdefault(kind, []).append(cell)
    rows = [[kind, *_row(of_kind, known)] for kind, of_kind in by_kind.items()]
    hours = [hours_of(cell, known) for cell in missing]
    if all(hour is not None for hour in hours):
        total = f"They take about {sum(hour or 0.0 for hour in hours):,.0f} core hours. "
    else:
        total = "Where the table has no hours, no similar run has been timed yet; `make plan-...` measures it. "
    count = f"{len(missing)} of {len(cells)} runs of the paper's length are missing. "
    return f"{count}{total}{ABOUT}\n{markdown(['runs', 'seeds or trials', 'updates', 'core hours of each'], rows)}"


def _row(cells: list[Cell], known: list[Known]) -> list[str]:
    """[seeds, updates, hours] of cells that differ only in their seed or trial."""
    names = [cell.overrides.get("search.trial", cell.overrides.get("seed", "")) for cell in cells]
    shown = ", ".join(names) if len(names) < 6 else f"{len(names)} of them"
    updates, hours = total_updates(cells[0], known), hours_of(cells[0], known)
    return [shown, NONE if updates is None else f"{updates:,}", NONE if hours is None else f"{hours:,.1f}"]


def hours_of(cell: Cell, known: list[Known]) -> float | None:
    """The estimated hours of a run; None if its length or its speed is unknown."""
    updates, speed = total_updates(cell, known), nearest_speed(cell, known)
    return None if updates is None or speed is None else updates * speed / 3600
