"""Configurations: composing them, the grid of a sweep, the classes and labels that the files in conf/ name."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict

from bnrnn.errors import BnrnnError

PACKAGE = Path(__file__).parent


def root() -> Path:
    """The folder with conf/ and experiments/: the checkout, or the package itself if it was installed from a wheel."""
    return PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent


ROOT = root()
CONF = ROOT / "conf"
LABELED = ("model", "data")  # nodes of a configuration that may have a label; a setting's stands at the root


def compose_config(*overrides: str, hydra: bool = False) -> DictConfig:
    """The configuration that `python -m bnrnn.train` would have with these overrides."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return without_labels(compose("train", list(overrides), return_hydra_config=hydra))


def without_labels(cfg: DictConfig) -> DictConfig:
    """The configuration without labels, which only people read: they are no part of a run's identity."""
    cfg = cfg.copy()
    with open_dict(cfg):
        for node in (cfg, *(cfg[name] for name in LABELED)):
            node.pop("label", None)
    return cfg


@cache
def sweep(key: str) -> dict[str, list[str]]:
    """The grid of an experiment: the values of each swept key, {} for a single run.

    Read from the experiment's own file, because composing takes a good part of a second.
    """
    path = CONF / "experiment" / f"{key}.yaml"
    if not path.exists():
        raise BnrnnError(
            f"experiment={key} is unknown: there is no {path.relative_to(ROOT)}; use a file that exists there"
        )
    sweeper = yaml.safe_load(path.read_text()).get("hydra", {}).get("sweeper", {})
    return grid_of(f"{key}={values}" for key, values in sweeper.get("params", {}).items())


def grid_of(overrides: Iterable[str]) -> dict[str, list[str]]:
    """The values of each override, as hydra writes them in a sweep's folders: 0.01 for 1e-2, ~key=null for ~key.

    As in hydra's own sweeper a later override replaces an earlier one, in its place.
    """
    grid = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_hydra_override():
            swept = override.is_sweep_override()
            values = override.sweep_string_iterator() if swept else [override.get_value_element_as_str()]
            grid[override.get_key_element()] = list(values)
    return grid


@cache
def targets() -> dict[str, str]:
    """The import path of every class or function of bnrnn that the files in conf/ name, by its name alone."""
    texts = (path.read_text() for path in sorted(CONF.rglob("*.yaml")))
    paths = {path for text in texts for path in re.findall(r"_target_: *(bnrnn\.[\w.]+)", text)}
    return {path.rpartition(".")[2]: path for path in sorted(paths)}


def with_present_paths(record: Any) -> Any:
    """A stored configuration with the import paths of today, where its classes have moved since it was stored."""
    if isinstance(record, dict):
        return {k: _present(v) if k == "_target_" else with_present_paths(v) for k, v in record.items()}
    return [with_present_paths(v) for v in record] if isinstance(record, list) else record


def _present(path: str) -> str:
    return targets().get(path.rpartition(".")[2], path) if path.startswith("bnrnn.") else path


@cache
def label(group: str, option: str) -> str:
    """What people call an option of a config group, such as model=bn_lstm; its own name where it has no label."""
    path = CONF / group / f"{option}.yaml"
    return yaml.safe_load(path.read_text()).get("label", option) if path.exists() else option
