"""Which runs may train together in one process: those that differ only in values, not in shapes or code."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from bnrnn.training.results import flat

# Options that may differ: values, how values change, and what does not compute. All others must be equal, since they
# determine shapes, code, data, or how the whole process computes.
FREE = (
    "seed", "name", "grad_clip", "lr_decay", "sum_over_time", "search", "optim", "log_every", "checkpoint_seconds",
    "resume", "out_dir", "wandb", "pack", "setting",
)  # fmt: skip
FREE_VALUES = ("gamma_init", "state_noise", "dropout")  # the last parts of keys of model and data


class Run(NamedTuple):
    """The arguments of `bnrnn.train.train`."""

    cfg: DictConfig
    folder: Path
    overrides: dict[str, str]
    title: str


def form(cfg: DictConfig) -> dict[str, Any]:
    """The options that must be equal in a pack, by key."""
    return without_free(flat(OmegaConf.to_container(cfg, resolve=True)))


def without_free(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that may differ in a pack."""
    return {k: v for k, v in options.items() if not _is_free(k, v)}


def _is_free(key: str, value: Any) -> bool:
    is_value = value is not None and key.rpartition(".")[2] in FREE_VALUES
    return key.split(".")[0] in FREE or key.startswith("model.init.") or is_value


def in_packs(cfgs: Sequence[DictConfig], size: int) -> list[list[int]]:
    """The indices of configurations in packs of at most `size`, in the order of the first of each pack.

    The runs of a pack have the same form. A layer whose scan has no axis of replicas trains in a pack of its own.
    """
    packs: list[tuple[dict[str, Any], list[int]]] = []
    for n, cfg in enumerate(cfgs):
        own = form(cfg)
        room = (members for of, members in packs if of == own and len(members) < size)
        if has_replicas(cfg) and (pack := next(room, None)) is not None:
            pack.append(n)
        else:
            packs.append((own, [n]))
    return [members for _, members in packs]


def has_replicas(cfg: DictConfig) -> bool:
    """Whether the scan of the model's layers has an axis of replicas."""
    return getattr(get_object(cfg.model.layer._target_), "has_replicas", False)


def is_padded(cfg: DictConfig) -> bool:
    """Whether batches are padded to lengths that differ by seed, so that scans cannot be computed together."""
    return getattr(get_object(cfg.data._target_), "padded", False)


def describe(cfgs: Sequence[DictConfig], packs: Sequence[Sequence[int]]) -> str:
    """One line: how many packs there are, and why not fewer."""
    forms = [form(cfg) for cfg in cfgs]
    keys = sorted(key for key in set().union(*forms) if any(f.get(key) != forms[0].get(key) for f in forms))
    reasons = [f"runs with another {', '.join(keys)} train apart"] if keys else []
    alone = sorted({cfg.model.layer._target_.rpartition(".")[2] for cfg in cfgs if not has_replicas(cfg)})
    reasons += [f"{name} trains alone, because its scan has no axis of replicas" for name in alone]
    padded = sorted({cfg.data._target_.rpartition(".")[2] for cfg in cfgs if is_padded(cfg)})
    reasons += [f"batches of {name} have other lengths for each seed, so a pack is no faster" for name in padded]
    largest = max(len(pack) for pack in packs)
    text = f"{len(cfgs)} runs in {len(packs)} packs of at most {largest}" if len(packs) > 1 else f"{len(cfgs)} runs"
    return "; ".join([f"packs: {text}", *reasons])
