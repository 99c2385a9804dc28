"""The types of what a claims.yaml says: a paper, its tables and figures, its claims, and the tests of these.

A key `<paper>/<table>` names a table or figure: one of runs, which has a recipe, or an analysis, which has a program.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from bnrnn.config import ROOT, key_label, sweep
from bnrnn.report.schema import Keys

SCOPES = ("paper", "shorter", "other data")  # kinds of evidence, the strongest first
REMARKS = ("note", "replaced", "part", "known", "per")  # keys of a test that do not change its outcome
Number = int | float
Points = dict[str, dict[str, dict[int, Number]]]  # of a paper's curves, by row, column and update


@dataclass(frozen=True)
class Quantity:
    """A number of a run in a table.

    Args:
        what: its name in words.
        best: whether the largest or smallest recorded value counts; None for that of the selected model.
    """

    what: str
    metric: str
    digits: int
    scale: int = 1
    best: Literal["max", "min"] | None = None


@dataclass(frozen=True, kw_only=True)
class Published(Quantity):
    """A number that the paper printed for cells of a table, by row and column; the tolerance is in the same unit."""

    tolerance: Number
    cells: dict[str, dict[str, Number]]
    note: str = ""


@dataclass(frozen=True)
class Cited:
    """Numbers that the paper quotes for a model of another paper, by column."""

    model: str
    what: str
    values: dict[str, Number]


@dataclass(frozen=True)
class Curve:
    """A figure of curves by updates, with the points of the paper's curves where they could be read.

    Args:
        windows: the bounds of updates between which our curves are compared with the paper's.
        chance: the value of guessing, by column.
        reach: the levels whose time is shown, by column.
        steady: the time until the metric is within this share of its own best is shown, too.
        like: the figure of points.json that this one repeats with a metric of ours.
    """

    figure: str
    title: str
    metric: str
    windows: tuple[int, ...] = ()
    chance: dict[str, Number] = field(default_factory=dict)
    reach: dict[str, tuple[Number, ...]] = field(default_factory=dict)
    steady: Number | None = None
    like: str = ""
    points: Points = field(default_factory=dict)


@dataclass(frozen=True)
class Search:
    """A random search: its figure of a metric against an option `x`, and the best settings that the paper found."""

    figure: str
    title: str
    x: str
    metric: str
    published: dict[str, dict[str, Number]]


@dataclass(frozen=True, kw_only=True)
class PaperEntry:
    """A table or figure of a paper.

    Args:
        deviations: the numbers in notes.md that apply to it.
        paper_updates: the length of the paper's runs, of which shorter runs are the beginning.
        in_place_of: what our data stand for, in words, if they are not the paper's.
    """

    key: str
    title: str
    deviations: tuple[str, ...] = ()
    paper_updates: int | None = None
    in_place_of: str = ""

    @property
    def paper(self) -> str:
        """The key of the paper."""
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        """The key without the paper."""
        return self.key.partition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Analysis(PaperEntry):
    """An entry that a program computes.

    Args:
        analysis: the file of the program, beside claims.yaml.
        models: the key of the entry whose trained models it needs.
        numbers: what else the program reads, such as the paper's numbers.
    """

    analysis: str
    models: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def program(self) -> Path:
        """The program, relative to the checkout."""
        return Path("experiments", self.paper, self.analysis)

    def module(self) -> ModuleType:
        """Its module, with `render(result)` and `draw(result, path)`."""
        return load_module(ROOT / self.program)


def load_module(path: Path) -> ModuleType:
    """The module of a program in experiments/, which is no package."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class Table(PaperEntry):
    """An entry of runs. Its rows and columns are options of its recipe's grid.

    Args:
        rows_shown: the rows, if they are others than those of the grid.
        borrows: runs of another entry that a row shows too: its key as `experiment`, and their overrides.
        enough_updates: the least updates of a run that counts like one of the paper's length if validation selected a
            model before its end; None if only the paper's length counts.
        measured: quantities without a published number.
    """

    rows: str
    cols: str
    rows_shown: tuple[str, ...] = ()
    borrows: dict[str, dict[str, str]] = field(default_factory=dict)
    enough_updates: int | None = None
    published: tuple[Published, ...] = ()
    measured: tuple[Quantity, ...] = ()
    cited: tuple[Cited, ...] = ()
    curves: tuple[Curve, ...] = ()
    search: Search | None = None

    @property
    def grid(self) -> dict[str, list[str]]:
        """The grid of the recipe, with the rows that the table shows beside it."""
        own = sweep(self.key)
        return own | ({self.rows: list(self.rows_shown)} if self.rows_shown else {})

    @property
    def row_names(self) -> list[str]:
        """All rows."""
        return self.grid[self.rows]

    @property
    def row_title(self) -> str:
        """What the rows are, such as "model" or "initial gamma"."""
        return key_label(self.rows)

    @property
    def col_names(self) -> list[str]:
        """All columns."""
        return self.grid[self.cols]

    @property
    def num_seeds(self) -> int:
        """How many runs of a cell the recipe plans."""
        return len(sweep(self.key)["seed"])

    def has_cell(self, overrides: Mapping[str, str], row: str, col: str) -> bool:
        """Whether these overrides are those of a cell, of any seed and length, and no others."""
        return (overrides.get(self.rows), overrides.get(self.cols)) == (row, col) and is_within(self.grid, overrides)


def is_within(grid: Mapping[str, list[str]], overrides: Mapping[str, str]) -> bool:
    """Whether a run with these overrides is a cell of a grid, of any seed and length."""
    return all(v in grid.get(k, []) for k, v in cell_of(overrides).items())


def cell_of(overrides: Mapping[str, str]) -> dict[str, str]:
    """The overrides of a run that say which cell it is of: those of its seed and length are left out."""
    return {k: v for k, v in overrides.items() if k != "seed" and not k.startswith("budget.")}


@dataclass(frozen=True)
class Side:
    """A selection of runs that a test compares.

    Args:
        key: of the entry with the runs.
        overrides: those that the runs must have, as text.
        title: how claims.yaml describes the side.
    """

    key: str
    overrides: dict[str, str]
    metrics: tuple[str, ...]
    title: str


@dataclass(frozen=True, kw_only=True)
class ClaimTest:
    """A test of a claim: a rule, and the runs or the analysis that it judges.

    Args:
        key: of the entry on whose page its runs or its analysis are.
        sides: the runs that the rule compares; () for an analysis.
        parameters: the values of the rule's parameters, or of those of the property.
        words: everything else that claims.yaml says about the test, for the page of the claim.
        text: the keys that determine the outcome, by which the test is found in the history of claims.yaml.
        place: its file and line.
        property_name: the function of the analysis that decides for every draw.
        updates: the number of updates up to which runs are compared; None for whole runs.
        best_of: the option of which each side takes its best value.
        known: what the rule's author had seen before.
        per: the unit of a trend's slope.
    """

    claim: str
    key: str
    sides: tuple[Side, ...]
    parameters: dict[str, Any]
    words: tuple[str, ...]
    text: str
    place: str
    property_name: str
    scope: Literal["paper", "shorter", "other data"]
    rule: str
    updates: int | None = None
    best_of: str = ""
    part: str = ""
    note: str = ""
    replaced: str = ""
    known: str = ""
    per: str = "1.0"

    @property
    def free(self) -> str:
        """The option of which a side has all values of the grid, for rules that compare them; "" if there is none."""
        return self.best_of or self.parameters.get("key", "")


def text_of(test: Mapping[str, Any]) -> str:
    """The keys of a test that can change its outcome, as text."""
    return json.dumps({k: v for k, v in test.items() if k not in REMARKS}, sort_keys=True)


@dataclass(frozen=True)
class Claim:
    """What a paper says, where, and the tests that judge it.

    Args:
        about: "quality" if it is about how well trained models end, of which early runs show nothing.
        main: whether README shows it.
    """

    name: str
    paper: str
    says: str
    where: str
    tests: tuple[ClaimTest, ...]
    about: Literal["", "quality"] = ""
    main: bool = False


@dataclass(frozen=True)
class Paper:
    """The content of a claims.yaml: entries by name, what figures without an entry need, and all of it as `given`."""

    path: Path
    title: str
    needs: dict[str, tuple[str, ...]]
    entries: dict[str, PaperEntry]
    given: Keys

    @property
    def key(self) -> str:
        """Its folder, such as cooijmans2016."""
        return self.path.parent.name
