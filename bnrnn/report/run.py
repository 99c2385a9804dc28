"""One run: its result, its records, and the numbers that tables and figures take from them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from hydra.utils import get_class

from bnrnn.data.base import FILE as FILE_ORDER
from bnrnn.errors import BnrnnError
from bnrnn.metrics import READ, from_loss, sign
from bnrnn.report.summary import averaged, has_gamma
from bnrnn.training.pieces import file_order_until
from bnrnn.training.results import FILE, METRICS, Result, flat, is_stale

LENGTH = {"budget.updates", "budget.epochs"}  # the overrides that only change the length of a run
IN_FILE_ORDER = "\\*"  # marks numbers of batch statistics in the order of the file


@dataclass(frozen=True)
class Run:
    """A run that was read: its result and its records.

    Args:
        overrides: those of the result or, for a run that a row of another table borrows, with those of this row.
        records_sha256: the checksum of the records.
    """

    folder: Path
    overrides: dict[str, str]
    budget: str
    result: Result
    records: list[dict[str, Any]]
    records_sha256: str = ""

    @cached_property
    def stale(self) -> bool:
        """Whether the recipe has changed since the run was trained. This takes time, so it is found out when asked."""
        return is_stale(self.result.name, self.budget, self.result)

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
        values = flat(self.result.config)
        return {key: values[key] for key in self.result.config.get("search", {}).get("draws", {})}

    def is_whole(self, enough: int | None = None) -> bool:
        """Whether the run has the paper's length.

        Args:
            enough: a run of so many updates counts too, if validation selected a model before its end.
        """
        changed = {k for k in self.overrides if k.startswith("budget.")}
        if self.budget != "paper" or not changed <= LENGTH:
            return False
        is_long_enough = enough is not None and self.result.updates >= enough
        return not changed or (is_long_enough and self.result.best_update < self.result.updates)

    @property
    def has_batch_norm(self) -> bool:
        """Whether the model has batch normalization: only then does an evaluation depend on the order of sequences."""
        return has_gamma(self.result.config.get("model", {}))

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
        if not from_loss(name, 0.0):
            return averaged(self.records, metric)
        return {update: from_loss(name, loss)[name] for update, loss in averaged(self.records, "train/loss").items()}

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


def name_of(overrides: Iterable[tuple[str, Any]]) -> str:
    """The name of a run or a cell in text: its overrides without the folders of their keys."""
    return " ".join(f"{key.split('.')[-1]}={value}" for key, value in overrides)


def marked(text: str, runs: list[Run], metric: str) -> str:
    """The text with a mark if it is of batch statistics of runs that were evaluated in the order of the file."""
    return f"{text} {IN_FILE_ORDER}" if depends_on_order(metric) and any(run.in_file_order for run in runs) else text


def with_footnote(table: str) -> str:
    """A table with the meaning of the mark, if the table has one."""
    about = (
        "evaluated in the order of the file; the authors' evaluations and our later ones are shuffled (see the notes)"
    )
    return f"{table}\n{IN_FILE_ORDER} {about}.\n" if IN_FILE_ORDER in table else table
