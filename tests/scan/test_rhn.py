"""The highway recurrence in float64: the reference compared with equations, engines compared with the reference."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan.native import build
from bnrnn.scan.rhn.reference import RHNStatistics, rhn_scan
from tests.helpers import assert_near, without_shape_checks
from tests.scan.cases import ALL_OF_RHN, OF_RHN, assert_agrees, in_dtype, rhn_problem

GIVEN = [dict(zip(OF_RHN, flags, strict=True)) for flags in itertools.product([True, False], repeat=5)]
GIVEN = [given for given in GIVEN if given["gamma_s"] or not given["beta_s"]]
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
ENGINES = ["fused", pytest.param("cpu", marks=needs_compiler)]
SIZES = [[6, 5, 5, 3, 2], [6, 6, 6, 6, 6], [5, 4, 3, 3, 3]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n", range(len(GIVEN)))
@pytest.mark.parametrize("population", [False, True])
def test_engines_agree_with_the_reference_with_any_part_of_bn(engine, n, population):
    """Coupled gates and separate ones take turns."""
    assert_agrees(engine, rhn_problem(given=GIVEN[n], coupled=(n + population) % 2 == 0, population=population))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "shape", [(1, 5, 16, 1), (4, 2, 9, 2), (3, 9, 1, 3), (2, 4, 3, 5), (12, 7, 20, 3), (3, 5, 100, 2), (2, 15, 530, 2)]
)
@pytest.mark.parametrize(("K", "coupled"), [(1, False), (None, True)])
def test_engines_agree_at_edges_of_shape(engine, shape, K, coupled):
    assert_agrees(engine, rhn_problem(*shape, K=K, coupled=coupled))


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_at_random_shapes(engine):
    draw = random.Random(0)
    for _ in range(15):
        T, B, H, D = draw.randint(1, 9), draw.randint(3, 20), draw.randint(1, 70), draw.randint(1, 4)
        sizes = sorted((draw.randint(3, B) for _ in range(T)), reverse=True) if draw.random() < 0.5 else None
        given = draw.choice(GIVEN)
        options = {"coupled": draw.random() < 0.5, "population": draw.random() < 0.3, "batch_sizes": sizes}
        assert_agrees(engine, rhn_problem(T, B, H, D, given=given, **options))


@needs_compiler
def test_several_threads_give_the_same():
    torch.set_num_threads(2)
    assert_agrees("cpu", rhn_problem(4, 6, 70))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", [ALL_OF_RHN, dict.fromkeys(OF_RHN, False)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("population", [False, True])
@pytest.mark.parametrize("H", [7, 21])
def test_engines_agree_on_padded_batches(engine, given, sizes, population, H):
    """With a small eps, the gradients of two normalized values would be mostly rounding."""
    assert_agrees(engine, rhn_problem(H=H, given=given, population=population, batch_sizes=sizes, eps=0.1))


def test_gradients_of_the_reference_are_right():
    args = rhn_problem(T=3, B=4, H=2, D=2)
    names = [k for k, v in args.items() if isinstance(v, Tensor)]

    def run(*values: Tensor) -> Tensor:
        return rhn_scan(**args | dict(zip(names, values, strict=True)))[0]

    leaves = [args[k].requires_grad_() for k in names]
    run(*leaves)
    with without_shape_checks():
        assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("coupled", [False, True])
def test_without_norm_it_is_the_equations_unit_by_unit(coupled):
    args = rhn_problem(T=3, B=2, H=3, D=2, coupled=coupled, given=dict.fromkeys(OF_RHN, False) | {"bias": True})
    y, last, _ = rhn_scan(**args)
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
    args = rhn_problem(batch_sizes=SIZES[0])
    y, last, used = rhn_scan(**args)
    assert torch.equal(y[1:, 5], y[:1, 5].expand(4, -1)) and torch.equal(last, y[-1])
    alone = {k: v[:, :3] if k == "x_proj" else v[:3] if k == "s" else v for k, v in args.items()} | {
        "batch_sizes": None
    }
    other = args | {"x_proj": args["x_proj"].clone()}
    other["x_proj"][3, 3:], other["x_proj"][4, 2:] = 1e3, 1e3
    assert_near("what ended sequences read", y, rhn_scan(**other)[0])
    first = rhn_scan(**alone | {"population": RHNStatistics(*used)})[0]
    assert_near("the longest ones", y[:, :2], first[:, :2])


def test_sizes_of_the_weights_that_do_not_fit_are_named():
    args = in_dtype(rhn_problem())
    for weight, message in (
        (args["weight"][0], r"weight must be \(D, G, H\), got \(21, 7\)"),
        (args["weight"][..., 1:], r"x_proj must be \(T, B, 2H\) or \(T, B, 3H\) with H = 6, got \(5, 6, 21\)"),
        (args["weight"][:, 7:], r"weight does not match x_proj|x_proj must be"),
        (args["weight"][:2], "does not match x_proj"),
        (args["weight"].double(), "weight does not match x_proj"),
    ):
        with pytest.raises(BnrnnError, match=message):
            scan.rhn_scan(**args | {"weight": weight})


def test_scales_of_more_layers_than_there_are_are_an_error():
    args = in_dtype(rhn_problem(D=2, K=3) | {"population": None})
    with pytest.raises(BnrnnError, match=r"gamma_s does not match x_proj: expected \(\(2, 7\)"):
        scan.rhn_scan(**args)
