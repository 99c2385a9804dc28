"""Reads what was claimed (experiments/), how to train it (conf/experiment/) and what was measured (results/)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from bnrnn import checkpoint
from bnrnn.data.base import model_sizes
from bnrnn.errors import BnrnnError
from bnrnn.log import read_jsonl
from bnrnn.metrics import from_loss, sign
from bnrnn.results import FILE, Result, config_hash, config_record
from bnrnn.search import apply_trial

ROOT = Path(__file__).parent.parent
NOT_TABLES = ("paper", "claims")  # sections of a claims.yaml that are no table or figure


@dataclass(frozen=True)
class Run:
    """A finished run: its result, its records, and whether its recipe has changed since."""

    folder: Path
    overrides: dict[str, str]
    budget: str
    result: Result
    records: list[dict[str, Any]]
    stale: bool

    @property
    def seed(self) -> str:
        return self.overrides["seed"]

    @property
    def seconds_per_update(self) -> float:
        return self.result.seconds / max(1, self.result.updates)

    @property
    def engine(self) -> str:
        """What its seconds depend on, as far as it is recorded: engine of the recurrence, hardware, precision if it is
        not float32, and threads if several. Results from before there was a choice name no engine."""
        environment = self.result.environment
        num_threads = environment.get("num_threads", 1)
        name = f"{environment.get('backend', 'reference')} on {environment.get('hardware', environment['device'])}"
        precision = environment.get("precision", "float32")
        name += "" if precision == "float32" else f", {precision}"
        return name if num_threads == 1 else f"{name}, {num_threads} threads"

    @property
    def drawn(self) -> dict[str, Any]:
        """What a trial of a random search drew, by key."""
        search = self.result.config.get("search", {})
        return {key: self._configured(key) for key in search.get("draws", {})}

    def _configured(self, key: str) -> Any:
        value: Any = self.result.config
        for part in key.split("."):
            value = value[part]
        return value

    def in_grid(self, key: str) -> bool:
        """Whether it is a cell of the experiment, of any seed and length, with no override beyond."""
        grid, own = sweep(key), {k: v for k, v in self.overrides.items() if k != "seed" and not k.startswith("budget.")}
        return all(v in grid.get(k, []) for k, v in own.items())

    @property
    def full_length(self) -> bool:
        """Whether it has the paper's length."""
        return self.budget == "paper" and not any(k.startswith("budget.") for k in self.overrides)

    @property
    def metric(self) -> str:
        """What people read of it: ppl, bpc, error or accuracy."""
        return next((m for m in ("ppl", "bpc", "error") if f"valid/{m}" in self.result.metrics), "accuracy")

    def series(self, metric: str) -> dict[int, float]:
        """The metric by update. What is recorded every few updates in training is averaged over the time between
        evaluations, as a paper's curve per epoch is; `train/ppl` and `train/bpc` are those of the average loss."""
        split, name = metric.split("/") if "/" in metric else ("", metric)
        if split != "train":
            return {int(r["update"]): r[metric] for r in self.records if r.get(metric) is not None}
        recorded = "train/loss" if name in ("ppl", "bpc") else metric
        series, total, seen, counted = {}, 0.0, 0, 0
        for record in self.records:
            update = int(record["update"])
            if recorded in record and record[recorded] is None:
                break  # not a number: the run has diverged
            if recorded in record:
                total, seen = total + record[recorded] * (update - seen), update
            elif seen > counted:
                average = total / (seen - counted)
                series[update] = from_loss(name, average).get(name, average)
                total, counted = 0.0, seen
        return series

    def measured(self, metric: str) -> float:
        """One number: `train/...` of the best epoch; else of the selected model, with population statistics if both
        kinds were measured, unless `valid/..._batch_statistics` asks for those of the batch."""
        if metric.startswith("valid/") and metric.endswith("_batch_statistics"):
            return self.result.metrics[metric.removesuffix("_batch_statistics")]
        if metric.startswith("train/"):
            return min(self.series(metric).values())
        return self.result.metrics.get(f"{metric}_population_statistics", self.result.metrics[metric])

    def best_until(self, metric: str, updates: int | None) -> float:
        """The best value of a curve up to this update; what was `measured` without one, or where there is no curve.

        Raises BnrnnError where the result has no such number.
        """
        curve = metric.removesuffix("_batch_statistics") if metric.startswith("valid/") else metric
        series = {u: v for u, v in self.series(curve).items() if u <= updates} if updates is not None else {}
        if series:
            return sign(metric) * max(sign(metric) * value for value in series.values())
        try:
            return self.measured(metric)
        except (KeyError, ValueError):
            raise BnrnnError(f"{self.folder / FILE} has no {metric}: its run was made before it was recorded") from None

    def peak(self, metric: str, updates: int | None = None) -> float:
        """The largest recorded value up to this update."""
        return max(
            r[metric] for r in self.records if r.get(metric) is not None and r["update"] <= (updates or math.inf)
        )

    def lowest(self, metric: str) -> float:
        """The lowest recorded value."""
        return min(r[metric] for r in self.records if r.get(metric) is not None)

    def reached(self, metric: str, level: float) -> tuple[float, float] | None:
        """Update and seconds of the first evaluation at this level or better: more of an accuracy, less of all else."""
        better = sign(metric)
        update = next((u for u, value in self.series(metric).items() if better * value >= better * level), None)
        return None if update is None else (float(update), self.series("seconds")[update])

    def steady(self, metric: str, share: float) -> tuple[float, float] | None:
        """Update and seconds of the first evaluation of a loss within this share of the lowest that the run had."""
        values = self.series(metric).values()  # none of a run that diverged before its first evaluation
        return self.reached(metric, (1 + share) * min(values)) if values else None


def load_claim(key: str) -> dict[str, Any]:
    """What a paper printed under `<paper>/<table>`; {} for an experiment that no paper has, such as quickstart."""
    paper, _, name = key.partition("/")
    path = ROOT / "experiments" / paper / "claims.yaml"
    if not name or not path.exists():
        return {}
    claims = yaml.safe_load(path.read_text())
    if name not in claims:
        raise BnrnnError(f"{path} has no entry {name!r}: it has {', '.join(k for k in claims if k not in NOT_TABLES)}")
    return claims[name]


def claim_keys() -> list[str]:
    """Every `<paper>/<table>` that is claimed."""
    files = sorted((ROOT / "experiments").glob("*/claims.yaml"))
    return [
        f"{f.parent.name}/{name}" for f in files for name in yaml.safe_load(f.read_text()) if name not in NOT_TABLES
    ]


def load_analysis(key: str) -> ModuleType | None:
    """The module behind a claim that needs no training, with `render(result)` and `draw(result, path)`."""
    name = load_claim(key).get("analysis")
    if name is None:
        return None
    spec = spec_from_file_location(Path(name).stem, ROOT / "experiments" / key.split("/")[0] / name)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compose_config(*overrides: str, hydra: bool = False) -> DictConfig:
    """The configuration that `python -m bnrnn.train` would have with these overrides."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", list(overrides), return_hydra_config=hydra)


@cache
def sweep(key: str) -> dict[str, list[str]]:
    """The grid of an experiment: the values of each swept key, {} for a single run.

    Read from the experiment's own file, because composing takes a good part of a second.
    """
    path = ROOT / "conf" / "experiment" / f"{key}.yaml"
    if not path.exists():
        raise BnrnnError(
            f"experiment={key} is unknown: there is no {path.relative_to(ROOT)}; use a file that exists there"
        )
    sweeper = yaml.safe_load(path.read_text()).get("hydra", {}).get("sweeper", {})
    return grid_of(f"{key}={values}" for key, values in sweeper.get("params", {}).items())


def grid_of(overrides: Iterable[str]) -> dict[str, list[str]]:
    """The values of each override, written as hydra writes them in the names of folders: 1e-2 is 0.01.

    As in hydra's own sweeper a later override replaces an earlier one, in its place.
    """
    grid = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_hydra_override():
            swept = override.is_sweep_override()
            values = override.sweep_string_iterator() if swept else [override.get_value_element_as_str()]
            grid[override.get_key_element()] = list(values)
    return grid


def run_files(key: str, results_dir: Path) -> list[Path]:
    """The results of an experiment's finished runs."""
    return sorted((results_dir / key).glob(f"*/*/{FILE}"))


@cache
def _recipe(*overrides: str) -> DictConfig:
    """A configuration that is composed once: it takes a good part of a second."""
    return compose_config(*overrides)


def load_runs(key: str, results_dir: Path) -> list[Run]:
    """The finished runs of an experiment, in the order of its grid."""
    runs = []
    for path in run_files(key, results_dir):
        result = Result.read(path)
        overrides = result.overrides
        budget = path.parent.parent.name
        choices = (f"budget={budget}", *(f"{k}={v}" for k, v in overrides.items() if k != "seed"))
        recipe = _recipe(f"experiment={key}", *choices).copy()
        if "seed" in overrides:
            OmegaConf.update(recipe, "seed", int(overrides["seed"]))
        stale = config_hash(config_record(apply_trial(recipe))) != result.config_hash
        runs.append(Run(path.parent, overrides, budget, result, read_jsonl(path.parent / "metrics.jsonl"), stale))
    grid = sweep(key)

    def place(run: Run) -> list[int]:
        return [
            values.index(v) if (v := run.overrides.get(k, "")) in values else len(values) for k, values in grid.items()
        ]

    return sorted(runs, key=place)


def group(runs: Iterable[Run]) -> dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]]:
    """Runs that differ by their seed alone, by budget and other overrides."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        cell = tuple((k, v) for k, v in run.overrides.items() if k != "seed")
        groups.setdefault((run.budget, cell), []).append(run)
    return groups


def longest(runs: Iterable[Run]) -> list[Run]:
    """Of runs that differ by their budget alone, the longest: the others' curves are the beginning of its own."""
    kept: dict[tuple[tuple[str, str], ...], Run] = {}
    for run in runs:
        cell = tuple(run.overrides.items())
        if cell not in kept or run.result.updates > kept[cell].result.updates:
            kept[cell] = run
    return list(kept.values())


def load_trained(run: Run, data_dir: str) -> tuple[nn.Module, Any]:
    """The selected model of a run, ready for evaluation with its population statistics, and its data."""
    saved = checkpoint.load(run.folder / checkpoint.MODEL)
    if saved is None:
        raise BnrnnError(
            f"{run.folder / checkpoint.MODEL} is missing: models are not part of the repository. Remove "
            f"{run.folder} and train it again, or give other runs"
        )
    recipe = OmegaConf.create({**run.result.config, "data_dir": data_dir})
    data = instantiate(recipe.data, data_dir=data_dir)
    model = instantiate(recipe.model, **model_sizes(data))
    model.load_state_dict(saved["model"])
    return model.eval(), data


def trained_runs(key: str, results_dir: Path) -> list[Run]:
    """The longest finished runs of an experiment whose models are at hand, for analyses.

    Raises BnrnnError if there is none.
    """
    runs = [run for run in load_runs(key, results_dir) if (run.folder / checkpoint.MODEL).exists() and not run.stale]
    if not runs:
        raise BnrnnError(
            f"{results_dir / key} has no finished run with its model: train {key} first, into {results_dir}"
        )
    most = max(run.result.updates for run in runs)
    return [run for run in runs if run.in_grid(key) and run.result.updates == most]
