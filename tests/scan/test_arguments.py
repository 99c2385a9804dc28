"""No argument reaches a kernel, which reads memory by address, unless it fits: every engine raises BnrnnError."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.layers.rhn import RHN
from tests.helpers import assert_near
from tests.scan.cases import OF_RHN, everything, gru_problem, in_dtype, problem, rhn_problem

ENGINES = ["reference", "fused", "cpu"]
ALL = [*ENGINES, "triton"]
T, B, H, D = 3, 4, 5, 2


def lstm() -> dict[str, Any]:
    return in_dtype(problem(T, B, H, population=True))


def rhn() -> dict[str, Any]:
    return in_dtype(rhn_problem(T, B, H, D, population=True))


def gru() -> dict[str, Any]:
    return in_dtype(gru_problem(T, B, H)) | {"population": ()}


def run_gru(population: tuple[()], **arguments: Any) -> Any:
    return scan.gru_scan(**arguments)


def sequence() -> dict[str, Any]:
    named = {"x": torch.randn(T, B, H), "gamma": torch.randn(H), "beta": torch.randn(H)}
    return named | {"eps": 1e-5, "population": (torch.randn(T, H), torch.rand(T, H) + 0.1)}


def over_time() -> dict[str, Any]:
    return sequence() | {"population": (torch.randn(1, H), torch.rand(1, H) + 0.1)}


SCANS: dict[Callable[..., Any], Callable[[], dict[str, Any]]] = {
    scan.lstm_scan: lstm,
    scan.rhn_scan: rhn,
    run_gru: gru,
    scan.normalize_sequence: sequence,
    scan.normalize_over_time: over_time,
}


def places(arguments: dict[str, Any]) -> list[tuple[str, int | None]]:
    """Every tensor: by name, and by its index in the population."""
    inside = [("population", n) for n in range(len(arguments["population"]))]
    return [(name, None) for name, value in arguments.items() if isinstance(value, Tensor)] + inside


def changed(
    arguments: dict[str, Any], place: tuple[str, int | None], change: Callable[[Tensor], Any]
) -> dict[str, Any]:
    name, n = place
    value = arguments[name]
    if n is None:
        return arguments | {name: change(value)}
    kind = tuple if type(value) is tuple else type(value)._make
    return arguments | {name: kind(change(v) if k == n else v for k, v in enumerate(value))}


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a feature too few": lambda v: v[..., :-1],
    "a feature too many": lambda v: torch.cat([v, v[..., :1]], -1),
    "a row too few": lambda v: v[:-1],
    "an axis too many": lambda v: v[None],
    "an axis too few": lambda v: v[0],
    "nothing": lambda v: v[:0],
    "float64": lambda v: v.double(),
    "int64": lambda v: v.long(),
    "another device": lambda v: v.to("meta"),
}


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("run", SCANS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_tensor_that_does_not_fit_is_an_error(engine, run, wrong):
    scan.set_backend(engine)
    arguments = SCANS[run]()
    if wrong == "nothing":
        run(**arguments)  # as it is, it fits
    fields = getattr(arguments["population"], "_fields", ("mean", "var"))
    for place in places(arguments):
        if place[0] in ("x_proj", "x"):
            continue  # the others are held against it
        name = place[0] if place[1] is None else fields[place[1]]
        if name in ("weight", "gamma_s"):  # their sizes are those of others
            name = r"\w+"
        message = rf"\b{name} does not match x(_proj)?: expected \(|(weight|x_proj) must be \("
        with pytest.raises(BnrnnError, match=message):
            run(**changed(arguments, place, WRONG[wrong]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("run", SCANS, ids=lambda run: run.__name__)
def test_a_tensor_of_any_layout_gives_the_same(engine, run):
    """Transposed, with gaps, or with its sign kept as a flag, as parts of complex numbers have it."""
    layouts = [
        lambda v: v.transpose(0, -1).contiguous().transpose(0, -1),
        lambda v: torch.stack([v, v + 1], -1)[..., 0],
        lambda v: torch._neg_view(-v),
    ]
    scan.set_backend(engine)
    arguments = SCANS[run]()
    expected = run(**arguments)[0]
    for place in places(arguments):
        for n, layout in enumerate(layouts):
            assert_near(f"{place} {n}", expected, run(**changed(arguments, place, layout))[0])


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("run", [scan.lstm_scan, scan.rhn_scan], ids=lambda run: run.__name__)
def test_a_population_that_lacks_a_term_is_an_error(engine, run):
    """It is not, where the term is not normalized."""
    scan.set_backend(engine)
    arguments = SCANS[run]()
    for name in arguments["population"]._fields:
        term = name.partition("_")[2]
        lacking = arguments | {"population": arguments["population"]._replace(**{name: None})}
        message = f"population.{name} is None, expected a tensor because gamma_{term} is given"
        with pytest.raises(BnrnnError, match=message):
            run(**lacking)
        if engine != "triton":  # its interpreter is slow
            lacking = {k: v for k, v in lacking.items() if k not in (f"gamma_{term}", "beta_s" if term == "s" else "")}
            lacking["population"] = lacking["population"]._replace(**{f"mean_{term}": None, f"var_{term}": None})
            assert run(**lacking)[0].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("run", SCANS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("sizes", [[B] * (T + 1), [B + 1, B, B], [B, 1, 2], [B, B, 0], []])
def test_batch_sizes_that_do_not_fit_are_an_error(engine, run, sizes):
    scan.set_backend(engine)
    message = f"batch_sizes must be {T} numbers between {B} and 1, one per step, never increasing"
    with pytest.raises(BnrnnError, match=message):
        run(**SCANS[run](), batch_sizes=sizes)


def test_a_state_of_another_batch_never_reaches_the_kernel():
    with pytest.raises(BnrnnError, match="the state must be a tuple of s"):
        RHN(3, 512)(torch.randn(2, 400, 3), (torch.zeros(1, 512),))


RECURRENCES = [pytest.param(scan.lstm_scan, problem, (False,) * 5, id="lstm"),
               pytest.param(scan.rhn_scan, rhn_problem, dict.fromkeys(OF_RHN, False), id="rhn"),
               pytest.param(scan.gru_scan, gru_problem, (False,) * 3, id="gru")]  # fmt: skip


@pytest.mark.parametrize(("run", "draw", "none"), RECURRENCES)
@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_bfloat16_is_the_precision_of_products_alone(engine, run, draw, none):
    scan.set_backend(engine)
    args = in_dtype(draw(30 if draw is problem else 6, 8, 24))
    full, low = (everything(run, args | {"product_dtype": dtype}, torch.float32) for dtype in (None, torch.bfloat16))
    assert {v.dtype for v in low.values()} == {torch.float32}
    assert 1e-4 < ((low["y"] - full["y"]).norm() / full["y"].norm()).item() < (1e-2 if draw is problem else 5e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(**args)[0], low["y"])
    halves = in_dtype(args, torch.bfloat16)
    y, last, *used = run(**halves)
    assert {v.dtype for v in (y, *tree_leaves(last))} == {torch.bfloat16}
    assert {v.dtype for of in used for v in of if v is not None} == ({torch.float32} if used else set())
    assert torch.equal(y, run(**in_dtype(halves), product_dtype=torch.bfloat16)[0].bfloat16())
    states = {name: args[name] for name in ("h", "c", "s") if name in args}
    y, last, *_ = run(**halves | states)
    assert y.dtype == torch.bfloat16 and {v.dtype for v in tree_leaves(last)} == {torch.float32}


@pytest.mark.parametrize(("run", "draw", "none"), RECURRENCES)
def test_bfloat16_gives_the_same_on_every_engine_that_does_not_refuse_it(run, draw, none):
    args, found = draw(4, 8, 24, given=none), []
    for engine in ("reference", "fused"):
        scan.set_backend(engine)
        found.append(everything(run, args | {"product_dtype": torch.bfloat16}, torch.float32))
    assert_near("y", found[0]["y"], found[1]["y"], 1e-4)
    scan.set_backend("cpu")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BnrnnError, match="float32 on the CPU"):
        run(**in_dtype(args))


@pytest.mark.parametrize("engine", ENGINES)
def test_random_sizes_agree_with_the_reference(engine):
    """Forward and backward; under `make sanitize` every read and write is checked."""
    draw = random.Random(0)
    for _ in range(10):
        num_steps, batch, size = draw.randint(1, 4), draw.randint(2, 9), draw.randint(1, 40)
        sizes = sorted((draw.randint(1, batch) for _ in range(num_steps)), reverse=True)
        x = torch.randn(num_steps, batch, 4 * size, requires_grad=True)
        weight = torch.randn(4 * size, size) / size
        zeros = torch.zeros(batch, size)
        found = []
        for name in ("reference", engine):
            scan.set_backend(name)
            y = scan.lstm_scan(x, zeros, zeros, weight, batch_sizes=sizes)[0]
            found.append((y, *torch.autograd.grad(y.square().sum(), x)))
        for ref, out in zip(*found, strict=True):
            assert_near(f"{num_steps} {batch} {size}", ref, out)
