"""result.json: the configuration and the measurements of a run. It is written last, so it marks the run as done."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bnrnn.config import check_files, compose_config, with_present_paths
from bnrnn.errors import BnrnnError
from bnrnn.system.files import read_record, reading, write_record
from bnrnn.training.pieces import order_of
from bnrnn.training.search import apply_trial

# Options that do not change what is trained: where and how fast a run computes, and what it records. They are not part
# of a run's identity.
WHERE = (
    "device", "backend", "precision", "num_threads", "checkpoint_seconds", "population_every", "evaluate_train",
    "data_dir", "out_dir", "wandb", "resume",
    "pack",  # in results from before runs of one GPU became processes of their own
)  # fmt: skip
# Options of models that were added to conf/ after the first results, and their neutral values. A neutral value is no
# part of a run's identity, so the older results stay valid.
LATER = {
    "SequenceModel": {
        "num_layers": 1, "bidirectional": False, "dropout": 0.0, "embedding_size": None, "learned_state": True,
    },
    "Captioner": {"num_layers": 1},
    "AttentiveReader": {"num_layers": 1},
}  # fmt: skip
FILE = "result.json"
METRICS = "metrics.jsonl"  # the records of a run (see bnrnn.training.log)
MODELS = "models"  # the folder of released models in that of an experiment (see bnrnn.training.released)
VERSION = 1  # of the content of result.json; increase it when older code could not read it correctly


@dataclass
class Result:
    """One finished run.

    `status` is "finished" or "diverged" (see `has_diverged` in bnrnn.training.loop). `metrics` has the metrics of the
    selected model; `bnrnn.training.measure` describes their names. `seconds` is the time spent in updates, without the
    time for which the process was stopped, and `cpu_seconds` the processor time of these updates. `pieces` says
    what trained each part of the run (see bnrnn.training.pieces).
    """

    name: str
    overrides: dict[str, str]
    status: str
    updates: int
    best_update: int
    metrics: dict[str, float]
    seconds: float
    num_parameters: int
    commits: list[str]
    environment: dict[str, Any]
    config: dict[str, Any]
    data: str = ""  # name and size of the data set
    cpu_seconds: float | None = None  # None if a part of the run did not record it
    pieces: list[dict[str, Any]] = field(default_factory=list)  # empty for runs before there were pieces
    records_sha256: str | None = None  # of metrics.jsonl
    updates_per_epoch: int | None = None  # None in results from before it was recorded
    date: str = ""  # on which the run was finished, in UTC, such as 2026-11-24; empty if it was not recorded

    @property
    def evaluation_order(self) -> str:
        """The order of sequences in evaluations (bnrnn.data.base). Before it was recorded, it was that of the file."""
        return order_of([self.environment])

    @property
    def config_hash(self) -> str:
        """The hash of the configuration. The file has it only for human readers: programs compute it again."""
        return config_hash(self.config)

    def write(self, run_dir: Path) -> None:
        """Store the result in the folder of its run. Raises BnrnnError if that is impossible."""
        content = {"version": VERSION, **dataclasses.asdict(self), "config_hash": self.config_hash}
        write_record(run_dir / FILE, content)

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read result.json. A file from before there were checksums has neither version nor checksum, and is accepted.

        Raises BnrnnError for a file that is not a result, has been changed, or is of a newer version.
        """
        remedy, what = "restore it, or remove it to run again", "the result of a run"
        with reading(path, remedy, what):
            content = read_record(path, remedy, what)
            if content.pop("version", 0) > VERSION:
                raise ValueError(f"it is of a newer bnrnn, expected at most version {VERSION}")
            content.pop("config_hash", None)
            result = cls(**{**content, "config": with_present_paths(content["config"])})
            _check_types(result)
        return result


def _check_types(result: Result) -> None:
    """Raise ValueError for the first field whose value has another type than programs expect."""
    kinds: dict[Any, tuple[str, ...]] = {
        str: ("name", "status", "data", "date"),
        dict: ("overrides", "metrics", "environment", "config"),
        list: ("commits", "pieces"),
        int: ("updates", "best_update", "num_parameters"),
        (int, NoneType): ("updates_per_epoch",),
        (int, float): ("seconds",),
    }
    for kind, names in kinds.items():
        wrong = next((name for name in names if not isinstance(getattr(result, name), kind)), None)
        if wrong is not None:
            raise ValueError(f"{wrong} is {getattr(result, wrong)!r}")
    if result.status not in ("finished", "diverged"):
        raise ValueError(f"status is {result.status!r}, expected finished or diverged")
    if not all(isinstance(value, (int, float)) for value in result.metrics.values()):
        raise ValueError("metrics are no numbers")


def config_record(cfg: DictConfig) -> dict[str, Any]:
    """The part of the configuration that identifies a run, as a dictionary, without the options in WHERE."""
    record = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(record, dict)
    for key in WHERE:
        record.pop(key, None)
    record["data"].pop("data_dir", None)
    # Null top-level options are dropped, so adding one does not change existing hashes.
    return {str(k): v for k, v in record.items() if v is not None}


def identity(record: dict[str, Any]) -> dict[str, Any]:
    """The record in the form that is hashed: the class name of each `_target_`, and numbers by value.

    Import paths are left out, so modules can move without changing hashes. 5 and 5.0 count as the same number. Options
    of the model in LATER are left out where they have no effect.
    """
    record = _by_value(record)
    later = LATER.get(record.get("model", {}).get("_target_"), {})
    for option, neutral in later.items():
        if record["model"].get(option, neutral) == neutral:
            record["model"].pop(option, None)
    if record.get("model", {}).get("layer", {}).get("statistics") == "exact":  # was added later, too
        del record["model"]["layer"]["statistics"]
    return record


def _by_value(record: Any) -> Any:
    if isinstance(record, dict):
        return {k: v.rpartition(".")[2] if k == "_target_" else _by_value(v) for k, v in record.items()}
    if isinstance(record, list):
        return [_by_value(v) for v in record]
    return int(record) if isinstance(record, float) and record.is_integer() else record


def config_hash(record: dict[str, Any]) -> str:
    """The hash of a record's identity."""
    return hashlib.sha256(json.dumps(identity(record), sort_keys=True).encode()).hexdigest()[:16]


def check_same_config(found: dict[str, Any], record: dict[str, Any], path: Path) -> None:
    """Raise BnrnnError, with the keys that differ, if the file at `path` was made with another configuration."""
    if config_hash(found) == config_hash(record):
        return
    old, new = flat(identity(found)), flat(identity(record))
    changed = [f"{k}: {old.get(k)} there, {new.get(k)} now" for k in sorted(old | new) if old.get(k) != new.get(k)]
    raise BnrnnError(
        f"{path} was made with another configuration ({'; '.join(changed)}). Remove its folder to run again, or use "
        "another out_dir"
    )


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a nested dictionary by their whole keys, such as `optim.lr`; lists and empty groups are values."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in flat(sub, f"{prefix}.{key}".strip(".")).items()}


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
