"""Reads tables and figures from experiments/<paper>/claims.yaml and the points beside it; `claim_tests` reads claims.

The fields of the classes in `claim_types` are the keys of the file. Whatever no program would understand is refused:
rows and columns must be those of the recipes' grids.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from bnrnn.config import ROOT, sweep
from bnrnn.errors import BnrnnError
from bnrnn.metrics import metric_of
from bnrnn.report.claim_types import Analysis, Curve, Paper, PaperEntry, Points, Table, is_within
from bnrnn.report.schema import REMEDY, Keys, build, convert, listed, load_keys
from bnrnn.system.files import read_json, reading

CLAIMS, POINTS = "claims.yaml", "points.json"
WHAT = "a file of claims"
SPLITS = ("train", "valid", "test", "train_set")
SECTIONS = ("paper", "needs", "claims")  # what is no table or figure in a claims.yaml


def papers() -> list[Paper]:
    """All papers with claims, in the order of their keys."""
    return [read_paper(path) for path in sorted((ROOT / "experiments").glob(f"*/{CLAIMS}"))]


def paper_of(key: str) -> Paper:
    """The paper of a key `<paper>/<table>`. Raises BnrnnError for an unknown one."""
    path = ROOT / "experiments" / key.partition("/")[0] / CLAIMS
    if not path.exists():
        raise BnrnnError(f"{key} is unknown: {path.relative_to(ROOT)} does not exist; use <paper>/<table or figure>")
    return read_paper(path)


def entry_of(key: str) -> PaperEntry:
    """The table or figure of a key. Raises BnrnnError for an unknown one."""
    paper = paper_of(key)
    name = key.partition("/")[2]
    if name not in paper.entries:
        raise BnrnnError(f"{paper.path} has no entry {name!r}: it has {', '.join(paper.entries)}")
    return paper.entries[name]


def table_of(key: str) -> Table:
    """The entry of a key, which must be one of runs."""
    entry = entry_of(key)
    if not isinstance(entry, Table):
        raise BnrnnError(f"{key} is an analysis and has no runs: use a table or figure that has a recipe")
    return entry


def analysis_of(key: str) -> Analysis:
    """The entry of a key, which must be an analysis."""
    entry = entry_of(key)
    assert isinstance(entry, Analysis), key
    return entry


def has_entry(key: str) -> bool:
    """Whether an experiment belongs to a paper, unlike quickstart."""
    return "/" in key and (ROOT / "experiments" / key.partition("/")[0] / CLAIMS).exists()


def entries() -> list[PaperEntry]:
    """All tables and figures of all papers."""
    return [entry for paper in papers() for entry in paper.entries.values()]


def tables() -> list[Table]:
    """All entries of runs."""
    return [entry for entry in entries() if isinstance(entry, Table)]


def in_grid(key: str, overrides: Mapping[str, str]) -> bool:
    """Whether a run of an experiment is a cell of its grid, of any seed and length, without other overrides.

    The rows that its table shows beside those of the grid count too.
    """
    return is_within(table_of(key).grid if has_entry(key) else sweep(key), overrides)


def needed(key: str) -> tuple[list[str], list[Path]]:
    """The recipes to train for a table or figure, and the analysis scripts to run afterwards, relative to the checkout.

    Figures and tables that have no entry of their own are listed under `needs` in claims.yaml. Raises BnrnnError for an
    unknown paper or table.
    """
    paper, name, recipes, programs = paper_of(key), key.partition("/")[2], [], []
    for part in paper.needs.get(name, (name,)):
        entry = entry_of(f"{paper.key}/{part}")
        if isinstance(entry, Analysis):
            programs.append(entry.program)
            recipes += [entry.models] if entry.models else []
        else:
            recipes.append(entry.key)
    return list(dict.fromkeys(recipes)), programs


@cache
def read_paper(path: Path) -> Paper:
    """The tables and figures in a claims.yaml. Raises BnrnnError, with file and line, for whatever does not fit."""
    content = load_keys(path, WHAT)
    with reading(path, REMEDY, WHAT):
        return _paper(path, content)


def _paper(path: Path, content: Keys) -> Paper:
    for name in ("paper", *(name for name in content if name not in SECTIONS)):
        if not isinstance(name, str) or not isinstance(content.get(name), str if name == "paper" else Keys):
            raise content.error(f"{name} is {content.get(name)!r}", "text" if name == "paper" else "keys", name)
    points, paper = _read_points(path.with_name(POINTS)), path.parent.name
    entries = {name: _entry(f"{paper}/{name}", content[name], points) for name in content if name not in SECTIONS}
    figures = {curve.like or curve.figure for e in entries.values() if isinstance(e, Table) for curve in e.curves}
    if unknown := sorted(points.keys() - figures):
        raise BnrnnError(f"{path.with_name(POINTS)} has points of {unknown[0]}, which is no figure in {path}: name one")
    needs = convert(content.get("needs", Keys()), dict[str, tuple[str, ...]], content, "needs")
    for name, parts in needs.items():
        if unknown := [part for part in parts if part not in entries]:
            raise content["needs"].error(f"{name} needs {unknown[0]}", f"one of {', '.join(entries)}", name)
    return Paper(path, content["paper"], needs, entries, content)


def _read_points(path: Path) -> dict[str, Points]:
    """The points of a paper's curves, by figure, row, column and update; {} for a paper without this file."""
    if not path.exists():
        return {}
    with reading(path, REMEDY, "a file of points"):
        figures = read_json(path, REMEDY, "a file of points")
        return {figure: {row: {col: dict(pairs) for col, pairs in cols.items()} for row, cols in rows.items()}
                for figure, rows in figures.items()}  # fmt: skip


def _entry(key: str, given: Keys, points: dict[str, Points]) -> PaperEntry:
    if "analysis" in given:
        return build(Analysis, given, key=key)
    curves = tuple(build(Curve, keys, points=points.get(str(keys.get("like", keys.get("figure"))), {}))
                   for keys in listed(given, "curves"))  # fmt: skip
    table = build(Table, given, also=("curves",), key=key, curves=curves)
    _check_cells(table, given)
    if table.enough_updates is not None and table.enough_updates > (table.paper_updates or 0):
        expected = "at most paper_updates, which must be given too"
        raise given.error(f"enough_updates is {table.enough_updates}", expected, "enough_updates")
    return table


def _check_cells(table: Table, given: Keys) -> None:
    """Raise BnrnnError for metrics that do not exist, and for rows and columns that are not in the recipe's grid."""
    try:
        own = sweep(table.key)
    except BnrnnError as error:
        raise given.error(str(error), "a recipe for each entry of runs") from None
    for axis, option in (("rows", table.rows), ("cols", table.cols)):
        if option not in own:
            raise given.error(f"{axis} is {option}", f"an option of the grid: {', '.join(own)}", axis)
    parts = [keys for name in ("published", "measured", "curves") for keys in given.get(name, [])]
    for keys in [*parts, given["search"]] if table.search else parts:
        check_metric(keys["metric"], keys)
    cells = [("published", part.cells) for part in table.published] + [("curves", c.points) for c in table.curves]
    cells += [("search", {row: {} for row in table.search.published})] if table.search else []
    for section, by_row in cells:
        _check_names(by_row, table.row_names, "row", section, given)
    by_col: list[tuple[str, Iterable[str]]] = [(section, cols) for section, rows in cells for cols in rows.values()]
    by_col += [("cited", cited.values) for cited in table.cited]
    by_col += [("curves", [*curve.chance, *curve.reach]) for curve in table.curves]
    for section, cols in by_col:
        _check_names(cols, table.col_names, "column", section, given)
    for row, borrowed in table.borrows.items():
        _check_names([row], table.row_names, "row", "borrows", given)
        if "experiment" not in borrowed:
            raise given["borrows"].error(f"{row} names no experiment", "the key of another entry", row)


def check_metric(metric: str, given: Keys) -> None:
    """Raise BnrnnError, with file and line, for a metric that no run records."""
    if metric.partition("/")[0] not in SPLITS or not (metric_of(metric) or "grad_norm" in metric):
        raise given.error(f"metric is {metric}", f"<split>/<metric> with a split of {', '.join(SPLITS)}", "metric")


def _check_names(names: Iterable[str], known: list[str], kind: str, section: str, given: Keys) -> None:
    if unknown := [name for name in names if name not in known]:
        raise given.error(f"{section} has the {kind} {unknown[0]}", f"one of the grid: {', '.join(known)}", section)
