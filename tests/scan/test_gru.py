"""The recurrences of GRU and light GRU: the reference compared with equations, engines compared with the reference."""

import itertools
import logging
import math
import random

import pytest
import torch
from torch import Tensor

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan import backends, operator
from bnrnn.scan.gru.reference import gru_scan
from bnrnn.scan.native import build
from tests.helpers import assert_near, without_shape_checks
from tests.scan.captured import graphs
from tests.scan.cases import assert_agrees, everything, gru_problem, in_dtype

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
ENGINES = ["fused", pytest.param("cpu", marks=needs_compiler)]
KINDS = [(3, "tanh"), (3, "relu"), (2, "tanh"), (2, "relu")]
GIVEN = list(itertools.product([True, False], repeat=3))
SIZES = [[6, 5, 5, 3, 1], [6, 6, 6, 6, 6], [5, 4, 3, 3, 3]]  # how many of six sequences run at each of five steps


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("num_gates", "nonlinearity"), KINDS)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("sizes", [None, SIZES[0]])
def test_engines_agree_with_the_reference_with_any_part(engine, num_gates, nonlinearity, given, sizes):
    assert_agrees(engine, gru_problem(5, 6, 23, num_gates, given, nonlinearity=nonlinearity, batch_sizes=sizes))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "shape", [(1, 5, 16), (4, 2, 19), (3, 9, 1), (2, 1, 3), (2, 3, 100), (40, 27, 36), (2, 15, 530)]
)
@pytest.mark.parametrize("num_gates", [2, 3])
@pytest.mark.parametrize("normalized", [False, True])
def test_engines_agree_at_edges_of_shape(engine, shape, num_gates, normalized):
    assert_agrees(engine, gru_problem(*shape, num_gates, (normalized, True, False)))


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_at_random_shapes(engine):
    draw = random.Random(0)
    for _ in range(20):
        T, B, H = draw.randint(1, 9), draw.randint(1, 20), draw.randint(1, 70)
        sizes = sorted((draw.randint(1, B) for _ in range(T)), reverse=True) if draw.random() < 0.5 else None
        num_gates, nonlinearity = draw.choice(KINDS)
        given = [draw.random() < 0.5 for _ in range(3)]
        options = {"batch_sizes": sizes, "nonlinearity": nonlinearity, "eps": draw.choice([1e-5, 0.1])}
        assert_agrees(engine, gru_problem(T, B, H, num_gates, given, **options))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_gates", [2, 3])
@pytest.mark.parametrize("normalized", [False, True])
def test_without_gradients_it_gives_the_same_and_leaves_x_alone(engine, num_gates, normalized):
    scan.set_backend(engine)
    args = in_dtype(gru_problem(4, 5, 20, num_gates, (normalized, True, True), batch_sizes=[5, 5, 3, 1]))
    before, expected = args["x_proj"].clone(), gru_scan(**args)
    for found in (scan.gru_scan(**args), scan.gru_scan(**args, overwrite=True)):
        for name, ref, out in zip(("y", "last"), expected, found, strict=True):
            assert_near(name, ref, out)
    args["x_proj"].requires_grad_()
    scan.gru_scan(**args)[0].sum().backward()
    assert torch.equal(args["x_proj"], before)


@needs_compiler
@pytest.mark.parametrize("num_gates", [2, 3])
def test_two_threads_give_what_one_gives(num_gates):
    scan.set_backend("cpu")
    args = gru_problem(4, 6, 150, num_gates, batch_sizes=[6, 6, 4, 3])
    one = everything(scan.gru_scan, args, torch.float32)
    torch.set_num_threads(2)
    for name, value in everything(scan.gru_scan, args, torch.float32).items():
        assert torch.equal(value, one[name]), name


@pytest.mark.parametrize(("num_gates", "nonlinearity"), KINDS)
@pytest.mark.parametrize("normalized", [False, True])
def test_gradients_of_the_reference_are_right(num_gates, nonlinearity, normalized):
    args = gru_problem(3, 3, 4, num_gates, (normalized, True, True), nonlinearity=nonlinearity, batch_sizes=[3, 3, 2])
    names = [k for k, v in args.items() if isinstance(v, Tensor)]

    def run(*values: Tensor) -> Tensor:
        return gru_scan(**args | dict(zip(names, values, strict=True)))[0]

    leaves = [args[k].requires_grad_() for k in names]
    run(*leaves)
    with without_shape_checks():
        assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("engine", ["reference", "fused"])
@pytest.mark.parametrize(("num_gates", "nonlinearity"), KINDS)
def test_it_is_the_equations_unit_by_unit(engine, num_gates, nonlinearity):
    """Written with numbers: the units of z, and of r before it, are normalized together, those of n alone."""
    scan.set_backend(engine)
    H, T, B = 3, 4, 2
    args = gru_problem(T, B, H, num_gates, nonlinearity=nonlinearity, eps=0.01, batch_sizes=[2, 2, 1, 1])
    y, last = scan.gru_scan(**args)
    G = num_gates * H
    parts = [range(2 * H), range(2 * H, G)] if num_gates == 3 else [range(G)]

    def sigmoid(v: float) -> float:
        return 1 / (1 + math.exp(-v))

    for b in range(B):
        h = args["h"][b].tolist()
        for t in range(T if b == 0 else 2):
            u = [sum(args["weight_hh"][k, i].item() * h[i] for i in range(H)) for k in range(G)]
            for part in parts:
                mean = sum(u[k] for k in part) / len(part)
                var = sum((u[k] - mean) ** 2 for k in part) / len(part)
                for k in part:
                    u[k] = (u[k] - mean) / (var + 0.01) ** 0.5 * args["gamma_hh"][k].item() + args["bias_hh"][k].item()
            x = args["x_proj"][t, b].tolist()
            new = []
            for i in range(H):
                k_z, k_n = G - 2 * H + i, G - H + i
                r = sigmoid(x[i] + u[i]) if num_gates == 3 else 1.0
                z, a = sigmoid(x[k_z] + u[k_z]), x[k_n] + r * u[k_n]
                n = max(a, 0.0) if nonlinearity == "relu" else math.tanh(a)
                new.append(z * h[i] + (1 - z) * n * args["mask"][b, i].item())
            h = new
            assert_near(f"sequence {b}, step {t}", torch.tensor(h, dtype=torch.float64), y[t, b])
        assert_near("last", torch.tensor(h, dtype=torch.float64), last[b])
    assert torch.equal(y[2:, 1], y[1:2, 1].expand(2, -1))


@pytest.mark.parametrize("normalized", [False, True])
def test_captured_it_is_the_same(normalized):
    """What the steps write must be copied out of a graph."""
    scan.set_backend("fused")
    args = gru_problem(3, 4, 5, given=(normalized, True, True))
    expected = everything(scan.gru_scan, args)
    with graphs() as made:
        for _ in range(3):
            found = everything(scan.gru_scan, args)
        assert made and all(graph.replays for graph in made)
    for name, value in expected.items():
        assert_near(name, value, found[name])


@pytest.mark.parametrize(("num_gates", "nonlinearity"), [(3, "tanh"), (2, "relu")])
@pytest.mark.parametrize("given", [(True, True, True), (False, True, False), (False, False, False)])
def test_the_operator_of_compiled_programs_is_the_same(num_gates, nonlinearity, given):
    """The shapes that a compiler is told are those that it gets."""
    args = gru_problem(4, 5, 6, num_gates, given, batch_sizes=[5, 5, 3, 2], nonlinearity=nonlinearity)

    def run(batch_sizes: list[int], nonlinearity: str, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return operator.scan(f"gru_{nonlinearity}", tensors, None, {"batch_sizes": batch_sizes})[:2]

    expected, found = everything(gru_scan, args), everything(run, args)
    for name, value in expected.items():
        assert_near(name, value, found[name])
    torch.compiler.reset()
    compiled = torch.compile(lambda **given: run(**given)[0].sum(), fullgraph=True, backend="aot_eager")
    with without_shape_checks():
        leaves = {k: v.requires_grad_() for k, v in args.items() if isinstance(v, Tensor)}
        grads = torch.autograd.grad(compiled(**args), list(leaves.values()))
        wanted = torch.autograd.grad(gru_scan(**args)[0].sum(), list(leaves.values()))
    for name, ref, out in zip(leaves, wanted, grads, strict=True):
        assert_near(name, ref, out)


def test_what_does_not_fit_is_named():
    args = in_dtype(gru_problem())
    for wrong, message in (
        (
            {"x_proj": args["x_proj"][..., 1:]},
            r"x_proj must be \(T, B, 2H\) or \(T, B, 3H\) with H = 7, got \(5, 6, 20\)",
        ),
        ({"nonlinearity": "sin"}, "nonlinearity='sin' is unknown: use 'tanh' or 'relu'"),
        ({"mask": args["mask"][:1]}, r"mask does not match x_proj: expected \(\(6, 7\)"),
        ({"weight_hh": args["weight_hh"][:14]}, r"weight_hh does not match x_proj"),
    ):
        with pytest.raises(BnrnnError, match=message):
            scan.gru_scan(**args | wrong)


def test_on_triton_fused_runs_and_the_log_says_so_once(caplog):
    backends.say_that_fused_runs.cache_clear()
    expected = scan.gru_scan(**in_dtype(gru_problem()))[0]
    scan.set_backend("triton")
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, "bnrnn"):
        for _ in range(2):
            assert_near("y", expected, scan.gru_scan(**in_dtype(gru_problem()))[0])
            torch.manual_seed(0)
    assert caplog.messages == ["The engine `triton` lacks GRUs. The engine `fused` runs instead."]
