"""Imports run downwards and never in a circle, including those for type checkers and those inside functions."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from bnrnn.config import ROOT

FLOORS = [  # the lowest first; packages and modules on one floor do not import each other
    {"errors", "inputs"},
    {"system"},
    {"config", "metrics"},
    {"scan"},
    {"layers"},
    {"models", "data"},
    {"training"},
    {"bench"},
    {"report"},
    {"train"},
    {"commands"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "bnrnn").rglob("*.py")
}


def imported(path: Path) -> set[str]:
    """The modules of bnrnn that a file imports, anywhere in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in PATHS else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & PATHS.keys()


def room(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def test_imports_run_downwards():
    pairs = [(module, other) for module, path in PATHS.items() for other in imported(path) if module != "bnrnn"]
    across = [(module, other) for module, other in pairs if room(module) != room(other)]
    assert not [pair for pair in across if FLOOR_OF[room(pair[0])] <= FLOOR_OF[room(pair[1])]]


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules on a circle of imports, or [] if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_there_is_no_circle():
    graph = {module: imported(path) for module, path in PATHS.items()}
    assert circle_in(graph) == []
    assert "bnrnn.errors" in circle_in({**graph, "bnrnn.errors": {"bnrnn.train"}})


def test_every_package_and_module_of_the_root_has_a_floor():
    assert {room(module) for module in PATHS} - {""} == FLOOR_OF.keys()
