"""The recurrence of LSTM, input-normalized LSTM and BN-LSTM, computed by the selected engine."""

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan import joint, operator
from bnrnn.scan.arguments import check_sizes, check_tensors, form_of, once_per_form, raised, statistics_by_name
from bnrnn.scan.backends import OUTSIDE, backend, product_dtype, recorded, triton_engine, without_autocast
from bnrnn.scan.graphs import Captured
from bnrnn.scan.lstm import reference
from bnrnn.scan.lstm.cpu import CpuSteps
from bnrnn.scan.lstm.fused import PARAMETERS, Steps, fused_scan, prepare
from bnrnn.scan.lstm.reference import Options, Result, Statistics
from bnrnn.scan.products import linear
from bnrnn.scan.tracing import autocast_is_on, traced

# The engines that compute the scans of trainings in one process together. On a CPU that saves nothing: `cpu`, which
# trains there, computes each by itself, in the same way as alone.
JOINED = ("reference", "fused", "triton")


def lstm_scan(
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    *,
    weight_ih: Tensor | None = None,
    overwrite: bool = False,
    **options: Unpack[Options],
) -> Result:
    """Run bnrnn.scan.lstm.reference.lstm_scan on the selected engine, with these extensions:

    - With `weight_ih` (4H, I), x_proj is the input x, (T, B, I) or ids (T, B), and the scan computes `linear(x)`
      itself.
    - All tensors except weight_ih may have a leading axis R. The call then runs R independent layers of equal shape.
    - Tensors may be bfloat16 or float16, and torch.autocast may be on. Matrix products then have that precision;
      statistics, states and all other values are float32 inside. y has the dtype of x_proj; h and c keep their dtypes.
    - With `overwrite`, an engine may reuse the memory of x_proj, whose values are then lost.

    Raises BnrnnError for shapes, dtypes or devices that do not match.
    """
    if weight_ih is not None and not _has_one_feature(x_proj, weight_ih):
        x_proj, weight_ih, overwrite = linear(x_proj, weight_ih), None, True
    low = product_dtype(x_proj.device, x_proj.dtype)
    given, of_h, of_c = x_proj.dtype, h.dtype, c.dtype
    if low is not None:
        options = {k: raised(v) for k, v in options.items()} | {"product_dtype": low}  # pyright: ignore
        x_proj, h, c, weight_hh = map(raised, (x_proj, h, c, weight_hh))
        if population := options.get("population"):
            options["population"] = Statistics(*map(raised, population))
    _check(x_proj, {"h": h, "c": c, "weight_hh": weight_hh, "weight_ih": weight_ih, **options})
    with without_autocast(x_proj.device):
        if traced():
            name = recorded(x_proj.device)
        elif x_proj.shape[-2] == 0:
            name = "reference"  # other engines expect at least one sequence
        else:
            name = backend(x_proj.device, options.get("product_dtype") or x_proj.dtype)
        if weight_ih is not None:
            y, (h, c), used = fused_scan(CpuSteps, x_proj, h, c, weight_hh, weight_ih=weight_ih, **options)
        elif joint.is_handed_over() and name in JOINED and x_proj.dim() == 3:
            y, (h, c), used = _joint_scan(name, x_proj, h, c, weight_hh, **options)
        else:
            y, (h, c), used = _engine(name, overwrite, x_proj.dim() == 4)(x_proj, h, c, weight_hh, **options)
    if low is None:
        return y, (h, c), used
    return y.to(given), (h.to(of_h), c.to(of_c)), used


def _has_one_feature(x: Tensor, weight_ih: Tensor) -> bool:
    """Whether x has one feature and the engine can take x directly, without storing its product with weight_ih."""
    if traced() or x.dim() != 3 or x.requires_grad or autocast_is_on(x.device):
        return False
    if x.shape[1] == 0 or x.shape[2] != 1:
        return False
    return x.dtype == weight_ih.dtype and backend(x.device, x.dtype) == "cpu"


@once_per_form
def _check(x_proj: Tensor, given: dict[str, Any]) -> None:
    """Raise BnrnnError for arguments of `lstm_scan` that do not match each other."""
    if given["weight_ih"] is not None:
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
    shapes = {name: (*replicas, *shape) for name, shape in shapes.items()} if replicas else shapes
    check_tensors(x_proj, shapes, given)
    check_tensors(x_proj, shapes, statistics_by_name(given.get("population"), ("ih", "hh", "c"), given))
    check_sizes(given.get("batch_sizes"), T, B)


def _engine(name: str, overwrite: bool, replicated: bool) -> Callable[..., Result]:
    """The scan function of this engine, for one set of parameters or, if `replicated`, for R sets."""
    if name == "triton":
        scan = partial(triton_engine().triton_scan, overwrite=overwrite)  # its tensors always have the leading axis R
        return scan if replicated else partial(_one_replica, scan)
    if name == "outside":
        return torch.compiler.disable(lstm_scan, reason=OUTSIDE)  # pyright: ignore[reportReturnType]
    if name == "reference":
        scan = reference.lstm_scan
    elif name == "operator":
        scan = _operator_scan
    else:
        scan = partial(fused_scan, {"cpu": CpuSteps, "fused": partial(Captured, Steps)}[name], overwrite=overwrite)
    return partial(_one_by_one, scan) if replicated else scan


def _one_replica(scan: Callable[..., Result], *args: Tensor, **options: Any) -> Result:
    """Run one set of parameters with a scan that expects the leading axis R."""

    def lifted(value: Any) -> Any:
        if isinstance(value, Statistics):
            return Statistics(*map(lifted, value))
        return value.unsqueeze(0) if isinstance(value, Tensor) else value

    y, (h, c), used = scan(*map(lifted, args), **{key: lifted(value) for key, value in options.items()})
    used = Statistics(*(None if v is None else v.squeeze(0) for v in used))
    return y.squeeze(0), (h.squeeze(0), c.squeeze(0)), used


def _one_by_one(scan: Callable[..., Result], *args: Tensor, **options: Any) -> Result:
    """Run R sets of parameters, one after the other, with a scan of one set."""
    num_replicas = len(args[0])

    def parts(value: Any) -> Any:
        if isinstance(value, Statistics):
            return [Statistics(*of_one) for of_one in zip(*map(parts, value), strict=True)]
        # Use unbind: the gradient of each value[r] would be a tensor of the size of all replicas.
        return value.unbind(0) if isinstance(value, Tensor) else [value] * num_replicas

    each = (dict(zip(options, values, strict=True)) for values in zip(*map(parts, options.values()), strict=True))
    named = each if options else ({} for _ in range(num_replicas))
    results = [scan(*own, **of_one) for own, of_one in zip(zip(*map(parts, args), strict=True), named, strict=True)]
    ys, states, used = zip(*results, strict=True)
    h, c = (torch.stack(values) for values in zip(*states, strict=True))
    stacked = (None if values[0] is None else torch.stack(values) for values in zip(*used, strict=True))
    return torch.stack(ys), (h, c), Statistics(*stacked)


def _joint_scan(
    name: str, x_proj: Tensor, h: Tensor, c: Tensor, weight_hh: Tensor, population: Statistics | None = None,
    **options: Any,
) -> Result:  # fmt: skip
    """The scan of one of several trainings in this process, computed together with those of the others."""
    named = {"x_proj": x_proj, "h": h, "c": c, "weight_hh": weight_hh} | {k: options.pop(k, None) for k in PARAMETERS}
    named |= population._asdict() if population else {}

    def run(stacked: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        given = [stacked.pop(key) for key in ("x_proj", "h", "c", "weight_hh")]
        of_all = {key: stacked.pop(key) for key in Statistics._fields if key in stacked}
        known = Statistics(**of_all) if population else None
        y, (_, c), used = _engine(name, True, True)(*given, **stacked, population=known, **options)
        return y, c, *used

    kind = "lstm", name, population is None, tuple((key, form_of(value)) for key, value in sorted(options.items()))
    y, last, *used = joint.scan(kind, run, {key: value for key, value in named.items() if value is not None})
    assert y is not None and last is not None
    return y, (y[-1], last), Statistics(*used)


def _operator_scan(
    x_proj: Tensor, h: Tensor, c: Tensor, weight_hh: Tensor, population: Statistics | None = None, **options: Any
) -> Result:
    tensors = {"x_proj": x_proj, "h": h, "c": c, "weight_hh": weight_hh}
    tensors |= {name: options.pop(name, None) for name in PARAMETERS}
    y, c, used = operator.scan("lstm", tensors, population, options)
    return y, (y[-1], c), used


def _prepare(
    fits: bool, tensors: dict[str, Tensor], population: Statistics | None, keep: bool, **options: Any
) -> Steps:
    engine = CpuSteps if fits else Steps
    return prepare(engine, **tensors, population=population, with_grad=keep, **options)  # pyright: ignore


def _shapes(given: dict[str, Tensor], statistics: list[str], keep: bool) -> list[tuple[int, ...]]:
    T, B, G = given["x_proj"].shape
    H = G // 4
    kept = [(T, B, G), (T, B, G), (T, B, H)] if keep else []
    return [(T, B, H), (B, H), *((T, H if name.endswith("_c") else G) for name in statistics), *kept]


operator.RECURRENCES["lstm"] = operator.Recurrence(_prepare, _shapes, Statistics, kept=("x", "u", "c"))
