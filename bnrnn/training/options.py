"""Checks of a configuration before anything is started: types, ranges and names of its options.

The signature of a class says which types its options have, and whether null is one of them.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from bnrnn.config import CONF, GROUPS, checking_files, compose_config, from_yaml
from bnrnn.errors import BnrnnError, first_line
from bnrnn.training.optim import LARGEST
from bnrnn.training.pairs import options
from bnrnn.training.results import flat

MOST_THREADS = 512  # far more than this crash OpenMP
MISSING = object()
Rule = tuple[Callable[[Any], bool], str]


def _whole(least: int = -(2**53), most: int = 2**53) -> Rule:
    text = "a whole number" + (f" from {least:,}" if least > -(2**53) else "")
    text += f" to {most:,}" if most < 2**53 else ""
    return lambda v: type(v) is int and least <= v <= most, text


def _number(least: float | int = -math.inf, below: float | int = math.inf, above: bool = False) -> Rule:
    text = f"a number {'above' if above else 'from'} {least:g}" if least > -math.inf else "a number"
    text += f", below {below:g}" if below < math.inf else ""
    return lambda v: type(v) in (int, float) and (least < v if above else least <= v) and v < below, text


def _one_of(*values: Any) -> Rule:
    return lambda v: v in values and type(v) in map(type, values), " or ".join(str(v).lower() for v in values)


def _or_null(rule: Rule) -> Rule:
    return lambda v: v is None or rule[0](v), f"{rule[1]}, or null"


SIZE, SWITCH, POSITIVE, SHARE = _whole(1), _one_of(True, False), _number(0, above=True), _number(0, 1)
KEYS: Rule = (lambda v: isinstance(v, dict), "keys and values")
TEXT: Rule = (lambda v: v is not None and not isinstance(v, (dict, list)), "a text")
RULES: dict[str, Rule] = {
    "seed": _whole(0, 2**32 - 1),  # the generators of numpy and torch use no more than 32 bits
    "batch_size": SIZE, "population_batch_size": SIZE, "log_every": SIZE, "num_threads": _whole(1, MOST_THREADS),
    "grad_clip": _number(0), "checkpoint_seconds": _number(0), "sum_over_time": _or_null(SWITCH),
    "population_every": _or_null(SIZE), "evaluate_train": SWITCH,
    "evaluation_order": _or_null(_one_of("shuffled", "file")), "resume": _one_of("same", "changed"),
    "wandb.mode": _one_of("offline", "online", "disabled"), "wandb.system": SWITCH,
    "wandb.project": (lambda v: isinstance(v, str) and re.fullmatch(r"[^/\\#?%:]{1,128}", v) is not None,
                      "a name without / \\ # ? % :"),
    "budget.updates": _or_null(SIZE), "budget.epochs": _or_null(SIZE), "budget.eval_every": _or_null(SIZE),
    "budget.eval_batches": _or_null(SIZE), "budget.population_batches": _or_null(SIZE),
    "lr_decay": (lambda v: v is None or isinstance(v, dict), "{after: N, divisor: D} and perhaps every: M, or null"),
    "lr_decay.after": _whole(0), "lr_decay.divisor": POSITIVE, "lr_decay.every": SIZE,
    "budget": KEYS, "wandb": KEYS, "model": KEYS, "data": KEYS, "optim": KEYS, "optim.lr": POSITIVE,
}  # fmt: skip
NUMBERS: dict[str, Rule] = {  # ranges of options that are numbers, by the name that the signature of a class gives them
    "momentum": SHARE, "decay": SHARE, "dropout": SHARE, "eps": POSITIVE, "input_eps": POSITIVE, "hidden_size": SIZE,
    "embedding_size": SIZE, "depth": SIZE, "num_layers": SIZE, "window": SIZE, "length": _whole(2),
    "state_noise": _number(0), "vocabulary_size": _whole(4), "least_count": SIZE, "num_states": SIZE,
    "num_features": SIZE, "max_frames": SIZE, "num_sentences": SIZE, "valid_segments": SIZE, "bound": _number(0),
    "scale": _number(0), "year": SIZE,
}  # fmt: skip
CHOICES: dict[str, Rule] = {"statistics": _one_of("exact", "running")}
TEXTS: Rule = (
    lambda v: isinstance(v, list) and all(isinstance(text, str) for text in v),
    'a list of texts, such as \'["a","b"]\'',
)
LAUNCHER: dict[str, Rule] = {  # the options of conf/hydra/launcher/slurm.yaml that others than sbatch read
    "workers": SIZE, "jobs": SIZE, "timeout_min": SIZE, "signal_delay_s": SIZE, "max_num_timeout": _whole(0),
    "wait_for_lock_s": _number(0), "cpus_per_task": _or_null(SIZE), "gpus_per_node": _or_null(_whole(0)),
    "mem_gb": _or_null(_number(0, above=True)), "setup": _or_null(TEXTS), "srun_args": _or_null(TEXTS),
    "stderr_to_stdout": SWITCH,
    "additional_parameters": _or_null((lambda v: isinstance(v, dict), "keys and values")),
}  # fmt: skip
DETERMINED = ("input_size", "output_size", "t_max", "feature_size", "scored_steps")  # by the data: see model_sizes
DETERMINED_OF_LAYERS = ("input_size", "hidden_size", "t_max")  # by the model
NEEDED = (
    "name", "seed", "batch_size", "population_batch_size", "grad_clip", "lr_decay", "sum_over_time", "search",
    "log_every", "device", "backend", "precision", "num_threads", "checkpoint_seconds", "population_every",
    "evaluate_train", "evaluation_order", "resume", "data_dir", "out_dir", "wandb.mode", "wandb.project",
    "model._target_", "data._target_", "optim._target_",
    *(f"budget.{name}" for name in ("updates", "eval_every", "eval_batches", "population_batches")),
)  # fmt: skip
ALSO = (  # keys that train.yaml lacks, but experiments add
    "budget.epochs", "budget.name", "label", "setting", "lr_decay.after", "lr_decay.divisor", "lr_decay.every",
)  # fmt: skip


def check_options(cfg: DictConfig, overrides: dict[str, str] | None = None) -> None:
    """Raise BnrnnError for the first option of a type or range that cannot be trained, and for an unknown one.

    `overrides` are those of the run; one that has no effect is refused.
    """
    tree: Any = OmegaConf.to_container(cfg, resolve=True)
    values = flat(tree)
    if lacking := [key for key in NEEDED if OmegaConf.select(cfg, key, default=MISSING) is MISSING]:
        raise BnrnnError(
            f"{lacking[0]} has no value: give it one, or restore the files in {CONF} (with git, or install again)"
        )
    known = [*_base_keys(), *ALSO]
    for key, value in _nodes(tree):
        group, _, _ = key.partition(".")
        if group not in ("model", "data", "optim", "search") and key in values and key not in known:
            raise BnrnnError(f"{key} is no option{_nearest(key, known)}")
        rule = RULES.get(key) or (_rule_of_owner(tree, key) if group in ("model", "data", "optim") else None)
        if rule is not None and not rule[0](value):
            raise BnrnnError(f"{key}={value} is not valid: expected {rule[1]}")
        if type(value) in (int, float) and abs(value) > LARGEST:
            raise BnrnnError(f"{key}={value} is not valid: expected a number from {-LARGEST:g} to {LARGEST:g}")
        owner, _, name = key.rpartition(".")
        if (owner == "model" and name in DETERMINED) or (owner == "model.layer" and name in DETERMINED_OF_LAYERS):
            source = "data determine" if owner == "model" else "model determines"
            raise BnrnnError(f"{key}={value} has no effect, because the {source} {name}: leave it out")
    if cfg.lr_decay is not None and not {"lr_decay.after", "lr_decay.divisor"} <= set(values):
        raise BnrnnError(f"lr_decay={cfg.lr_decay} is not valid: expected {RULES['lr_decay'][1]}")
    updates, epochs = values.get("budget.updates"), values.get("budget.epochs")
    if updates is not None and epochs is not None and "budget.epochs" in (overrides or {}):
        raise BnrnnError(
            f"budget.epochs={epochs} has no effect, because budget.updates is {updates}: add budget.updates=null, or "
            "leave one of them out"
        )
    noise = values.get("data.state_noise")
    if "data.state_noise" in (overrides or {}) and noise != values.get("model.state_noise"):
        other = values.get("model.state_noise")
        raise BnrnnError(
            f"data.state_noise={noise} has no effect on this model, whose model.state_noise is {other}: leave it out"
        )
    if updates is None and epochs is None:
        raise BnrnnError("budget.updates and budget.epochs are both null: set the length of the run with one of them")


def _rule_of_owner(tree: dict[str, Any], key: str) -> Rule | None:
    """What an option must be, from the signature of the class or function that takes it; None if that says nothing."""
    *groups, name = key.split(".")
    owner: Any = tree
    for group in groups:
        owner = owner[group]
    hint = _signature(owner["_target_"]).get(name) if isinstance(owner.get("_target_"), str) else None
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    rules: dict[Any, Rule] = {
        bool: SWITCH, int: NUMBERS.get(name, _whole()), float: NUMBERS.get(name, _number()),
        str: CHOICES.get(name, TEXT), Callable: KEYS,
    }  # fmt: skip
    found = [rules.get(get_origin(kind) or kind) for kind in kinds - {NoneType}]
    if len(found) != 1 or found[0] is None:
        return None
    return _or_null(found[0]) if NoneType in kinds else found[0]


@cache
def _signature(target: str) -> dict[str, Any]:
    """The types of the arguments of a class or function; {} if it cannot be found, which building it will report."""
    try:
        module, _, name = target.rpartition(".")
        found: Any = getattr(import_module(module), name)
        return get_type_hints(found.__init__ if isinstance(found, type) else found)
    except Exception:
        return {}


def check_launcher(options: dict[str, Any]) -> None:
    """Raise BnrnnError for the first option of the launcher that has a wrong type or range."""
    for key, value in options.items():
        if key in LAUNCHER and not LAUNCHER[key][0](value):
            raise BnrnnError(f"hydra.launcher.{key}={value} is not valid: expected {LAUNCHER[key][1]}")


@contextmanager
def naming_nearest_key() -> Iterator[None]:
    """Context manager for composing configurations: the error of an unknown key names the nearest existing one."""
    try:
        with checking_files():
            yield
    except HydraException as error:
        raise BnrnnError(with_nearest_key(error, lambda: keys_of(compose_config()))) from error


def with_nearest_key(error: Exception, keys: Callable[[], list[str]]) -> str:
    """The message of an error, with the nearest existing key if hydra found an unknown one."""
    if match := re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '([^']+)'", str(error)):
        return f"{match[1]} has no option {match[2]}{_nearest(match[2], keys())}"
    match = re.search(r"Could not override '([^']+)'", str(error))
    if match is None:
        return str(error)
    key, said = match[1], first_line(error).rstrip(".")
    existing = keys()
    if names := options(key) if key in GROUPS else []:
        member = next((k for k in existing if k.startswith(f"{key}.") and "._" not in k), key)
        return (
            f"{said}: {key} is a group of files; choose one by its name, such as {key}={names[0]}, and change single "
            f"options, such as {member}=..."
        )
    if members := [k for k in existing if k.startswith(f"{key}.") and "._" not in k]:
        return f"{said}: it is a group of options; give one of them, such as {members[0]}"
    if others := options_with(key):
        group, most = key.partition(".")[0], 6
        names = ", ".join(f"{group}={name}" for name in others[:most])
        more = f" and {len(others) - most} more" if len(others) > most else ""
        return f"{said}: the chosen {group} has no such option; these have it: {names}{more}"
    return f"{said}{_nearest(key, existing)}"


def options_with(key: str) -> list[str]:
    """The files of a group, such as model or optim, whose configuration has this key: [] for a key of no group."""
    group, _, own = key.partition(".")
    names = options(group) if own and group in ("model", "data", "optim") else []
    return [name for name in names if key in keys_of(compose_config(f"{group}={name}"))]


def keys_of(cfg: DictConfig) -> list[str]:
    """All keys of a configuration, such as `budget.updates`."""
    return list(flat(OmegaConf.to_container(cfg, resolve=False)))


def _nearest(key: str, known: list[str]) -> str:
    """The existing key or group that is most like this one, by its whole name or by its last part."""
    groups = dict.fromkeys(key.partition(".")[0] for key in known)
    known = [*(group for group in groups if not key.startswith(f"{group}.")), *known]
    ends = {k.rpartition(".")[2]: k for k in reversed(known)}
    near = get_close_matches(key, known, 1, 0.7) or get_close_matches(key.rpartition(".")[2], list(ends), 1, 0.7)
    return f": did you mean {ends.get(near[0], near[0])}?" if near else ": `--help` lists the options"


def _base_keys() -> list[str]:
    base = from_yaml(Path(CONF, "train.yaml").read_text())
    return list(flat({k: v for k, v in base.items() if k not in ("defaults", "hydra")}))


def _nodes(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys and values of a nested dictionary, groups of keys before the keys in them."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _nodes(value, f"{prefix}{key}.")
