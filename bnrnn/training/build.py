"""Building what a configuration describes: the settings of the process, the data and the model."""

from inspect import signature
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig
from torch import nn

from bnrnn.data.base import SequenceData, model_sizes
from bnrnn.errors import BnrnnError
from bnrnn.layers.base import RecurrentLayer
from bnrnn.layers.population import has_step_statistics
from bnrnn.scan import ENGINES, set_backend
from bnrnn.system.memory import keep_heap
from bnrnn.training.checkpoint import seed_everything
from bnrnn.training.device import choose_device, set_precision
from bnrnn.training.provenance import environment


def build(cfg: DictConfig) -> tuple[DictConfig, torch.device, SequenceData, nn.Module]:
    """Configure the process, and build the data and the model. The budget of the returned configuration is in updates.

    Raises BnrnnError for options that do not exist, or that this machine or the model does not support.
    """
    torch.set_flush_denormal(True)  # numbers below 1.2e-38, as of vanishing gradients, are slow
    torch.set_num_threads(cfg.num_threads)
    set_backend(cfg.backend)
    device = choose_device(cfg.device)
    set_precision(cfg.precision, device)
    keep_heap()
    seed_everything(cfg.seed)
    data = instantiate(cfg.data)
    model = instantiate(cfg.model, **model_sizes(data)).to(device)
    if cfg.backend not in ("auto", *engines_of(model)):
        usable = ", ".join(["auto", *engines_of(model)])
        raise BnrnnError(f"backend={cfg.backend} has no kernel for this model's layers: use {usable}")
    for key in ("batch_size", "population_batch_size"):
        if cfg[key] == 1 and has_step_statistics(model):
            raise BnrnnError(f"{key}=1: one sequence has no batch statistics at a time step: use 2 or more")
    return with_lengths(cfg, data), device, data, model


def rebuilt(config: dict[str, Any], data_dir: str) -> tuple[SequenceData, nn.Module]:
    """The data and the model of a stored configuration, whose weights are still to be loaded, on the CPU."""
    given = config["data"]
    is_read = "data_dir" in signature(get_class(given["_target_"])).parameters  # whether the data is read from files
    data = instantiate({**given, **({"data_dir": data_dir} if is_read else {})})
    return data, instantiate(config["model"], **model_sizes(data))


def optimizer_of(cfg: DictConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a configuration. Raises BnrnnError for options that it does not have, and for wrong values."""
    try:
        return instantiate(cfg.optim)(model.parameters())
    except BnrnnError:
        raise
    except (TypeError, ValueError) as error:
        raise BnrnnError(f"optim cannot be built ({error}): use the options of {cfg.optim._target_}") from error


def engines_of(model: nn.Module) -> tuple[str, ...]:
    """The engines that implement all recurrent layers of the model."""
    layers = [layer for layer in model.modules() if isinstance(layer, RecurrentLayer)]
    return tuple(name for name in ENGINES if all(name in layer.engines for layer in layers))


def environment_of(cfg: DictConfig, device: torch.device, data: SequenceData, model: nn.Module) -> dict[str, Any]:
    """The environment of a run, with the engine that its layers have and the order of its evaluations."""
    where, engines = environment(device, cfg.precision), engines_of(model)
    if where["backend"] not in engines:  # that is the engine of a plain LSTM; scans fall back in the same order
        where["backend"] = "fused" if where["backend"] == "triton" and "fused" in engines else "reference"
    return where | {"evaluation_order": evaluation_order(cfg, data)}


def with_lengths(cfg: DictConfig, data: SequenceData) -> DictConfig:
    """The configuration with its budget in updates. A budget in epochs is converted."""
    cfg, per_epoch = cfg.copy(), data.num_batches("train", cfg.batch_size)
    if cfg.budget.updates is None:
        cfg.budget.updates = cfg.budget.epochs * per_epoch
    if cfg.budget.eval_every is None:
        cfg.budget.eval_every = per_epoch
    return cfg


def evaluation_order(cfg: DictConfig, data: SequenceData) -> str:
    """The order of sequences in evaluations: that of the option or, by default, that of the data.

    Raises BnrnnError for an order that the data does not have.
    """
    order = cfg.evaluation_order or data.evaluation_orders[0]
    if order not in data.evaluation_orders:
        raise BnrnnError(
            f"evaluation_order={order}: this text is read in its own order, because states are carried from batch to "
            "batch; leave the option out"
        )
    return order
