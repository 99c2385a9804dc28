"""The run of wandb that mirrors a run: how it is called, and what its pages show. No program reads it."""

import os
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from bnrnn.config import label
from bnrnn.errors import first_line
from bnrnn.metrics import METRICS

LONGEST = 100  # characters of a name; wandb accepts 128
CHOSEN = ("setting", "model", "data")  # keys that are called by their option alone
TELEMETRY = "WANDB_ERROR_REPORTING"  # wandb reads it when its first run starts, and passes it to its process


def new_id(cfg: DictConfig, overrides: dict[str, str]) -> str:
    """An id that no other run has: bn_lstm-pmnist-s0-4b08, or 0.3gamma-s0-bn_lstm-pmnist-91c7.

    It begins with what the runs of a sweep differ in, and an option with its value: `wandb leet` shows few characters.
    """
    parts = _parts(cfg, overrides, lambda name, value: f"{value}{name}")
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', parts)[:LONGEST]}-{uuid.uuid4().hex[:4]}"


def display_name(cfg: DictConfig, overrides: dict[str, str]) -> str:
    """The name of a run: bn_lstm-pmnist-s0, or gamma0.3-s0-bn_lstm-pmnist."""
    return _parts(cfg, overrides, lambda name, value: f"{name}{value}")[:LONGEST]


def _parts(cfg: DictConfig, overrides: dict[str, str], joined: Callable[[str, str], str]) -> str:
    """The setting or model, the data and the seed. All other overrides stand before them."""
    left_out = (*CHOSEN, "seed", "log_every")
    own = [(k.rpartition(".")[2], v) for k, v in overrides.items() if k not in left_out and not k.startswith("budget")]
    named, seed = [joined(name.removesuffix("_init"), value) for name, value in own], f"s{cfg.seed}"
    chosen = _chosen(cfg, overrides)
    return "-".join([*named, seed, *chosen] if named else [*chosen, seed])


def _chosen(cfg: DictConfig, overrides: dict[str, str]) -> tuple[str, str]:
    """The options of model and data, or the names of their modules if they are the defaults of the recipe."""
    layer = cfg.model.get("layer") or cfg.model
    model = overrides.get("setting") or overrides.get("model") or layer._target_.split(".")[-2]
    return model, overrides.get("data") or cfg.data._target_.split(".")[-2]


def start(
    cfg: DictConfig, config: dict[str, Any], folder: Path, overrides: dict[str, str], run_id: str,
    warn: Callable[[str], None],
) -> Any:  # fmt: skip
    """Start a run of wandb in `folder`, without output. Returns None if wandb is off.

    A run that cannot be uploaded, without a key or a network, is recorded offline, with a warning. An offline run turns
    wandb's telemetry off, which contacts a server even then, unless the user has set the variable TELEMETRY.

    The runs of a sweep share a folder, so that wandb's own viewer shows their curves together. A resumed run continues
    as a second part with the same id; wandb joins the parts when they are synced.
    """
    if cfg.wandb.mode == "disabled":
        return None
    if cfg.wandb.mode == "offline":
        os.environ.setdefault(TELEMETRY, "false")
    model, data = _chosen(cfg, overrides)
    group = "setting" if "setting" in overrides else "model"
    given: dict[str, Any] = {
        "project": cfg.wandb.project,
        "group": cfg.name,
        "job_type": "train",
        "name": display_name(cfg, overrides),
        "id": run_id,
        "tags": [*cfg.name.split("/"), model, data],
        "notes": f"{label(group, model)} on {label('data', data)}, {cfg.budget.updates:,} updates, seed {cfg.seed}; "
        + (", ".join(f"{key}={value}" for key, value in overrides.items()) or "no overrides"),
        "config": config,
        "dir": folder,
    }
    for mode in dict.fromkeys([cfg.wandb.mode, "offline"]):
        try:
            return _started(given | {"mode": mode, "resume": "allow" if mode == "online" else None}, cfg.wandb.system)
        except Exception as error:
            reason = first_line(error).rstrip(".")
            if mode == "online":
                warn(f"warning: wandb cannot upload ({reason}); it records offline, and `wandb sync` uploads later")
            else:
                warn(f"warning: wandb cannot record in {folder} ({reason}); the run continues without it")
    return None


def _started(given: dict[str, Any], system: bool) -> Any:
    """A run of wandb whose metrics are declared. With `system`, it records load and memory of the machine."""
    import wandb  # slow to import

    settings = wandb.Settings(
        silent=True,
        console="off",
        x_disable_stats=not system,
        x_disable_machine_info=not system,
        disable_git=True,
        disable_code=True,
        x_save_requirements=False,
        reinit="create_new",
        x_transaction_log_flush_interval=1,  # seconds; a killed process loses at most these records
        finish_timeout=60,  # seconds to upload at the end; a run without network must not wait for ever
    )
    run = _init(given | {"settings": settings})
    try:
        run.define_metric("*", step_metric="update")
        for metric in METRICS.values():
            best = "max" if metric.better > 0 else "min"
            run.define_metric(f"Valid/{metric.name}", step_metric="update", summary=best)
        run.define_metric("train/grad_norm_max", step_metric="update", summary="max")
    except Exception:
        with suppress(Exception):
            run.finish(exit_code=1)
        raise
    return run


def _init(given: dict[str, Any]) -> Any:
    import wandb

    try:
        return wandb.init(**given)
    except ConnectionError:  # its process, which serves all runs of this one, was killed after an earlier run
        forget()
        return wandb.init(**given)


def in_wandb(values: dict[str, Any]) -> dict[str, Any]:
    """The values by their names in wandb, where names are sorted and validation comes first."""
    return {f"V{name[1:]}" if name.startswith("valid/") else name: value for name, value in values.items()}


def show(run: Any, name: str, update: int, figure: Any) -> None:
    """Store a figure of matplotlib as an image of the run."""
    import wandb

    run.log({"update": update, name: wandb.Image(figure)}, step=update)


def forget() -> None:
    """Forget wandb's process, after it was killed; the next run starts another."""
    import wandb

    with suppress(Exception):  # it says once more that the process is gone
        wandb.teardown()
