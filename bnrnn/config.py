"""Configurations: composing them, the grid of a sweep, and the classes and labels in the files of conf/."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from bnrnn.errors import BnrnnError
from bnrnn.system.files import read_text, reading

PACKAGE = Path(__file__).parent


def root() -> Path:
    """The folder that contains conf/ and experiments/: the checkout or, if installed from a wheel, the package."""
    return PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent


ROOT = root()
CONF = ROOT / "conf"
MENDABLE = (HydraException, OmegaConfBaseException)  # errors of the libraries that a user can correct
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where PyYAML has it
GROUPS = ("model", "data", "optim", "budget")
KEY_LABELS = {"optim.lr": "learning rate", "model.layer.gamma_init": "initial gamma", "data.state_noise": "noise"}
LABELED = ("model", "data")  # nodes that may have a label; the label of a setting is a top-level key


def from_yaml(text: str) -> Any:
    """The content of a YAML text of this project, not of a user: the fast loader crashes on very deep nesting."""
    return yaml.load(text, LOADER)


def compose_config(*overrides: str, hydra: bool = False) -> DictConfig:
    """The configuration that `python -m bnrnn.train` would use with these overrides."""
    with initialize_config_dir(str(CONF), version_base="1.3"), checking_files():
        return without_labels(compose("train", list(overrides), return_hydra_config=hydra))


def check_files() -> None:
    """Raise BnrnnError for a damaged file in conf/."""
    remedy, what = "restore it with git, or install bnrnn again", "a configuration file"
    for path in sorted(CONF.rglob("*.yaml")):
        with reading(path, remedy, what):
            content = from_yaml(read_text(path, remedy, what))
            if path.stem.startswith("campaign"):  # a list of entries (bnrnn.training.progress)
                continue
            if not isinstance(content, dict):
                raise ValueError("expected keys and values")
            if not isinstance(content.get("hydra", {}), dict):
                raise ValueError("expected keys and values below hydra")
            defaults = content.get("defaults", [])
            if not isinstance(defaults, list) or not all(isinstance(given, str | dict) for given in defaults):
                raise ValueError("expected a list of options below defaults")
            OmegaConf.create(content)  # refuses half an interpolation


@contextmanager
def checking_files() -> Iterator[None]:
    """Context manager for reading configurations: after any error, a damaged file in conf/ is named if there is one."""
    try:
        yield
    except Exception as error:
        check_files()
        if isinstance(error, yaml.YAMLError):  # what OmegaConf refuses beside: its message has the path
            raise BnrnnError(
                f"{' '.join(str(error).split())}: restore the file with git, or install bnrnn again"
            ) from error
        if "Config group override must be" in str(error):  # hydra does not say which
            raise BnrnnError(
                f"{', '.join(GROUPS)} cannot be null or empty: use one of their files in {CONF}"
            ) from error
        raise


def without_labels(cfg: DictConfig) -> DictConfig:
    """The configuration without labels, which appear only in tables and figures and do not identify a run."""
    cfg = cfg.copy()
    with open_dict(cfg):
        for node in (cfg, *(cfg[name] for name in LABELED)):
            node.pop("label", None)
    return cfg


@cache
def sweep(key: str) -> dict[str, list[str]]:
    """The grid of an experiment: the values of each swept key, or {} for a single run.

    It is read from the file of the experiment, because composing takes a good part of a second. Raises BnrnnError for
    an unknown experiment.
    """
    path = CONF / "experiment" / f"{key}.yaml"
    if not path.exists():
        raise BnrnnError(
            f"experiment={key} is unknown: {path.relative_to(ROOT)} does not exist; use a file in conf/experiment/"
        )
    sweeper = from_yaml(path.read_text()).get("hydra", {}).get("sweeper", {})
    return grid_of(f"{key}={values}" for key, values in sweeper.get("params", {}).items())


def grid_of(overrides: Iterable[str]) -> dict[str, list[str]]:
    """The values of each override, written as hydra does in folder names: 1e-2 as 0.01, ~key as ~key=null.

    As in hydra's sweeper, a later override of the same key replaces the earlier one but keeps its position.
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
    """The import paths of all classes and functions of bnrnn that conf/ names, by the last part of the path."""
    texts = (path.read_text() for path in sorted(CONF.rglob("*.yaml")))
    paths = {path for text in texts for path in re.findall(r"_target_: *(bnrnn\.[\w.]+)", text)}
    return {path.rpartition(".")[2]: path for path in sorted(paths)}


def check_targets(record: Any, path: Path) -> None:
    """Raise BnrnnError if a stored configuration names a class or function that no file in conf/ names, or refers to
    other values.

    Stored configurations are data that may come from anybody: what they name is called when a model is built.
    """
    if isinstance(record, dict):
        for key, value in record.items():
            special = str(key).startswith("_") and key != "_partial_"
            if special and (key != "_target_" or value not in targets().values()):
                raise BnrnnError(
                    f"{path} has {key}: {value!r} in its configuration, which no file in {CONF} names: use a file that "
                    "bnrnn has written"
                )
            check_targets(value, path)
    elif isinstance(record, list):
        for value in record:
            check_targets(value, path)
    elif isinstance(record, str) and "${" in record:
        raise BnrnnError(f"{path} has {record!r} in its configuration: expected plain values, which refer to no others")


@cache
def target_of(group: str, option: str) -> str:
    """The import path of the class of an option, such as model=captioner/rhn, from its file or one that it extends."""
    content = from_yaml((CONF / group / f"{option}.yaml").read_text())
    if "_target_" in content:
        return content["_target_"]
    parents = [d for d in content["defaults"] if isinstance(d, str) and d != "_self_"]
    folder = f"{option.rpartition('/')[0]}/".lstrip("/")
    names = [d.removesuffix("@_here_") for d in parents]
    return target_of(group, names[-1].removeprefix(f"/{group}/") if names[-1][0] == "/" else folder + names[-1])


def with_present_paths(record: Any) -> Any:
    """A stored configuration with current import paths, because classes may have moved since it was stored."""
    if isinstance(record, dict):
        return {k: _present(v) if k == "_target_" else with_present_paths(v) for k, v in record.items()}
    return [with_present_paths(v) for v in record] if isinstance(record, list) else record


def _present(path: str) -> str:
    return targets().get(path.rpartition(".")[2], path) if path.startswith("bnrnn.") else path


def key_label(key: str) -> str:
    """The name of an option in tables and figures, or its key if it has none."""
    return KEY_LABELS.get(key, key)


def label(group: str, option: str) -> str:
    """The label of an option of a config group, such as model=bn_lstm, or its name if it has no label."""
    path = CONF / group / f"{option}.yaml"
    return from_yaml(path.read_text()).get("label", option) if path.exists() else option
