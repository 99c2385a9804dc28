"""The highway recurrence in float64: the reference compared with equations, engines compared with the reference."""

import itertools
import random
from functools import partial

import pytest
import torch
from torch import Tensor

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan.native import build
from bnrnn.scan.rhn.cpu import CompiledRHN
from bnrnn.scan.rhn.fused import RHNSteps, rhn_fused_scan
from bnrnn.scan.rhn.reference import RHNStatistics, rhn_scan
from tests.helpers import assert_near, without_shape_checks

OPTIONAL = ("bias", "gamma_x", "gamma_s", "beta_s", "gamma_z")
GIVEN = [dict(zip(OPTIONAL, flags, strict=True)) for flags in itertools.product([True, False], repeat=5)]
GIVEN = [given for given in GIVEN if given["gamma_s"] or not given["beta_s"]]
ALL = dict.fromkeys(OPTIONAL, True)
ENGINES = ["fused", pytest.param("cpu", marks=pytest.mark.skipif(build.compiler() is None, reason="no compiler"))]
SIZES = [[6, 5, 5, 3, 2], [6, 6, 6, 6, 6], [5, 4, 3, 3, 3]]


def problem(T=5, B=6, H=7, D=3, coupled=False, given=ALL, K=None, population=False, **options) -> dict:
    """Random arguments in float64."""
    G, K = (2 if coupled else 3) * H, D if K is None else K
    shapes = {"bias": (D, G), "gamma_x": (G,), "gamma_s": (K, H), "beta_s": (K, H), "gamma_z": (D, G)}
    args = {"x_proj": torch.randn(T, B, G), "s": torch.randn(B, H), "weight": torch.randn(D, G, H) / H**0.5}
    args |= {name: torch.randn(shape) for name, shape in shapes.items() if given[name]}
    for name in ("gamma_s", "gamma_z"):
        if name in args:
            args[name] *= 0.5
    pairs = [(torch.randn(shape), torch.rand(shape) + 0.1) if there else (None, None) for shape, there in (
        ((T, G), given["gamma_x"]), ((T, K, H), given["gamma_s"]), ((T, D, G), given["gamma_z"]))]  # fmt: skip
    of = RHNStatistics(*(None if v is None else v.double() for pair in pairs for v in pair))
    return {**{k: v.double() for k, v in args.items()}, "population": of if population else None, **options}


def everything(run, problem: dict, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Outputs, statistics and gradients, by name."""
    torch.manual_seed(1)
    args = {k: v.to(dtype).requires_grad_() if isinstance(v, Tensor) else v for k, v in problem.items()}
    if args["population"] is not None:
        args["population"] = RHNStatistics(*(None if v is None else v.to(dtype) for v in args["population"]))
    y, s, used = call(run, args)
    loss = sum((v * torch.randn(v.shape, dtype=torch.float64).to(dtype)).sum() for v in (y, s))
    leaves = {k: v for k, v in args.items() if isinstance(v, Tensor)}
    grads = torch.autograd.grad(loss, list(leaves.values()))
    seen = {k: v for k, v in used._asdict().items() if v is not None}
    return {"y": y, "s": s, **seen, **{f"d{k}": g for k, g in zip(leaves, grads, strict=True)}}


def call(run, args: dict):
    rest = {k: v for k, v in args.items() if k not in ("x_proj", "s", "weight")}
    return run(args["x_proj"], args["s"], args["weight"], **rest)


def rounding_error(problem: dict, seed: int) -> float:
    """The largest relative error of the reference in float32, where the arguments are moved by about 1e-7."""
    torch.manual_seed(seed)
    moved = {k: v * (1 + 1e-7 * torch.randn_like(v)) if isinstance(v, Tensor) else v for k, v in problem.items()}
    exact, found = everything(rhn_scan, moved), everything(rhn_scan, moved, torch.float32)
    return max(((found[k] - v).norm() / v.norm()).item() for k, v in exact.items() if v.norm() > 1e-9)


def assert_agrees(engine: str, problem: dict) -> None:
    kernel, dtype = {"fused": (RHNSteps, torch.float64), "cpu": (CompiledRHN, torch.float32)}[engine]
    assert_close_to_reference(partial(rhn_fused_scan, kernel), problem, dtype)


def assert_close_to_reference(run, problem: dict, dtype: torch.dtype) -> None:
    """Of a scan in this dtype, with the reference in float64."""
    expected, found = everything(rhn_scan, problem), everything(run, problem, dtype)
    assert found.keys() == expected.keys()
    # Some gradients are 0 except for rounding, because normalization removes them; these are compared with the largest.
    tol, size = 1e-9, max(ref.norm().item() for name, ref in expected.items() if name.startswith("d"))
    if dtype == torch.float32:  # an engine is held to the size of the reference's own errors in float32
        with without_shape_checks():
            tol = max(1e-5, 3 * max(rounding_error(problem, seed) for seed in range(4)))
    for name, ref in expected.items():
        if ref.abs().max() < 1e-12:
            assert found[name].norm() < tol * size, name
        else:
            assert_near(name, ref, found[name], tol)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n", range(len(GIVEN)))
@pytest.mark.parametrize("population", [False, True])
def test_engines_agree_with_the_reference_with_any_part_of_bn(engine, n, population):
    """Coupled gates and separate ones take turns."""
    assert_agrees(engine, problem(given=GIVEN[n], coupled=(n + population) % 2 == 0, population=population))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "shape", [(1, 5, 16, 1), (4, 2, 9, 2), (3, 9, 1, 3), (2, 4, 3, 5), (12, 7, 20, 3), (3, 5, 100, 2), (2, 15, 530, 2)]
)
@pytest.mark.parametrize(("K", "coupled"), [(1, False), (None, True)])
def test_engines_agree_at_edges_of_shape(engine, shape, K, coupled):
    assert_agrees(engine, problem(*shape, K=K, coupled=coupled))


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_at_random_shapes(engine):
    draw = random.Random(0)
    for _ in range(15):
        T, B, H, D = draw.randint(1, 9), draw.randint(3, 20), draw.randint(1, 70), draw.randint(1, 4)
        sizes = sorted((draw.randint(3, B) for _ in range(T)), reverse=True) if draw.random() < 0.5 else None
        given = draw.choice(GIVEN)
        options = {"coupled": draw.random() < 0.5, "population": draw.random() < 0.3, "batch_sizes": sizes}
        assert_agrees(engine, problem(T, B, H, D, given=given, **options))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("threads", [2])
def test_several_threads_give_the_same(engine, threads):
    torch.set_num_threads(threads)
    assert_agrees(engine, problem(4, 6, 70))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", [ALL, dict.fromkeys(OPTIONAL, False)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("population", [False, True])
@pytest.mark.parametrize("H", [7, 21])
def test_engines_agree_on_padded_batches(engine, given, sizes, population, H):
    assert_agrees(engine, problem(H=H, given=given, population=population, batch_sizes=sizes))


def test_gradients_of_the_reference_are_right():
    args = problem(T=3, B=4, H=2, D=2)
    names = [k for k, v in args.items() if isinstance(v, Tensor)]

    def run(*values: Tensor) -> Tensor:
        return call(rhn_scan, args | dict(zip(names, values, strict=True)))[0]

    leaves = [args[k].requires_grad_() for k in names]
    run(*leaves)
    with without_shape_checks():
        assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("coupled", [False, True])
def test_without_norm_it_is_the_equations_unit_by_unit(coupled):
    args = problem(T=3, B=2, H=3, D=2, coupled=coupled, given=dict.fromkeys(OPTIONAL, False) | {"bias": True})
    y, last, _ = call(rhn_scan, args)
    H = 3
    for b in range(2):
        s = args["s"][b].tolist()
        for t in range(3):
            for d in range(2):
                a = []
                for k in range(len(args["bias"][0])):
                    total = args["bias"][d, k].item() + sum(args["weight"][d, k, j].item() * s[j] for j in range(H))
                    a.append(total + (args["x_proj"][t, b, k].item() if d == 0 else 0.0))
                new = []
                for j in range(H):
                    h, transform = torch.tensor(a[j]).tanh().item(), torch.tensor(a[H + j]).sigmoid().item()
                    carry = 1 - transform if coupled else torch.tensor(a[2 * H + j]).sigmoid().item()
                    new.append(h * transform + s[j] * carry)
                s = new
            assert_near(f"y, sequence {b}, step {t}", y[t, b], torch.tensor(s).double(), 1e-6)
        assert_near("last", last[b], torch.tensor(s).double(), 1e-6)


def test_a_finished_sequence_keeps_its_state_and_does_not_count():
    args = problem(batch_sizes=SIZES[0])
    y, last, used = call(rhn_scan, args)
    assert torch.equal(y[1:, 5], y[:1, 5].expand(4, -1)) and torch.equal(last, y[-1])
    alone = {k: v[:, :3] if k == "x_proj" else v[:3] if k == "s" else v for k, v in args.items()} | {
        "batch_sizes": None
    }
    other = args | {"x_proj": args["x_proj"].clone()}
    other["x_proj"][3, 3:], other["x_proj"][4, 2:] = 1e3, 1e3
    assert_near("what ended sequences read", y, call(rhn_scan, other)[0])
    first = call(rhn_scan, alone | {"population": RHNStatistics(*used)})[0]
    assert_near("the longest ones", y[:, :2], first[:, :2])


def test_a_second_backward_is_an_error():
    args = {k: v.requires_grad_() if isinstance(v, Tensor) else v for k, v in problem().items()}
    loss = call(partial(rhn_fused_scan, RHNSteps), args)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already run backward"):
        loss.backward()


def in_float32(problem: dict) -> dict:
    population = problem["population"] and RHNStatistics(*(v.float() for v in problem["population"]))
    return {k: v.float() if isinstance(v, Tensor) else v for k, v in problem.items()} | {"population": population}


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_bfloat16_is_the_precision_of_products_alone(engine):
    scan.set_backend(engine)
    args = in_float32(problem(6, 8, 24))
    full, low = call(scan.rhn_scan, args), call(partial(scan.rhn_scan, product_dtype=torch.bfloat16), args)
    assert_near("y", full[0], low[0], 5e-2)
    assert not torch.equal(full[0], low[0])
    assert low[0].dtype == low[1].dtype == low[2].var_z.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(scan.rhn_scan, args)[0], low[0])


def test_the_reference_in_bfloat16_is_the_other_engine_in_bfloat16():
    results = []
    for engine in ("reference", "fused"):
        scan.set_backend(engine)
        torch.manual_seed(2)
        args = in_float32(problem(4, 8, 24, given=dict.fromkeys(OPTIONAL, False)))
        results.append(call(partial(scan.rhn_scan, product_dtype=torch.bfloat16), args)[0])
    assert_near("y", *results, 1e-4)


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_arguments_in_bfloat16_give_outputs_and_states_of_their_own_precision(engine):
    scan.set_backend(engine)
    args = {k: v.bfloat16() if isinstance(v, Tensor) else v for k, v in problem(4, 8, 24).items()}
    y, s, used = call(scan.rhn_scan, args)
    assert (y.dtype, s.dtype, used.var_z.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    raised = in_float32(args)
    assert torch.equal(y, call(partial(scan.rhn_scan, product_dtype=torch.bfloat16), raised)[0].bfloat16())
    y, s, _ = call(scan.rhn_scan, args | {"s": args["s"].float()})
    assert (y.dtype, s.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("name", ["s", *OPTIONAL, "mean_x", "var_s", "mean_z"])
@pytest.mark.parametrize("wrong", [lambda v: v[..., 1:], lambda v: v[:-1], lambda v: v.double()])
def test_wrong_shapes_and_dtypes_are_named_before_a_kernel_reads_them(name, wrong):
    args = in_float32(problem(population=True))
    if name in RHNStatistics._fields:
        args["population"] = args["population"]._replace(**{name: wrong(getattr(args["population"], name))})
    else:
        args[name] = wrong(args[name])
    with pytest.raises(BnrnnError, match=r" does not match x_proj: expected"):
        call(scan.rhn_scan, args)


def test_sizes_of_the_weights_that_do_not_fit_are_named():
    args = in_float32(problem())
    for weight, message in (
        (args["weight"][0], r"weight must be \(D, G, H\), got \(21, 7\)"),
        (args["weight"][..., 1:], r"x_proj must be \(T, B, 2H\) or \(T, B, 3H\) with H = 6, got \(5, 6, 21\)"),
        (args["weight"][:, 7:], r"weight does not match x_proj|x_proj must be"),
        (args["weight"][:2], "does not match x_proj"),
        (args["weight"].double(), "weight does not match x_proj"),
    ):
        with pytest.raises(BnrnnError, match=message):
            call(scan.rhn_scan, args | {"weight": weight})


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize("name", RHNStatistics._fields)
def test_a_population_that_lacks_a_term_is_an_error_of_every_engine(engine, name):
    scan.set_backend(engine)
    args = in_float32(problem(population=True))
    gamma = f"gamma_{name[-1]}"
    lacking = args | {"population": args["population"]._replace(**{name: None})}
    with pytest.raises(BnrnnError, match=f"population.{name} is None, expected a tensor because {gamma} is given"):
        call(scan.rhn_scan, lacking)
    del lacking[gamma]
    if name[-1] == "s":
        del lacking["beta_s"]
        lacking["population"] = lacking["population"]._replace(mean_s=None, var_s=None)
    assert call(scan.rhn_scan, lacking)[0].isfinite().all()


@pytest.mark.parametrize("sizes", [[6, 5, 5, 3], [7, 5, 5, 3, 2], [6, 3, 5, 3, 2], [6, 5, 5, 3, 0]])
def test_wrong_batch_sizes_are_named(sizes):
    with pytest.raises(
        BnrnnError, match="batch_sizes must be 5 numbers between 6 and 1, one per step, never increasing"
    ):
        call(scan.rhn_scan, in_float32(problem(batch_sizes=sizes)))


def test_scales_of_more_layers_than_there_are_are_an_error():
    args = in_float32(problem(D=2, K=3) | {"population": None})
    with pytest.raises(BnrnnError, match=r"gamma_s does not match x_proj: expected \(\(2, 7\)"):
        call(scan.rhn_scan, args)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_argument_may_be_any_view(engine):
    scan.set_backend(engine)
    args = in_float32(problem(population=True))
    expected = call(scan.rhn_scan, args)[0]

    def view(v):
        return torch.stack([v, v + 1], -1)[..., 0] if isinstance(v, Tensor) else v

    views = {name: view(value) for name, value in args.items()}
    views["population"] = RHNStatistics(*map(view, args["population"]))
    assert not views["s"].is_contiguous() and torch.equal(call(scan.rhn_scan, views)[0], expected)
