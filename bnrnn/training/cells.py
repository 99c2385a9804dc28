"""The cells of a sweep: their configurations and the folders of their runs."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from bnrnn.config import CONF, compose_config, from_yaml, grid_of, sweep
from bnrnn.errors import BnrnnError
from bnrnn.training.search import apply_trial


@dataclass
class Cell:
    """One cell of a sweep.

    Args:
        choices: all overrides, from which the configuration is composed.
        overrides: the overrides that are part of the folder's name and of the result.
        budget: the name of the budget.
        folder: the folder of the run.
        done: number of updates so far; set by `bnrnn.commands.plan.cells`.
        state: finished, diverged, begun or to do; set by `bnrnn.commands.plan.cells`.
    """

    choices: list[str]
    overrides: dict[str, str]
    budget: str
    folder: Path
    done: int = 0
    state: str = "to do"

    @cached_property
    def cfg(self) -> DictConfig:
        """The configuration. It is composed at the first access, which takes a good part of a second."""
        return apply_trial(compose_config(*self.choices))

    @property
    def sweep_folder(self) -> Path:
        """The folder of all runs of the sweep: that of the output, the experiment and the budget."""
        return sweep_folder(self.folder, self.overrides)

    @property
    def experiment(self) -> str:
        """The key of the experiment."""
        return next(c.split("=", 1)[1] for c in self.choices if c.startswith("experiment="))

    @property
    def title(self) -> str:
        """The name for messages: the experiment and the overrides."""
        return " ".join([self.experiment, *(f"{k}={v}" for k, v in self.overrides.items())])


def sweep_folder(run_dir: Path, overrides: dict[str, str]) -> Path:
    """The folder above that of a run: several levels above if the name has slashes, as in model=captioner/lstm."""
    return run_dir.parents[sum(text.count("/") for pair in overrides.items() for text in pair)]


def expand(arguments: list[str]) -> list[Cell]:
    """All cells that `python -m bnrnn.train` would run with these overrides, in hydra's order, each once.

    No configuration is composed here, so that expanding many sweeps is fast. Raises BnrnnError without an experiment,
    without a value, and for overrides that would give several runs one folder, or a run another folder than hydra's.
    """
    key = next((a.split("=", 1)[1] for a in arguments if a.startswith("experiment=")), None)
    if key is None:
        raise BnrnnError("experiment=<paper>/<table> is missing: add it, such as experiment=cooijmans2016/table1")
    grid = grid_of([f"{k}={','.join(values)}" for k, values in sweep(key).items()] + arguments)
    if empty := [k for k, values in grid.items() if not values]:
        raise BnrnnError(f"{empty[0]} has no values: give at least one, such as {empty[0]}=0")
    overrides, unnamed = _parsed(arguments), _unnamed()
    _check_folders(overrides)
    check_named(arguments)
    root = from_yaml((CONF / "train.yaml").read_text())
    out_dir = next((str(o.value()) for o in reversed(overrides) if o.key_or_group == "out_dir"), root["out_dir"])
    budget = next(d["budget"] for d in root["defaults"] if "budget" in d)
    choices = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    cells = [_cell({"budget": budget} | chosen, Path(out_dir, key), unnamed) for chosen in choices]
    return list({cell.folder: cell for cell in cells}.values())


def _check_folders(overrides: list[Override]) -> None:
    """Raise BnrnnError for overrides with which the folder of a run is not known."""
    for override in overrides:
        key, text = override.key_or_group, override.input_line
        if key in ("name", "budget.name"):
            raise BnrnnError(f"{text} cannot be set in a sweep, because it names the folders of its runs: leave it out")
        if key in ("out_dir", "budget") and "${" in str(text):
            raise BnrnnError(f"{text} cannot be an interpolation in a sweep: give its value")


def check_named(arguments: list[str]) -> None:
    """Raise BnrnnError for a sweep over an option that does not name folders: all its runs would have one folder."""
    unnamed = _unnamed()
    for override in _parsed(arguments):
        key, text = override.key_or_group, override.input_line
        if key in unnamed and key not in ("budget", "experiment") and override.is_sweep_override():
            raise BnrnnError(f"{text} has several values, but the folders of runs are not named by {key}: give one")


def _parsed(arguments: list[str]) -> list[Override]:
    """The overrides that are not hydra's own."""
    return [o for o in OverridesParser.create().parse_overrides(arguments) if not o.is_hydra_override()]


def _unnamed() -> list[str]:
    """The options that do not name the folder of a run."""
    root = from_yaml((CONF / "train.yaml").read_text())
    return root["hydra"]["job"]["config"]["override_dirname"]["exclude_keys"]


def _cell(chosen: dict[str, str], parent: Path, unnamed: list[str]) -> Cell:
    named = {k: v for k, v in chosen.items() if k.lstrip("+") not in unnamed}
    name = ",".join(sorted(f"{k}={v}" for k, v in named.items()))  # hydra sorts the overrides, not their keys
    overrides = dict(sorted((k.lstrip("+"), v) for k, v in named.items()))
    budget = chosen["budget"].strip("'\"")
    return Cell([f"{k}={v}" for k, v in chosen.items()], overrides, budget, parent / budget / name)
