"""Reads the finished runs of an experiment from results/."""

import json
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bnrnn.config import check_files, compose_config, sweep
from bnrnn.data.base import FILE as FILE_ORDER
from bnrnn.data.base import sha256
from bnrnn.errors import BnrnnError
from bnrnn.metrics import READ, from_loss, sign
from bnrnn.report.claims import load_claim, rows_of
from bnrnn.training.log import METRICS, REMEDY, record_lines
from bnrnn.training.pieces import file_order_until
from bnrnn.training.results import FILE, Result, config_hash, config_record, flat
from bnrnn.training.search import apply_trial


@dataclass(frozen=True)
class Run:
    """A finished run: its result, its records, and whether its recipe has changed since it was trained (`stale`)."""

    folder: Path
    overrides: dict[str, str]
    budget: str
    result: Result
    records: list[dict[str, Any]]
    stale: bool

    @property
    def seed(self) -> str:
        """The seed, as text: runs are paired by it."""
        return self.overrides.get("seed", str(self.result.config["seed"]))

    @property
    def seconds_per_update(self) -> float:
        """Wall-clock seconds of an update, without evaluations."""
        return self.result.seconds / max(1, self.result.updates)

    @property
    def engine(self) -> str:
        """The engine and the hardware, on which times depend, with the precision if it is not float32 and the number
        of threads if there are several. Old results do not name an engine: they used the reference."""
        environment = self.result.environment
        num_threads = environment.get("num_threads", 1)
        name = f"{environment.get('backend', 'reference')} on {environment.get('hardware', environment['device'])}"
        precision = environment.get("precision", "float32")
        name += "" if precision == "float32" else f", {precision}"
        return name if num_threads == 1 else f"{name}, {num_threads} threads"

    @property
    def drawn(self) -> dict[str, Any]:
        """The values that a trial of a random search drew, by key."""
        search = self.result.config.get("search", {})
        return {key: self._configured(key) for key in search.get("draws", {})}

    def _configured(self, key: str) -> Any:
        value: Any = self.result.config
        for part in key.split("."):
            value = value[part]
        return value

    def in_grid(self, key: str) -> bool:
        """Whether the run is a cell of the experiment's grid, of any seed and length, without other overrides.

        The rows that its table shows beside those of the grid count too.
        """
        claim = load_claim(key)
        grid = sweep(key) | ({claim["rows"]: rows_of(key)} if claim.get("rows_shown") else {})
        own = {k: v for k, v in self.overrides.items() if k != "seed" and not k.startswith("budget.")}
        return all(v in grid.get(k, []) for k, v in own.items())

    @property
    def full_length(self) -> bool:
        """Whether the run has the paper's length."""
        return self.budget == "paper" and not any(k.startswith("budget.") for k in self.overrides)

    @property
    def has_batch_norm(self) -> bool:
        """Whether the model has batch normalization: only then does an evaluation depend on the order of sequences."""
        model = flat(self.result.config.get("model", {}))
        return any(key.rpartition(".")[2] == "gamma_init" and value is not None for key, value in model.items())

    @property
    def file_order_until(self) -> float:
        """The update before which the batch statistics of evaluations are of batches in the order of the file, although
        the data is shuffled now (D7): 0 if none are, infinity if all are."""
        data = self.result.config.get("data", {}).get("_target_")
        if data is None or not self.has_batch_norm or get_class(data).evaluation_orders[0] == FILE_ORDER:
            return 0.0
        return file_order_until(self.result.pieces or [{"update": 0, **self.result.environment}])

    @property
    def in_file_order(self) -> bool:
        """Whether a part of the run was evaluated in the order of the file, although the data is shuffled now."""
        return self.file_order_until > 0

    def diverged(self, updates: int | None = None) -> bool:
        """Whether the run diverged, or if `updates` are given, whether it did so within these."""
        return self.result.status == "diverged" and (updates is None or self.result.updates <= updates)

    @property
    def metric(self) -> str:
        """The name of the main metric of the run."""
        return next((name for name in READ if f"valid/{name}" in self.result.metrics), READ[-1])

    def series(self, metric: str) -> dict[int, float]:
        """The metric by update. Training metrics, which are recorded every few updates, are averaged between
        evaluations, like a paper's curve per epoch. `train/ppl` and `train/bpc` are computed from the average loss."""
        split, name = metric.split("/") if "/" in metric else ("", metric)
        if split != "train":
            return {int(r["update"]): r[metric] for r in self.records if r.get(metric) is not None}
        recorded = "train/loss" if from_loss(name, 0.0) else metric
        series, total, seen, counted = {}, 0.0, 0, 0
        for record in self.records:
            update = int(record["update"])
            if recorded in record and record[recorded] is None:
                break  # null stands for a value that is not finite: the run has diverged
            if recorded in record:
                total, seen = total + record[recorded] * (update - seen), update
            elif seen > counted:
                average = total / (seen - counted)
                series[update] = from_loss(name, average).get(name, average)
                total, counted = 0.0, seen
        return series

    def mean_within(self, metric: str, low: int, high: int) -> float | None:
        """The mean of the metric over the evaluations after update `low` and up to `high`; None without one."""
        values = [value for update, value in self.series(metric).items() if low < update <= high]
        return mean(values) if values else None

    def measured(self, metric: str) -> float:
        """One number for a metric. `train/...` is the one of the best epoch. Others are those of the selected model,
        with population statistics if these were measured; `valid/..._batch_statistics` selects batch statistics."""
        if metric.startswith("valid/") and metric.endswith("_batch_statistics"):
            return self.result.metrics[metric.removesuffix("_batch_statistics")]
        if metric.startswith("train/"):
            return min(self.series(metric).values())
        return self.result.metrics.get(f"{metric}_population_statistics", self.result.metrics[metric])

    def best_until(self, metric: str, updates: int | None) -> float:
        """The best value of a curve up to this update. The `measured` value without `updates`, or without a curve of a
        run that ends there.

        Raises BnrnnError if the result has no such number.
        """
        curve = metric.removesuffix("_batch_statistics") if metric.startswith("valid/") else metric
        series = {u: v for u, v in self.series(curve).items() if u <= updates} if updates is not None else {}
        if series:
            return sign(metric) * max(sign(metric) * value for value in series.values())
        if updates is not None and self.result.updates > updates:
            raise BnrnnError(f"{self.folder / METRICS} has no {metric} up to update {updates:,}: evaluate more often")
        try:
            return self.measured(metric)
        except (KeyError, ValueError):
            raise BnrnnError(f"{self.folder / FILE} has no {metric}: train again, the run did not record it") from None

    def peak(self, metric: str, updates: int | None = None) -> float:
        """The largest recorded finite value up to this update."""
        return max(
            r[metric] for r in self.records if r.get(metric) is not None and r["update"] <= (updates or math.inf)
        )

    def unsteadiness(self, updates: int | None = None) -> float:
        """By how much the recorded training loss lies above its lowest value so far: the mean logarithm of their ratio
        over all records up to this update. A loss that only falls has 0."""
        losses = [r["train/loss"] for r in self.records if r.get("train/loss") and r["update"] <= (updates or math.inf)]
        return mean(math.log(loss / least) for loss, least in zip(losses, accumulate(losses, min), strict=True))

    def always_finite(self, metric: str, updates: int | None = None) -> bool:
        """Whether all values up to this update were finite; null stands for one that was not."""
        return all(r.get(metric, 0) is not None for r in self.records if r["update"] <= (updates or math.inf))

    def lowest(self, metric: str) -> float:
        """The lowest recorded value."""
        return min(r[metric] for r in self.records if r.get(metric) is not None)

    def reached(self, metric: str, level: float) -> tuple[float, float] | None:
        """Update and seconds of the first evaluation that reaches this level or a better one; None if none does."""
        better = sign(metric)
        update = next((u for u, value in self.series(metric).items() if better * value >= better * level), None)
        return None if update is None else (float(update), self.series("seconds")[update])

    def steady(self, metric: str, share: float, updates: int | None = None) -> tuple[float, float] | None:
        """Update and seconds of the first evaluation at which a loss is within this share of its lowest value up to
        `updates`, or in the whole run."""
        values = [v for u, v in self.series(metric).items() if u <= (updates or math.inf)]
        return self.reached(metric, (1 + share) * min(values)) if values else None  # none if it diverged at once


def depends_on_order(metric: str) -> bool:
    """Whether a metric is measured with batch statistics, and so depends on the order of sequences."""
    return metric.endswith("_batch_statistics") or (
        metric.startswith("valid/") and not any(kind in metric for kind in ("population", "shared", "_last"))
    )


def order_in_words(run: Run) -> str:
    """The order of sequences in the evaluations of a run, and from which update on if it changed."""
    order, until = run.result.evaluation_order, run.file_order_until
    return f"{order}, in the order of the file before update {until:,.0f}" if 0 < until < math.inf else order


def run_files(key: str, results_dir: Path) -> list[Path]:
    """The result files of an experiment. An override such as model=captioner/lstm makes a folder one level deeper.

    Folders may be links, such as those of runs that were moved to another disk.
    """
    folders = os.walk(results_dir / key, followlinks=True)
    found = (Path(folder, FILE) for folder, names, files in folders if FILE in (*names, *files))
    return sorted(path for path in found if path.parent != results_dir / key)


@cache
def _recipe(*overrides: str) -> DictConfig:
    """A cached configuration: composing takes a good part of a second."""
    return compose_config(*overrides)


def is_stale(key: str, budget: str, result: Result) -> bool:
    """Whether the recipe of an experiment has changed since this result was made.

    A result is also stale if the recipe no longer has one of its overrides, because an option was renamed or removed.
    """
    overrides = {k: v for k, v in result.overrides.items() if k != "seed"}
    choices = [k if k.startswith("~") and not v else f"{k}={v}" for k, v in overrides.items()]
    try:
        recipe = _recipe(f"experiment={key}", f"budget={budget}", *choices).copy()
        if "seed" in result.overrides:
            OmegaConf.update(recipe, "seed", int(result.overrides["seed"]))
        return config_hash(config_record(apply_trial(recipe))) != result.config_hash
    except (BnrnnError, HydraException, OmegaConfBaseException):
        check_files()
        return True


def read_run(key: str, path: Path, results_dir: Path) -> tuple[str, Result, list[dict[str, Any]]]:
    """The budget, the result and the records of a run. Raises BnrnnError if they are damaged or of another run."""
    result = Result.read(path)
    budget, *name = path.relative_to(results_dir / key).parts[:-1]
    if not is_named_by("/".join(name), result.overrides):
        raise BnrnnError(
            f"{path.parent} has the result of another run ({', '.join(f'{k}={v}' for k, v in result.overrides.items())}"
            "): move it to the folder of that run, or remove it"
        )
    lines = record_lines(path.parent / METRICS)
    if result.records_sha256 not in (None, sha256(b"".join(lines))):
        raise BnrnnError(f"{path.parent / METRICS} has other records than those to which {FILE} belongs: {REMEDY}")
    return budget, result, [json.loads(line) for line in lines]


def is_named_by(folder: str, overrides: dict[str, str]) -> bool:
    """Whether the name of a run's folder has these overrides and no others. Values of deletions are not compared."""
    rest = re.sub(r",\++", ",", f",{folder},") if folder else ","
    for key, value in overrides.items():
        if key.startswith("~"):
            rest = re.sub(rf",{re.escape(key)}(=[^,]*)?(?=,)", "", rest, count=1)
        elif f",{key}={value}," not in rest:
            return False
        else:
            rest = rest.replace(f",{key}={value},", ",", 1)
    return rest == ","


@cache
def say_left_out(message: str) -> None:
    """Report once, beside the pages, which only programs read, that a run is missing in them."""
    print(f"left out: {message}", file=sys.stderr, flush=True)


def load_runs(key: str, results_dir: Path) -> list[Run]:
    """The finished runs of an experiment, in the order of its grid. Damaged ones are reported and left out."""
    runs = []
    for path in run_files(key, results_dir):
        try:
            budget, result, records = read_run(key, path, results_dir)
        except BnrnnError as error:
            say_left_out(str(error))
        else:
            runs.append(Run(path.parent, result.overrides, budget, result, records, is_stale(key, budget, result)))
    grid = sweep(key)

    def place(run: Run) -> list[int]:
        return [
            values.index(v) if (v := run.overrides.get(k, "")) in values else len(values) for k, values in grid.items()
        ]

    return sorted(runs, key=place)


def load_borrowed(key: str, results_dir: Path) -> list[Run]:
    """The finished runs of other experiments that rows of this one show too, as runs of these rows (`borrows`)."""
    claim, found = load_claim(key), []
    for row, given in claim.get("borrows", {}).items():
        where = {name: value for name, value in given.items() if name != "experiment"}
        for run in load_runs(given["experiment"], results_dir):
            own = {name: value for name, value in run.overrides.items() if name in where}
            if own == where and run.in_grid(given["experiment"]):
                found.append(replace(run, overrides=run.overrides | {claim["rows"]: row}))
    return found


def in_figures(key: str, runs: Iterable[Run]) -> list[Run]:
    """The runs that the figures of an experiment show: those of its recipe's grid, of any length."""
    return [run for run in runs if not run.stale and run.in_grid(key)]


def group(runs: Iterable[Run]) -> dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]]:
    """Group runs that differ only in their seed, by budget and other overrides."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        cell = tuple((k, v) for k, v in run.overrides.items() if k != "seed")
        groups.setdefault((run.budget, cell), []).append(run)
    return groups


def longest(runs: Iterable[Run]) -> list[Run]:
    """Keep the longest of the runs that differ only in their budget.

    Curves of the others are its beginning, unless the program changed in between.
    """
    kept: dict[frozenset[tuple[str, str]], Run] = {}
    for run in runs:
        cell = frozenset((k, v) for k, v in run.overrides.items() if not k.startswith("budget."))
        if cell not in kept or run.result.updates > kept[cell].result.updates:
            kept[cell] = run
    return list(kept.values())
