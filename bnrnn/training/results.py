"""result.json: what a finished run was, and what it measured. It is written last and means *done*."""

import dataclasses
import hashlib
import json
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from bnrnn.config import PACKAGE, ROOT, with_present_paths
from bnrnn.errors import BnrnnError
from bnrnn.files import write_json
from bnrnn.scan import backend

# Where and how a run is made and what is measured on the way, not what is trained: no part of a run's identity.
WHERE = (
    "device", "backend", "precision", "num_threads", "checkpoint_seconds", "population_every", "data_dir", "out_dir",
    "wandb",
)  # fmt: skip
FILE = "result.json"


@dataclass
class Result:
    """One finished run.

    `status` is "finished" or "diverged" (see `has_diverged` in bnrnn.training.loop); `metrics` has `<split>/<metric>`
    of the selected model: `test/...` with population statistics, `..._batch_statistics` with those of the batch.
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
    data: str = ""  # what was read

    @property
    def config_hash(self) -> str:
        """Computed from the configuration. The file has it for people; nothing reads it there."""
        return config_hash(self.config)

    def write(self, run_dir: Path) -> None:
        write_json(run_dir / FILE, {**dataclasses.asdict(self), "config_hash": self.config_hash})

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Raises BnrnnError for a file that is not a result."""
        try:
            content = json.loads(path.read_text())
            content.pop("config_hash", None)
            return cls(**{**content, "config": with_present_paths(content["config"])})
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise BnrnnError(f"{path} is not a result of a run ({error}): remove it to run again") from None


def config_record(cfg: DictConfig) -> dict[str, Any]:
    """The configuration that makes a run what it is, resolved, without where it ran."""
    record = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(record, dict)
    for key in WHERE:
        record.pop(key, None)
    record["data"].pop("data_dir", None)
    # Null top-level options are dropped, so adding one does not change existing hashes.
    return {str(k): v for k, v in record.items() if v is not None}


def identity(record: Any) -> Any:
    """The part of a record that identifies a run: the class name of each `_target_`, and numbers by value.

    Import paths do not belong to it, so modules can move; 5 and 5.0 are one number.
    """
    if isinstance(record, dict):
        return {k: v.rpartition(".")[2] if k == "_target_" else identity(v) for k, v in record.items()}
    if isinstance(record, list):
        return [identity(v) for v in record]
    return int(record) if isinstance(record, float) and record.is_integer() else record


def config_hash(record: dict[str, Any]) -> str:
    """The hash of a record's identity."""
    return hashlib.sha256(json.dumps(identity(record), sort_keys=True).encode()).hexdigest()[:16]


def check_same_config(found: dict[str, Any], record: dict[str, Any], path: Path) -> None:
    """Raise BnrnnError, naming the keys, if what lies at `path` was made with another configuration."""
    if config_hash(found) == config_hash(record):
        return
    old, new = _flat(identity(found)), _flat(identity(record))
    changed = [f"{k}: {old.get(k)} there, {new.get(k)} now" for k in sorted(old | new) if old.get(k) != new.get(k)]
    raise BnrnnError(
        f"{path} was made with another configuration ({'; '.join(changed)}). Remove its folder to run again, or choose "
        "another out_dir"
    )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in _flat(sub, f"{prefix}.{key}".strip(".")).items()}


def environment(device: torch.device, precision: str = "float32") -> dict[str, Any]:
    """Versions, hardware and engine that a number may depend on; no names of machines."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "hardware": hardware,
        "backend": backend(device, torch.bfloat16 if precision == "bfloat16" else torch.get_default_dtype()),
        "precision": precision,
        "num_threads": torch.get_num_threads(),
    }


def git_commit() -> str:
    """The commit of the code that runs, with "+changes" if it was edited since.

    For a package installed from a wheel it is the tag of its version, such as v0.1.0; without git, "unknown".
    """
    if ROOT == PACKAGE:
        return f"v{version('bnrnn')}"

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        edited = git("status", "--porcelain", "--", "bnrnn", "conf", "experiments/*/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if edited else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance() -> dict[str, Any]:
    """What an analysis on the CPU writes beside its numbers."""
    return {"commit": git_commit(), "environment": environment(torch.device("cpu"))}
