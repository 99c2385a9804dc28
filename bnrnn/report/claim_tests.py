"""Reads the claims in a claims.yaml: their tests, the rules of these with the keys that they need, and their sides.

The parameters of a rule are keys of its tests. Each side must be a cell of a recipe's grid.
"""

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from bnrnn.config import CONF, from_yaml, grid_of, sweep
from bnrnn.report.claim_types import REMARKS, Analysis, Claim, ClaimTest, Paper, PaperEntry, Side, Table, text_of
from bnrnn.report.claims import WHAT, check_metric
from bnrnn.report.rules import PROPERTY, RULES
from bnrnn.report.schema import REMEDY, Keys, build, convert, listed
from bnrnn.system.files import reading

SEPARATORS = {"of": " against ", "order": " > ", "sides": ", "}  # by the key of the sides: what stands between them
Scalar = str | int | float | bool | None


def claims_of(paper: Paper) -> dict[str, Claim]:
    """The claims of a paper by name. Raises BnrnnError, with file and line, for whatever does not fit."""
    claims, content = {}, paper.given
    with reading(paper.path, REMEDY, WHAT):
        for name, given in convert(content.get("claims", Keys()), dict[str, Any], content, "claims").items():
            if not isinstance(given, Keys) or not listed(given, "tests"):
                raise content["claims"].error(f"{name} is {given!r}", "a claim with says, where and tests", name)
            tests = tuple(read_test(name, paper.key, test, paper.entries) for test in listed(given, "tests"))
            claims[name] = build(Claim, given, also=("tests",), name=name, paper=paper.key, tests=tests)
    return claims


def read_test(claim: str, paper: str, given: Keys, entries: Mapping[str, PaperEntry]) -> ClaimTest:
    """A test of a claim. Raises BnrnnError, with file and line, for an unknown rule and what the rule does not take."""
    rule, own = given.get("rule"), tuple(name for name in ClaimTest.__dataclass_fields__ if name in given)
    if rule == PROPERTY:
        entry = _entry(given, "analysis", entries, Analysis)
        names = [name for name in given if name not in (*own, "analysis", "property")]
        parameters = {name: given[name] for name in names}  # judging compares them with those of the function
        also, sides, property_name = ("analysis", "property", *names), (), _take(given, "property", str)
    elif rule in RULES:
        entry = _entry(given, "experiment", entries, Table)
        parameters = {name: _take(given, name, kind) for name, kind in RULES[rule].parameters.items()}
        pair = ("of", "than") if RULES[rule].sides == "of" else (RULES[rule].sides,)
        also, property_name = ("experiment", "metric", "where", *pair, *parameters), ""
        sides = _sides(given, pair, entry, entries)
        _check_swept(given, sides, parameters)
    else:
        raise given.error(f"claim {claim} has the rule {rule}", f"one of {', '.join([*RULES, PROPERTY])}", "rule")
    test = build(ClaimTest, given, also, claim=claim, key=f"{paper}/{entry.name}", sides=sides, parameters=parameters,
                 property_name=property_name,
                 words=_words(given, sides), text=text_of(given), place=f"{given.path}, line {given.line}")  # fmt: skip
    if test.scope == "shorter" and (test.updates is None or entry.paper_updates is None):
        raise given.error("the scope is shorter", f"updates here and paper_updates in {entry.name}", "scope")
    if test.scope == "other data" and not entry.in_place_of:
        raise given.error("the scope is other data", f"in_place_of in {entry.name}", "scope")
    return test


def _take(given: Keys, name: str, kind: Any) -> Any:
    if name not in given:
        raise given.error(f"{name} is missing", f"a key {name}, which the rule {given['rule']} needs")
    return convert(given[name], kind, given, name)


def _entry(given: Keys, key: str, entries: Mapping[str, PaperEntry], kind: type[Any]) -> Any:
    known = [name for name, entry in entries.items() if isinstance(entry, kind)]
    if given.get(key) not in known:
        raise given.error(f"{key} is {given.get(key)}", f"one of {', '.join(known)}", key)
    return entries[given[key]]


def _sides(given: Keys, keys: tuple[str, ...], table: Table, entries: Mapping[str, PaperEntry]) -> tuple[Side, ...]:
    """The sides of a test. Each must be one cell of a grid, for every seed and every value that is compared."""
    found = [_take(given, key, Any) for key in keys] if len(keys) == 2 else listed(given, keys[0])
    where, sides = convert(given.get("where", Keys()), dict[str, Scalar], given, "where"), []
    for side in found:
        if not isinstance(side, Keys):  # the list of an order or of sides has nothing else
            raise given.error(f"a side is {side!r}", "keys and values", keys[0])
        own = _entry(side, "experiment", entries, Table) if "experiment" in side else table
        metrics = convert(side.get("metric", given.get("metric", [])), str | tuple[str, ...], side, "metric")
        metrics = (metrics,) if isinstance(metrics, str) else metrics
        if not metrics and RULES[given["rule"]].reads:
            raise given.error("metric is missing", f"a key metric, which the rule {given['rule']} needs")
        for metric in metrics:
            check_metric(metric, side if "metric" in side else given)
        wanted = where | {k: v for k, v in side.items() if k not in ("metric", "experiment")}
        overrides = {name: as_override(value) for name, value in wanted.items()}
        _check_cell(side, overrides, own, given)
        sides.append(Side(own.key, overrides, metrics, _plain(side)))
    return tuple(sides)


def _check_cell(side: Keys, overrides: dict[str, str], table: Table, given: Keys) -> None:
    trained = _in_campaign(table.key)
    for name, value in overrides.items():
        known = [*table.grid.get(name, []), *trained.get(name, [])]
        if not any(same(one, value) for one in known):
            expected = f"one of {', '.join(known)}" if known else f"an option of {table.key}: {', '.join(table.grid)}"
            raise (side if name in side else given["where"]).error(f"{name} is {value}", expected, name)
    free = (given.get("best_of"), given.get("key"), "seed")
    if left := [k for k, v in sweep(table.key).items() if len(v) > 1 and k not in overrides and k not in free]:
        raise side.error(f"the side leaves {left[0]} open", f"one of {', '.join(sweep(table.key)[left[0]])}")


def _check_swept(given: Keys, sides: tuple[Side, ...], parameters: dict[str, Any]) -> None:
    """Raise BnrnnError unless the grids have the values that a rule compares: positive numbers, one `at` a side."""
    for key in ("best_of", "key"):
        for side in sides if key in given else ():
            values = sweep(side.key).get(given[key], [])
            if not values or not all(_is_positive(value) for value in values):
                expected = f"a key for which {side.key} sweeps over positive numbers"
                raise given.error(f"{key} is {given[key]}", expected, key)
    if "at" in parameters and len(parameters["at"]) != len(sides):
        raise given.error(f"at has {len(parameters['at'])} values", f"one for each of the {len(sides)} sides", "at")


def _is_positive(value: str) -> bool:
    try:
        return 0 < float(value) < math.inf
    except ValueError:
        return False


@cache
def _in_campaign(key: str) -> dict[str, list[str]]:
    """The values that the campaign gives to options of an experiment, also to those that its grid does not have."""
    values: dict[str, list[str]] = {}
    for entry in from_yaml((CONF / "campaign.yaml").read_text()):
        for name, found in grid_of(entry.get("overrides", [])).items() if entry["experiment"] == key else ():
            values.setdefault(name, []).extend(found)
    return values


def as_override(value: Scalar) -> str:
    """A value of YAML as hydra writes it in an override."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def same(one: str, other: str) -> bool:
    """Whether two overrides have the same value; numbers count by value."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def _words(given: Keys, sides: tuple[Side, ...]) -> tuple[str, ...]:
    """What a page says of a test beside its rule and its entry."""
    skip = ("scope", "rule", *SEPARATORS, "than", "where", "experiment", "analysis", *REMARKS)
    separator = next((text for key, text in SEPARATORS.items() if key in given), "")
    words = [_plain(given["where"])] if "where" in given else []
    words += [separator.join(side.title for side in sides)] if sides else []
    words += [f"{k} {_plain(v)}" for k, v in given.items() if k not in skip]
    return (*words, *(given[key] for key in ("part", "note") if key in given))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={_plain(v)}" for k, v in value.items()) or "recipe"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
