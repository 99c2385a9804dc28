"""Reads the claims of the papers: the entries of experiments/<paper>/claims.yaml."""

import json
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from bnrnn.config import ROOT, sweep
from bnrnn.errors import BnrnnError
from bnrnn.system.files import read_text, reading

POINTS = "points.json"  # beside claims.yaml: the points of the paper's curves
NOT_TABLES = ("paper", "claims", "needs")  # sections of a claims.yaml that are not tables or figures


@cache
def read_claims(path: Path) -> dict[str, Any]:
    """The content of a claims.yaml. Raises BnrnnError unless it has named sections."""
    remedy = "restore it with git"
    with reading(path, remedy, "a file of claims"):
        content = yaml.safe_load(read_text(path, remedy, "a file of claims"))
        sections = {**content, "paper": {}}
        if not isinstance(content["paper"], str) or not all(isinstance(part, dict) for part in sections.values()):
            raise ValueError("expected the name of the paper, and sections with keys")
        for name, claim in sections.get("claims", {}).items():
            if not {"says", "where", "tests"} <= claim.keys() or not all("rule" in test for test in claim["tests"]):
                raise ValueError(f"claim {name} needs says, where and tests, each with its rule")
    return content


def load_claim(key: str) -> dict[str, Any]:
    """The entry `<paper>/<table>` of claims.yaml; {} for an experiment without a paper, such as quickstart.

    Raises BnrnnError if the paper's claims.yaml has no such entry.
    """
    paper, _, name = key.partition("/")
    path = ROOT / "experiments" / paper / "claims.yaml"
    if not name or not path.exists():
        return {}
    claims = read_claims(path)
    if name not in claims:
        raise BnrnnError(f"{path} has no entry {name!r}: it has {', '.join(k for k in claims if k not in NOT_TABLES)}")
    entry, points = claims[name], read_points(path.with_name(POINTS))
    curves = [
        curve | ({"points": points[name]} if (name := curve.get("like", curve["figure"])) in points else {})
        for curve in entry.get("curves", [])
    ]
    return entry | ({"curves": curves} if curves else {})


@cache
def read_points(path: Path) -> dict[str, dict[str, dict[str, dict[int, float]]]]:
    """The points of a paper's curves, by figure, row, column and update; {} for a paper without this file."""
    if not path.exists():
        return {}
    with reading(path, "restore it with git", "a file of points"):
        figures = json.loads(read_text(path, "restore it with git", "a file of points"))
        return {
            f: {r: {c: dict(p) for c, p in cols.items()} for r, cols in rows.items()} for f, rows in figures.items()
        }


def rows_of(key: str) -> list[str]:
    """The rows of a table or figure: those of the recipe's sweep, or with `rows_shown` these."""
    claim = load_claim(key)
    return claim.get("rows_shown") or sweep(key)[claim["rows"]]


def load_paper(paper: str) -> str:
    """Authors, year and title of a paper by its key, such as cooijmans2016."""
    return read_claims(ROOT / "experiments" / paper / "claims.yaml")["paper"]


def needed(key: str) -> tuple[list[str], list[Path]]:
    """The recipes to train for a table or figure, and the analysis scripts to run afterwards, relative to the checkout.

    Figures and tables that have no entry of their own are listed under `needs` in claims.yaml. Raises BnrnnError for an
    unknown paper or table.
    """
    paper, _, name = key.partition("/")
    path = ROOT / "experiments" / paper / "claims.yaml"
    if not path.exists():
        raise BnrnnError(f"{key} is unknown: {path.relative_to(ROOT)} does not exist; use <paper>/<table or figure>")
    recipes, analyses = [], []
    for part in read_claims(path).get("needs", {}).get(name, [name]):
        claim = load_claim(f"{paper}/{part}")
        if "analysis" in claim:
            analyses.append(Path("experiments", paper, claim["analysis"]))
            recipes += [claim["models"]] if "models" in claim else []
        else:
            recipes.append(f"{paper}/{part}")
    return list(dict.fromkeys(recipes)), analyses


def claim_keys() -> list[str]:
    """The keys `<paper>/<table>` of all entries."""
    files = sorted((ROOT / "experiments").glob("*/claims.yaml"))
    return [f"{file.parent.name}/{name}" for file in files for name in read_claims(file) if name not in NOT_TABLES]


def load_analysis(key: str) -> ModuleType | None:
    """The module of an analysis, with `render(result)` and `draw(result, path)`; None if the entry has no analysis."""
    name = load_claim(key).get("analysis")
    if name is None:
        return None
    return load_module(ROOT / "experiments" / key.split("/")[0] / name)


def load_module(path: Path) -> ModuleType:
    """The module of a program in experiments/, which is no package."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
