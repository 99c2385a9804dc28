"""The progress of a campaign: its runs, their states and the estimated time left, without any new measurement."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from hydra.errors import HydraException

from bnrnn.config import CONF, from_yaml
from bnrnn.errors import BnrnnError
from bnrnn.system.files import reading
from bnrnn.system.locks import is_being_trained
from bnrnn.training.cells import Cell, expand
from bnrnn.training.checkpoint import CHECKPOINT, compressed
from bnrnn.training.device import expected_device
from bnrnn.training.log import REMEDY, say_left_out
from bnrnn.training.results import FILE, Result

LANES = ("long", "short")
FIELDS = {  # the keys of an entry: whether it is required, a check of its value, and the expected value in words
    "experiment": (True, lambda v: isinstance(v, str), "<paper>/<table>"),
    "seeds": (True, lambda v: re.fullmatch(r"\d+(,\d+)*", str(v)), 'such as "0,1,2"'),
    "claims": (True, lambda v: _are_strings(v), "a list such as [C2, C3]"),
    "hours": (True, lambda v: isinstance(v, int | float) and v > 0, "a number above 0"),
    "overrides": (False, lambda v: _are_strings(v), "a list such as [data=pmnist]"),
    "lane": (False, lambda v: v in LANES, f"{' or '.join(LANES)}, or left out"),
    "why": (False, lambda v: isinstance(v, str), "one line of text"),
}


@dataclass
class Entry:
    """One entry of a campaign: a part of an experiment's grid.

    Args:
        claims: the claims that its runs test.
        hours: an estimate of the time of the whole entry, used until a speed is known.
        lane: the lane of workers that the entry is for (one of LANES); the others train it last. "" for all.
        cells: the runs of the entry.
    """

    title: str
    experiment: str
    claims: list[str]
    hours: float
    lane: str
    cells: list[Cell]


@dataclass
class Progress:
    """The progress of a cell. Its state is finished, diverged, running, begun or left."""

    title: str
    state: str
    done: int = 0  # updates so far
    total: int | None = None  # updates of the whole run; None if unknown before the data is loaded
    hours: float = 0.0  # time left
    measured: bool = True  # whether the hours come from a measured speed and not from the campaign's file

    @property
    def progress(self) -> str:
        return f"{self.done:,}/{'?' if self.total is None else f'{self.total:,}'}"


@dataclass
class Known:
    """Length and speed of a run, from which those of similar runs are estimated; None if unknown."""

    overrides: dict[str, str]
    budget: str
    updates: int | None  # updates of the whole run
    seconds_per_update: float | None


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def load_entries(path: Path, out_dir: Path, device: str = "") -> list[Entry]:
    """The entries of a campaign's file. Their runs train on a device if one is given.

    Raises BnrnnError for a file that cannot be read and for invalid entries.
    """
    try:
        entries = yaml.safe_load(path.read_text())  # the fast loader could crash on a user's file
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise BnrnnError(f"file={path} cannot be read ({error}): use a campaign such as conf/campaign.yaml") from None
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise BnrnnError(f"{path} must be a list of entries, each with {', '.join(FIELDS)}: see conf/campaign.yaml")
    return [_entry(given, out_dir, device, f"{path}, entry {i}") for i, given in enumerate(entries, 1)]


def _entry(given: dict[str, Any], out_dir: Path, device: str, where: str) -> Entry:
    if unknown := [str(k) for k in given if k not in FIELDS]:
        raise BnrnnError(f"{where} has the unknown keys {', '.join(unknown)}: use {', '.join(FIELDS)}")
    for key, (required, is_valid, expected) in FIELDS.items():
        if required and key not in given:
            raise BnrnnError(f"{where} has no {key}: add it, {expected}")
        if key in given and not is_valid(given[key]):
            raise BnrnnError(f"{where} has {key}: {given[key]!r}, expected {expected}")
    overrides = given.get("overrides", [])
    for override in overrides:
        if override.split("=")[0] in ("experiment", "seed", "out_dir"):
            raise BnrnnError(f"{where} has the override {override}: use the keys experiment and seeds, and out_dir=...")
    choices = [f"experiment={given['experiment']}", "budget=paper", *overrides, f"seed={given['seeds']}"]
    choices += [f"device={device}"] if device else []
    try:
        quoted = str(out_dir).replace("'", r"\'")
        cells = expand([*choices, f"out_dir='{quoted}'"])
    except (BnrnnError, HydraException) as error:
        raise BnrnnError(f"{where}: {error}") from None
    title = " ".join([given["experiment"], *overrides, f"seed={given['seeds']}"])
    return Entry(title, given["experiment"], given["claims"], float(given["hours"]), given.get("lane", ""), cells)


def runs_of(entry: Entry, out_dir: Path) -> list[Progress]:
    """The progress and the time left of each cell of an entry."""
    known = load_known(out_dir / entry.experiment, expected_device())
    return [run_of(cell, known, entry.hours / len(entry.cells)) for cell in entry.cells]


def run_of(cell: Cell, known: list[Known], share: float) -> Progress:
    """The progress and the time left of a cell. `share` is an estimate of its hours, used if no speed is known."""
    if (cell.folder / FILE).exists():
        result = Result.read(cell.folder / FILE)
        return Progress(cell.title, result.status, result.updates, result.updates)
    has_begun = any(path.exists() for path in (cell.folder / CHECKPOINT, compressed(cell.folder / CHECKPOINT)))
    state = "running" if is_being_trained(cell.folder) else "begun" if has_begun else "left"
    done, seconds = last_record(cell.folder) if state != "left" else (0, 0.0)
    total = total_updates(cell, known)
    speed = seconds / done if done else nearest_speed(cell, known)
    if total is None or speed is None:
        return Progress(cell.title, state, done, total, max(0.0, share - seconds / 3600), measured=False)
    return Progress(cell.title, state, done, total, max(0, total - done) * speed / 3600)


def load_known(folder: Path, device: str | None = None, read: Callable[[Path], Result] = Result.read) -> list[Known]:
    """Length and speed of all runs of an experiment, unfinished ones too; speeds only of a device if one is given.

    Args:
        read: reads a result; it may know those that were read before.
    """
    known = []
    for run_dir in sorted(path.parent for path in folder.glob("*/**/metrics.jsonl")):
        try:
            update, seconds = last_record(run_dir)
            result = read(run_dir / FILE) if (run_dir / FILE).exists() else None
        except BnrnnError as error:
            say_left_out(str(error))
            continue
        budget, *name = run_dir.relative_to(folder).parts
        run = Known(_overrides("/".join(name)), budget, None, seconds / update if update else None)
        if result is not None:
            run.updates = result.updates if result.status == "finished" else None
            if device not in (None, result.environment["device"]):
                run.seconds_per_update = None
        known.append(run)
    return known


def _overrides(name: str) -> dict[str, str]:
    """The overrides in the name of a folder."""
    return {k.lstrip("+"): v for k, _, v in (pair.partition("=") for pair in name.split(","))}


def last_record(folder: Path) -> tuple[int, float]:
    """Updates and seconds in the last complete line of a run's metrics, or 0. Earlier lines are not read."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0, 0.0
    with reading(path, REMEDY, "a file of metrics"):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            lines = file.read().split(b"\n")[:-1]  # the last part is empty or an incomplete line
        record = json.loads(lines[-1]) if lines else {"update": 0, "seconds": 0.0}
        return int(record["update"]), float(record["seconds"])


def total_updates(cell: Cell, known: list[Known]) -> int | None:
    """The number of updates of a whole run. For a budget in epochs, it is known only from a run with another seed."""
    given = cell.overrides.get("budget.updates", "null")
    if given != "null":
        return int(given)
    if "budget.epochs" not in cell.overrides:
        short = _read(f"budget/{cell.budget}").get("updates")
        updates = short or _read(f"experiment/{cell.experiment}").get("budget", {}).get("updates")
        if updates is not None:
            return updates
    same = [k.updates for k in known if k.budget == cell.budget and _but_seed(k.overrides) == _but_seed(cell.overrides)]
    return next((updates for updates in same if updates is not None), None)


def nearest_speed(cell: Cell, known: list[Known]) -> float | None:
    """Seconds per update: the mean of those runs with the same setting that share the most overrides with the cell."""
    setting, mine = cell.overrides.get("setting"), _but_seed(cell.overrides)
    by_shared: dict[int, list[float]] = {}
    for run in known:
        if run.seconds_per_update is not None and run.overrides.get("setting") == setting:
            by_shared.setdefault(len(mine & _but_seed(run.overrides)), []).append(run.seconds_per_update)
    return mean(by_shared[max(by_shared)]) if by_shared else None


def _but_seed(overrides: dict[str, str]) -> set[tuple[str, str]]:
    return {(k, v) for k, v in overrides.items() if k != "seed"}


@cache
def _read(name: str) -> dict[str, Any]:
    return from_yaml((CONF / f"{name}.yaml").read_text())
