"""The recurrences, each as one function over a whole sequence, with several engines behind one signature.

`reference` is the readable loop in autograd and `fused` one autograd function with a backward derived by hand, both for
any device and dtype; `cpu` is `fused` with its steps compiled, for float32 on the CPU, and `triton` the same for GPUs.
Up to rounding, all give the same numbers. `auto` takes `cpu` or `triton` where they can run and `reference` elsewhere.
"""

import logging
import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan import lstm, lstm_cpu, norm, norm_cpu, rhn
from bnrnn.scan.lstm import Statistics
from bnrnn.scan.lstm_cpu import CpuEngine, library
from bnrnn.scan.lstm_fused import AtenEngine, fused_scan
from bnrnn.scan.rhn import RHNStatistics
from bnrnn.scan.rhn_cpu import CpuSteps
from bnrnn.scan.rhn_fused import Steps, rhn_fused_scan

ENGINES = ("reference", "fused", "cpu", "triton")
BACKENDS = ("auto", *ENGINES)
_chosen = "auto"


def set_backend(name: str) -> None:
    """Choose the engine for every scan of this process. Raises BnrnnError for a name that is unknown or cannot run."""
    global _chosen
    if name not in BACKENDS:
        raise BnrnnError(f"backend={name} is unknown: use {', '.join(BACKENDS)}")
    if name == "cpu":
        library()
    if name == "triton":
        _triton()
    _chosen = name


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """The engine of scans on this device with products of this dtype. Raises BnrnnError if the chosen one cannot."""
    fits = device.type == "cpu" and dtype == torch.float32
    if _chosen == "cpu" and not fits:
        raise BnrnnError(f"backend=cpu is for float32 on the CPU, not for {dtype} on {device}: use auto or reference")
    on_triton = dtype != torch.float64 and (device.type == "cuda" or _interpreted())
    if _chosen == "triton" and not on_triton:
        raise BnrnnError(f"backend=triton runs float32 or shorter types on a GPU, not {dtype} on {device}: use auto")
    if _chosen != "auto":
        return _chosen
    if device.type == "cuda" and on_triton and _has(_triton):
        return "triton"
    return "cpu" if fits and _has(library) else "reference"


def _interpreted() -> bool:
    """Whether Triton's kernels run in Python here, for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _triton(recurrence: str = "lstm") -> ModuleType:
    """The Triton engine, imported when first needed: it is optional, and slow to import."""
    try:
        return import_module(f"bnrnn.scan.{recurrence}_triton")
    except ImportError as error:
        raise BnrnnError(f"backend=triton cannot be imported ({error}): pip install triton, or use auto") from error


@cache
def _has(kernel: Callable[[], Any]) -> bool:
    """Whether a kernel can be had here; says why if not, once."""
    try:
        kernel()
    except BnrnnError as error:
        logging.getLogger("bnrnn").warning("%s. The reference runs instead, more slowly.", error)
        return False
    return True


@cache
def _engine(name: str) -> Any:
    return {"fused": AtenEngine, "cpu": CpuEngine}[name]()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T for x (T, B, I) and W (G, I), by the chosen engine; x may be ids (T, B) that stand for one-hot rows."""
    if not x.is_floating_point():
        return F.embedding(x, weight.t().contiguous())  # the product with a one-hot row is a column of W
    fits = x.dim() == 3 and (x.shape[2], x.dtype, x.device) == (weight.shape[1], weight.dtype, weight.device)
    plain = torch.is_autocast_enabled(x.device.type) or not fits  # torch names what does not fit
    return F.linear(x, weight) if plain or backend(x.device, x.dtype) != "cpu" else lstm_cpu.linear(x, weight)


def lstm_scan(
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    *,
    weight_ih: Tensor | None = None,
    population: Statistics | None = None,
    overwrite: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, tuple[Tensor, Tensor], Statistics]:
    """bnrnn.scan.lstm.lstm_scan by the chosen engine, with more freedom in the arguments.

    - With `weight_ih` (4H, I), x_proj is the input x (T, B, I) or (T, B) itself, and the engine forms `linear` of it.

    - Every tensor may have a leading axis R of replicas, which share nothing but the shape: R layers in one call.
    - bfloat16 and float16 may come in, or be asked for by torch.autocast: products then have that precision, and
      statistics, states and everything else float32; y has the precision that x_proj had, and h and c keep theirs.
    - With `overwrite`, an engine may take over the memory of x_proj, whose values are then lost.

    Raises BnrnnError for tensors that do not fit each other.
    """
    if weight_ih is not None and not _has_one_feature(x_proj, weight_ih):
        x_proj, weight_ih, overwrite = linear(x_proj, weight_ih), None, True
    low = torch.get_autocast_dtype(x_proj.device.type) if torch.is_autocast_enabled(x_proj.device.type) else None
    given, of_h, of_c = x_proj.dtype, h.dtype, c.dtype
    if low is not None or given in (torch.bfloat16, torch.float16):
        kwargs = {k: _raised(v) for k, v in kwargs.items()} | {"product_dtype": low or given}
        x_proj, h, c, weight_hh = map(_raised, (x_proj, h, c, weight_hh))
        population = population and Statistics(*map(_raised, population))
    _check_lstm(x_proj, population, {"h": h, "c": c, "weight_hh": weight_hh, "weight_ih": weight_ih, **kwargs})
    if weight_ih is not None:
        kwargs["weight_ih"] = weight_ih
    with torch.autocast(x_proj.device.type, enabled=False):
        name = backend(x_proj.device, kwargs.get("product_dtype") or x_proj.dtype)
        run = _replicated(name) if x_proj.dim() == 4 else _single(name)
        y, (h, c), used = run(x_proj, h, c, weight_hh, overwrite=overwrite, population=population, **kwargs)
    return y.to(given), (h.to(of_h), c.to(of_c)), used


def _has_one_feature(x: Tensor, weight_ih: Tensor) -> bool:
    """Whether the engine takes x as it is, because its product with weight_ih need not be stored."""
    if x.dim() != 3 or x.shape[2] != 1 or x.requires_grad or torch.is_autocast_enabled(x.device.type):
        return False
    return x.dtype == weight_ih.dtype and backend(x.device, x.dtype) == "cpu"


def rhn_scan(
    x_proj: Tensor, s: Tensor, weight: Tensor, *, population: RHNStatistics | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor, RHNStatistics]:
    """bnrnn.scan.rhn.rhn_scan by the chosen engine. Precision is as in `lstm_scan`; there are no replicas.

    Raises BnrnnError for tensors that do not fit each other.
    """
    low = torch.get_autocast_dtype(x_proj.device.type) if torch.is_autocast_enabled(x_proj.device.type) else None
    given, of_s = x_proj.dtype, s.dtype
    if low is not None or given in (torch.bfloat16, torch.float16):
        kwargs = {k: _raised(v) for k, v in kwargs.items()} | {"product_dtype": low or given}
        x_proj, s, weight = map(_raised, (x_proj, s, weight))
        population = population and RHNStatistics(*map(_raised, population))
    _check_rhn(x_proj, population, {"s": s, "weight": weight, **kwargs})
    with torch.autocast(x_proj.device.type, enabled=False):
        name = backend(x_proj.device, kwargs.get("product_dtype") or x_proj.dtype)
        if name == "reference":
            run = rhn.rhn_scan
        elif name == "triton":
            run = _triton("rhn").rhn_triton_scan
        else:
            run = partial(rhn_fused_scan, {"cpu": CpuSteps, "fused": Steps}[name])
        y, s, used = run(x_proj, s, weight, population=population, **kwargs)
    return y.to(given), s.to(of_s), used


def _check_lstm(x_proj: Tensor, population: Statistics | None, given: dict[str, Any]) -> None:
    """Raise BnrnnError for arguments of `lstm_scan` that do not fit each other."""
    if given.get("weight_ih") is not None:
        G = len(given["weight_ih"])
    elif x_proj.dim() not in (3, 4) or x_proj.shape[-1] % 4:
        raise BnrnnError(f"x_proj must be (T, B, 4H) or (R, T, B, 4H), got {tuple(x_proj.shape)}")
    else:
        G = x_proj.shape[-1]
    *replicas, T, B, _ = x_proj.shape
    H = G // 4
    shapes = {"weight_ih": (G, 1), "h": (B, H), "c": (B, H), "weight_hh": (G, H), "gamma_ih": (G,), "gamma_hh": (G,),
              "bias": (G,), "gamma_c": (H,), "beta_c": (H,), "mean_ih": (T, G), "var_ih": (T, G), "mean_hh": (T, G),
              "var_hh": (T, G), "mean_c": (T, H), "var_c": (T, H)}  # fmt: skip
    shapes = {name: (*replicas, *shape) for name, shape in shapes.items()}
    _check_tensors("x_proj", x_proj, shapes, {**given, **_statistics(population, ("ih", "hh", "c"), given)})
    _check_sizes(given.get("batch_sizes"), T, B)


def _check_rhn(x_proj: Tensor, population: RHNStatistics | None, given: dict[str, Any]) -> None:
    """Raise BnrnnError for arguments of `rhn_scan` that do not fit each other."""
    if given["weight"].dim() != 3:
        raise BnrnnError(f"weight must be (D, G, H), got {tuple(given['weight'].shape)}")
    D, G, H = given["weight"].shape
    if x_proj.dim() != 3 or x_proj.shape[2] not in (2 * H, 3 * H):
        raise BnrnnError(f"x_proj must be (T, B, 2H) or (T, B, 3H) with H = {H}, got {tuple(x_proj.shape)}")
    T, B, G = x_proj.shape
    gamma_s = given.get("gamma_s")
    K = 0 if gamma_s is None else min(len(gamma_s), D)  # layers whose state is normalized
    shapes = {"s": (B, H), "weight": (D, G, H), "bias": (D, G), "gamma_x": (G,), "gamma_s": (K, H), "beta_s": (K, H),
              "gamma_z": (D, G), "mean_x": (T, G), "var_x": (T, G), "mean_s": (T, K, H), "var_s": (T, K, H),
              "mean_z": (T, D, G), "var_z": (T, D, G)}  # fmt: skip
    _check_tensors("x_proj", x_proj, shapes, {**given, **_statistics(population, ("x", "s", "z"), given)})
    _check_sizes(given.get("batch_sizes"), T, B)


def _statistics(
    population: Statistics | RHNStatistics | None, terms: tuple[str, ...], given: dict[str, Any]
) -> dict[str, Tensor | None]:
    """The population statistics by name. Raises BnrnnError where those of a normalized term are missing."""
    if population is None:
        return {}
    found = population._asdict()
    for name in (f"{kind}_{term}" for term in terms for kind in ("mean", "var")):
        gamma = f"gamma_{name.partition('_')[2]}"
        if given.get(gamma) is not None and found[name] is None:
            raise BnrnnError(f"population has no {name}, which {gamma} needs")
    return found


def _check_tensors(name_of_x: str, x: Tensor, shapes: dict[str, tuple[int, ...]], values: dict[str, Any]) -> None:
    """Raise BnrnnError for a tensor that has not the expected shape, or not the dtype and the device of x.

    Compiled engines read memory by address, so such a tensor must not get there.
    """
    for name, value in values.items():
        if isinstance(value, Tensor):
            expected = shapes[name], x.dtype, x.device
            found = tuple(value.shape), value.dtype, value.device
            if found != expected:
                raise BnrnnError(f"{name} does not fit {name_of_x}: expected {expected}, got {found}")


def _check_sizes(batch_sizes: list[int] | None, T: int, B: int) -> None:
    """Raise BnrnnError where batch_sizes are not T numbers from B down to 1."""
    if batch_sizes is not None:
        downwards = [B, *batch_sizes, 1]
        if len(batch_sizes) != T or sorted(downwards, reverse=True) != downwards:
            raise BnrnnError(
                f"batch_sizes must be {T} numbers between {B} and 1 that never increase, one a step: got {batch_sizes}"
            )


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value


def _single(name: str) -> Callable[..., Any]:
    """The scan of one set of parameters by this engine."""
    return _reference if name == "reference" else partial(_one_replica, _replicated(name))


def _replicated(name: str) -> Callable[..., Any]:
    """The scan of R sets of parameters by this engine."""
    if name == "reference":
        return partial(_one_by_one, _reference)
    return _triton().triton_scan if name == "triton" else partial(fused_scan, _engine(name))


def _reference(*args: Tensor, overwrite: bool, **kwargs: Any) -> Any:
    return lstm.lstm_scan(*args, **kwargs)


def _one_replica(scan: Callable[..., Any], *args: Tensor, **kwargs: Any) -> Any:
    """One set of parameters by a scan of replicas."""

    def lifted(value: Any) -> Any:
        if isinstance(value, Statistics):
            return Statistics(*map(lifted, value))
        return value.unsqueeze(0) if isinstance(value, Tensor) else value

    y, (h, c), used = scan(*map(lifted, args), **{key: lifted(value) for key, value in kwargs.items()})
    used = Statistics(*(None if v is None else v.squeeze(0) for v in used))
    return y.squeeze(0), (h.squeeze(0), c.squeeze(0)), used


def _one_by_one(scan: Callable[..., Any], *args: Tensor, **kwargs: Any) -> Any:
    """Replicas by a scan of one set of parameters."""
    num_replicas = len(args[0])

    def parts(value: Any) -> Any:
        if isinstance(value, Statistics):
            return [Statistics(*of_one) for of_one in zip(*map(parts, value), strict=True)]
        # unbind: the gradient of each value[r] would be a tensor of all replicas.
        return value.unbind(0) if isinstance(value, Tensor) else [value] * num_replicas

    named = (dict(zip(kwargs, values, strict=True)) for values in zip(*map(parts, kwargs.values()), strict=True))
    results = [scan(*own, **options) for own, options in zip(zip(*map(parts, args), strict=True), named, strict=True)]
    ys, states, used = zip(*results, strict=True)
    h, c = (torch.stack(values) for values in zip(*states, strict=True))
    stacked = (None if values[0] is None else torch.stack(values) for values in zip(*used, strict=True))
    return torch.stack(ys), (h, c), Statistics(*stacked)


def normalize_sequence(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """bnrnn.scan.norm.normalize_sequence by the chosen engine; `fused` and `triton` have none of their own.

    The output of bfloat16 or float16 is float32, as are the statistics. Raises BnrnnError for tensors that do not fit
    each other.
    """
    return _normalize("normalize_sequence", x, *args)


def normalize_over_time(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """bnrnn.scan.norm.normalize_over_time by the chosen engine, as `normalize_sequence`."""
    return _normalize("normalize_over_time", x, *args)


def _normalize(
    name: str,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    eps: float,
    population: tuple[Tensor, Tensor] | None = None,
    batch_sizes: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.dtype in (torch.bfloat16, torch.float16):  # all of them: the kernels take parameters to have the dtype of x
        x, gamma, beta = map(_raised, (x, gamma, beta))
        population = population and (population[0].float(), population[1].float())
    if x.dim() != 3:
        raise BnrnnError(f"x must be (T, B, F), got {tuple(x.shape)}")
    T, B, num_features = x.shape
    of_steps = (1 if name == "normalize_over_time" else T, num_features)
    shapes = {"gamma": (num_features,), "beta": (num_features,), "mean": of_steps, "var": of_steps}
    mean, var = population or (None, None)
    _check_tensors("x", x, shapes, {"gamma": gamma, "beta": beta, "mean": mean, "var": var})
    _check_sizes(batch_sizes, T, B)
    if backend(x.device, x.dtype) != "cpu":
        return getattr(norm, name)(x, gamma, beta, eps, population, batch_sizes)
    beta = None if beta is None else beta.contiguous()
    return getattr(norm_cpu, name)(x, gamma.contiguous(), beta, eps, population, batch_sizes)
