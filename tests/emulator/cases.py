"""What is emulated: scans of all recurrences, in all forms, on several architectures, against the reference in float64.

Triton's compiler must be there: TRITON_INTERPRET must not be set.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bnrnn.scan.lstm.reference import lstm_scan
from bnrnn.scan.lstm.triton import triton_scan
from bnrnn.scan.rhn import reference as rhn
from bnrnn.scan.rhn.triton import rhn_triton_scan
from bnrnn.scan.rnn import rnn_scan
from bnrnn.scan.triton_shared import launches, tuning
from tests.emulator.launcher import Edit, Emulation, emulated
from tests.emulator.machine import Schedule
from tests.helpers import without_shape_checks
from tests.scan.cases import ALL, ALL_OF_RHN, everything, in_dtype, problem, rhn_problem

NONE, INPUT = (False,) * 5, (True, False, True, False, False)
BARE = dict.fromkeys(ALL_OF_RHN, False)
RNN = BARE | {"bias": True, "gamma_z": True}
ROUNDED = {"tf32": 2**-11, "bfloat16": 2**-8}  # by about so much a product's factors are rounded
LEAST = {"float32": 1e-5, "tf32": 2e-3, "bfloat16": 1e-2}  # tolerances at least
SEQUENCE, STEPS, APART = {"fused": True, "whole_sequence": True}, {"fused": True}, {"fused": False}


@dataclass(frozen=True)
class Case:
    """A scan that is emulated, forward and backward.

    Args:
        title: recurrence, form and sizes.
        make: the arguments, as of tests.scan.cases.
        division: what is changed in the division that the rule chooses.
        grad: whether there is a backward pass.
        overwrite: whether the memory of an LSTM's input product is used for other values.
    """

    title: str
    make: Callable[[], dict]
    architecture: int = 80
    precision: str = "float32"
    division: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = Schedule()  # noqa: RUF009
    grad: bool = True
    overwrite: bool = False

    @property
    def launch(self) -> str:
        """How its steps are launched."""
        if self.division.get("whole_sequence"):
            return "whole sequence"
        return "steps" if self.division.get("fused", True) else "steps, cuBLAS"


@dataclass(frozen=True)
class Outcome:
    """What an emulated case gave.

    Args:
        error: the largest relative error of outputs, statistics and gradients.
        tolerance: what rounding explains.
    """

    emulation: Emulation
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error < self.tolerance and not self.emulation.findings


@dataclass(frozen=True)
class Executed:
    """What a case gave on a GPU: the largest relative error of several runs, and what rounding explains."""

    error: float
    tolerance: float


def run(case: Case, edit: Edit | None = None, stop: bool = False) -> Outcome:
    """Emulate a case; `edit` changes kernels, and with `stop` the first finding is raised as a fault."""
    with (
        _prepared(case) as (args, values, engine, expected, tolerance),
        emulated(case.architecture, case.schedule, edit, stop) as emulation,
    ):
        found = values(engine, args, torch.float32)
    return Outcome(emulation, worst(expected, found), tolerance)


def execute(case: Case, runs: int = 3) -> Executed:
    """Run a case on this machine's GPU. The first run launches each step; the others capture and replay CUDA graphs."""
    with _prepared(case) as (args, values, engine, expected, tolerance), patch.dict(os.environ, {"BNRNN_TUNE": "0"}):
        given = tree_map_only(Tensor, lambda v: v.cuda(), args)
        errors = []
        for _ in range(runs):
            found = values(engine, given, torch.float32)
            errors.append(worst(expected, {name: value.cpu() for name, value in found.items()}))
    return Executed(max(errors), tolerance)


@contextmanager
def _prepared(case: Case) -> Iterator[tuple[dict, Callable, Callable, dict[str, Tensor], float]]:
    """Context manager with a case's division and precision.

    Yields its arguments, how they are run, the engine, and what the reference gives, with the tolerance.
    """
    torch.manual_seed(0)
    args = case.make()
    reference, engine = _scans(args)
    if case.precision == "bfloat16":
        engine = partial(engine, product_dtype=torch.bfloat16)
    if case.overwrite:
        engine = partial(_overwriting, engine)
    values = everything if case.grad else _outputs
    with without_shape_checks(), _divided(**case.division), _precision(case.precision):
        expected = values(reference, args)
        explained = max(_explained(values, reference, args, expected, case.precision) for _ in range(3))
        launches._known.clear()
        try:
            yield args, values, engine, expected, max(LEAST[case.precision], 3 * explained)
        finally:
            launches._known.clear()


def _explained(values: Callable, reference: Callable, args: dict, expected: dict[str, Tensor], precision: str) -> float:
    """The largest relative error of the reference where its arguments are rounded as the factors of products are."""
    if precision == "float32":
        return worst(expected, values(reference, args, torch.float32))
    rounded = tree_map_only(Tensor, lambda v: v * (1 + ROUNDED[precision] * torch.randn_like(v)), args)
    return worst(expected, values(reference, rounded))


def _overwriting(engine: Callable, x_proj: Tensor, **options: Any) -> Any:
    return engine(x_proj * 1.0, overwrite=True, **options)  # a tensor of which nothing else needs the values


def _scans(args: dict) -> tuple[Callable, Callable]:
    """The reference and the engine for these arguments."""
    if "weight_hh" in args:
        return lstm_scan, triton_scan
    one_gate = args["weight"].shape[1] == args["weight"].shape[2]
    return (_rnn_reference if one_gate else rhn.rhn_scan), rhn_triton_scan


def worst(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The largest relative error; infinity for NaN. What is 0 except for rounding is compared with the largest."""
    assert found.keys() == expected.keys()
    largest, errors = max(ref.norm().item() for ref in expected.values()), [0.0]
    for name, ref in expected.items():
        if ref.numel():
            zero = ref.abs().max() < 1e-12
            error = (found[name].double() - ref).norm().item() / (largest if zero else ref.norm().item())
            errors.append(error if error == error else float("inf"))
    return max(errors)


def _outputs(scan: Callable, args: dict, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Outputs alone, of a scan without a backward pass."""
    with torch.no_grad():
        y, last, used = scan(**in_dtype(args, dtype))
    last = {"s": last} if isinstance(last, Tensor) else dict(zip("hc", last, strict=True))
    return {"y": y, **last, **{name: value for name, value in used._asdict().items() if value is not None}}


@contextmanager
def _divided(**changes: Any) -> Iterator[None]:
    """Context manager in which the rule's division is changed."""
    rule = tuning.by_rule
    with patch.object(tuning, "by_rule", lambda size: replace(rule(size), **changes)):
        yield


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _lstm(T: int, B: int, H: int, given: tuple[bool, ...] = ALL, **options: Any) -> Callable[[], dict]:
    return partial(problem, T, B, H, given, **options)


def _rnn(T: int, B: int, H: int, normalized: bool = True, **options: Any) -> dict:
    """Random arguments of a tanh RNN: a highway network of one layer and one gate."""
    shapes = rhn.shapes(T, B, H, 1, H, 0)
    args = {name: torch.randn(shapes[name]).double() for name in ("x_proj", "s", "weight", "bias")}
    args["weight"] /= H**0.5
    return args | ({"gamma_z": 0.5 * torch.randn(1, H).double()} if normalized else {}) | options


def _rnn_reference(x_proj: Tensor, s: Tensor, weight: Tensor, bias: Tensor, gamma_z: Tensor | None = None,
                   population: rhn.RHNStatistics | None = None, **options: Any) -> Any:  # fmt: skip
    """`rnn_scan`, with the arguments and results of a highway network."""
    gamma, of = (None if gamma_z is None else gamma_z[0]), None
    if population is not None:
        of = population.mean_z[:, 0], population.var_z[:, 0]  # pyright: ignore[reportOptionalSubscript]
    shift = None if gamma is None else bias[0]
    x_proj = x_proj + bias[0] if gamma is None else x_proj
    y, last, seen = rnn_scan(x_proj, s, weight[0], gamma, shift, population=of, **options)
    mean, var = (None if v is None else v[:, None] for v in seen)
    return y, last, rhn.RHNStatistics(mean_z=mean, var_z=var)


def _padded_rhn() -> dict:
    """With a small eps, gradients through few normalized values would be mostly rounding."""
    return rhn_problem(T=3, H=5, D=2, batch_sizes=[6, 5, 3], eps=0.1)


def few() -> list[Case]:
    """Cases of a minute: each recurrence, each way to launch, both architectures."""
    return [
        Case("BN-LSTM, 6 x 17", _lstm(3, 6, 17), 80, "float32", SEQUENCE, Schedule(1)),
        Case("BN-LSTM padded, 40 x 20", _lstm(2, 40, 20, batch_sizes=[40, 33]), 90, "tf32", SEQUENCE, Schedule(2)),
        Case("LSTM padded, 6 x 5", _lstm(3, 6, 5, NONE, batch_sizes=[6, 5, 1]), 80, "bfloat16", APART),
        Case("BN-RHN, 6 x 7", partial(rhn_problem, T=2, D=2), 80, "tf32", STEPS),
        Case("BN-RNN padded, 6 x 5", partial(_rnn, 2, 6, 5, batch_sizes=[6, 4]), 90, "float32"),
    ]


def every() -> list[Case]:
    """All cases: half an hour."""
    problems = {
        "LSTM, 6 x 5": _lstm(3, 6, 5, NONE),
        "LSTM, inputs normalized, 5 x 17": _lstm(3, 5, 17, INPUT),
        "BN-LSTM, 6 x 17": _lstm(3, 6, 17),
        "BN-LSTM, 20 x 40": _lstm(2, 20, 40),
        "BN-LSTM padded, 6 x 9": _lstm(3, 6, 9, batch_sizes=[6, 5, 3]),
        "BN-LSTM padded, finished count, 5 x 33": _lstm(3, 5, 33, batch_sizes=[5, 4, 2], ended_count=True),
        "BN-LSTM population, 5 x 9": _lstm(3, 5, 9, population=True),
        "LSTM padded, 6 x 17": _lstm(3, 6, 17, NONE, batch_sizes=[5, 4, 1]),
    }
    wide = {
        "BN-LSTM, 40 x 20": _lstm(2, 40, 20),
        "BN-LSTM padded, 35 x 17": _lstm(2, 35, 17, batch_sizes=[35, 20]),
        "BN-LSTM population, 33 x 9": _lstm(2, 33, 9, population=True),
        "LSTM, 40 x 5": _lstm(2, 40, 5, NONE),
    }
    highway = {
        "RNN, 6 x 5": partial(_rnn, 2, 6, 5, normalized=False),
        "BN-RNN, 6 x 17": partial(_rnn, 2, 6, 17),
        "BN-RNN padded, 6 x 9": partial(_rnn, 3, 6, 9, batch_sizes=[6, 4, 3]),
        "RHN, 6 x 7": partial(rhn_problem, T=2, D=2, given=BARE),
        "RHN coupled, padded, 6 x 7": partial(rhn_problem, T=3, D=2, coupled=True, given=BARE, batch_sizes=[6, 4, 3]),
        "BN-RHN, 6 x 17": partial(rhn_problem, T=2, H=17, D=2),
        "BN-RHN, one layer normalized, 6 x 7": partial(rhn_problem, T=2, D=3, K=1),
        "BN-RHN padded, 6 x 5": _padded_rhn,
        "BN-RHN population, 6 x 9": partial(rhn_problem, T=2, H=9, D=2, population=True),
        "BN-RHN, 40 x 9": partial(rhn_problem, T=2, B=40, H=9, D=2),
    }
    cases = list[Case]()
    for number, (title, make) in enumerate(problems.items()):
        for division in (SEQUENCE, STEPS, APART):
            for precision in LEAST:
                cases.append(Case(title, make, 80, precision, division, Schedule(number)))
        cases.append(Case(f"{title}, single warps", make, 80, "tf32", SEQUENCE, Schedule(number, warps=1)))
        cases.append(Case(title, make, 90, "tf32", SEQUENCE, Schedule(number)))
    for number, (title, make) in enumerate(wide.items()):
        for division, precision in ((SEQUENCE, "tf32"), (STEPS, "bfloat16"), (SEQUENCE, "float32")):
            cases.append(Case(title, make, 90, precision, division, Schedule(number)))
        cases.append(Case(title, make, 80, "tf32", SEQUENCE, Schedule(number)))
    for number, (title, make) in enumerate(highway.items()):
        for precision in LEAST:
            cases.append(Case(title, make, 80, precision, STEPS, Schedule(number)))
        cases.append(Case(title, make, 80, "tf32", APART, Schedule(number)))
        cases.append(Case(title, make, 90, "tf32", STEPS, Schedule(number)))
    for title in ("BN-LSTM, 6 x 17", "BN-LSTM padded, 6 x 9", "LSTM, inputs normalized, 5 x 17"):
        for division in (SEQUENCE, APART):
            cases.append(Case(f"{title}, memory overwritten", problems[title], 80, "tf32", division, overwrite=True))
    for delayed in range(3):
        cases.append(Case(f"BN-LSTM, 6 x 40, program {delayed} delayed", _lstm(4, 6, 40), 80, "tf32", SEQUENCE,
                          Schedule(delayed, delayed=delayed)))  # fmt: skip
    for title in ("BN-LSTM, 6 x 17", "BN-LSTM population, 5 x 9", "LSTM padded, 6 x 17"):
        for division in (SEQUENCE, STEPS):
            cases.append(Case(f"{title}, evaluation", problems[title], 80, "tf32", division, grad=False))
    title = "BN-RHN population, 6 x 9"
    cases.append(Case(f"{title}, evaluation", highway[title], 80, "tf32", STEPS, grad=False))
    return cases


def of_costs() -> list[Case]:
    """One step of the sizes for which a time is estimated."""
    sizes = {
        "BN-LSTM, 64 x 100 (sequential MNIST)": _lstm(1, 64, 100),
        "BN-LSTM, 40 x 240 (attentive reader)": _lstm(1, 40, 240),
    }
    cases = [Case(title, make, 90, "tf32", way) for title, make in sizes.items() for way in (STEPS, SEQUENCE)]
    return [*cases, Case("LSTM, 16 x 768 (measured with cuDNN)", _lstm(1, 16, 768, NONE), 90, "bfloat16", STEPS)]


def of_mutations(file: str) -> list[Case]:
    """Few cases that together use all lines of a file of kernels."""
    lstm = [
        Case("BN-LSTM padded, 6 x 17", _lstm(3, 6, 17, batch_sizes=[6, 5, 3]), 80, "float32", SEQUENCE, overwrite=True),
        Case("BN-LSTM, 6 x 40", _lstm(2, 6, 40), 80, "float32", STEPS),
        Case("BN-LSTM, 6 x 5", _lstm(2, 6, 5), 80, "float32", APART),
        Case("BN-LSTM population, evaluation, 5 x 9", _lstm(3, 5, 9, population=True), 80, "tf32", STEPS, grad=False),
    ]
    highway = [
        Case("BN-RHN padded, 6 x 5", _padded_rhn, 80, "float32", STEPS),
        Case("BN-RHN, 6 x 17", partial(rhn_problem, T=2, H=17, D=2), 80, "float32", STEPS),
    ]
    return {"lstm": lstm, "rhn": highway}.get(file.partition("/")[0], lstm + highway)
