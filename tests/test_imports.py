"""Imports run downwards and in no circle, those for type checkers and those inside of functions included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from bnrnn.config import ROOT

FLOORS = [  # from the ground up; rooms on one floor do not import each other
    {"errors", "inputs", "files"},
    {"config", "metrics"},
    {"scan"},
    {"layers"},
    {"models", "data"},
    {"training"},
    {"report"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}  # what is in none is a command
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "bnrnn").rglob("*.py")
}


def imported(path: Path) -> set[str]:
    """The modules of bnrnn that a file imports, wherever in the file."""
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


def floor(module: str) -> int:
    return FLOOR_OF.get(room(module), len(FLOORS))


def test_imports_run_downwards():
    pairs = [(module, other) for module, path in PATHS.items() for other in imported(path) if module != "bnrnn"]
    across = [(module, other) for module, other in pairs if room(module) != room(other)]
    is_command = [(module, other) for module, other in across if floor(module) == floor(other) == len(FLOORS)]
    assert not [pair for pair in across if floor(pair[0]) <= floor(pair[1]) and pair not in is_command]


def test_there_is_no_circle():
    TopologicalSorter({module: imported(path) for module, path in PATHS.items()}).prepare()


def test_every_room_of_a_floor_is_there():
    assert {room(module) for module in PATHS} >= FLOOR_OF.keys()
