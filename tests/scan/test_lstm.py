"""All engines compared with the reference in float64: outputs, statistics and all gradients."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan.lstm.reference import Statistics, lstm_scan
from bnrnn.scan.native import build
from bnrnn.scan.noise import Noise
from tests.helpers import assert_near
from tests.scan.cases import ALL, NAMES, OPTIONAL, assert_agrees, everything, problem

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
ENGINES = ["fused", pytest.param("cpu", marks=needs_compiler)]
SIZES = [[6, 5, 5, 3, 1], [6, 6, 6, 6, 6], [5, 4, 3, 3, 3]]  # how many of six sequences run at each of five steps
GIVEN = list(itertools.product([True, False], repeat=5))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("population", [False, True])
def test_engines_agree_with_the_reference_with_any_part_of_bn(engine, given, population):
    assert_agrees(engine, problem(5, 6, 23, given, population))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("over", ["layer", "gate"])
def test_engines_agree_with_the_reference_with_any_part_of_layer_normalization(engine, given, over):
    assert_agrees(engine, problem(5, 6, 23, given, over=over))
    if sum(given) % 2:
        assert_agrees(engine, problem(5, 6, 23, given, over=over, batch_sizes=SIZES[0]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "shape", [(1, 5, 16), (4, 2, 19), (3, 9, 1), (2, 4, 3), (2, 3, 100), (40, 7, 36), (2, 15, 530)]
)
def test_engines_agree_at_edges_of_shape(engine, shape):
    assert_agrees(engine, problem(*shape))
    T, _, H = shape
    if H > 1:  # the layer normalization of a single unit is always its shift
        assert_agrees(engine, problem(T, 1, H, over="layer"))
        assert_agrees(engine, problem(*shape, over="gate"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", [ALL, (False,) * 5, (True, False, True, True, False)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ended_count", [False, True])
@pytest.mark.parametrize("population", [False, True])
def test_engines_agree_on_padded_batches(engine, given, sizes, ended_count, population):
    assert_agrees(engine, problem(5, 6, 21, given, population, batch_sizes=sizes, ended_count=ended_count))


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_at_random_shapes(engine):
    draw = random.Random(0)
    for _ in range(15):
        T, B, H = draw.randint(1, 9), draw.randint(3, 20), draw.randint(1, 70)
        sizes = sorted((draw.randint(3, B) for _ in range(T)), reverse=True) if draw.random() < 0.5 else None
        given = [draw.random() < 0.5 for _ in range(5)]
        options = {"batch_sizes": sizes, "ended_count": draw.random() < 0.5}
        assert_agrees(engine, problem(T, B, H, given, draw.random() < 0.3, **options))
        assert_agrees(engine, problem(T, B, H + 1, given, batch_sizes=sizes, over=draw.choice(["layer", "gate"])))


@pytest.mark.parametrize("ended_count", [False, True])
def test_the_reference_on_a_padded_batch_is_eqs_6_to_8_row_by_row(ended_count):
    """Computed with masks instead of slices, like the released code."""
    T, B, H = 5, 6, 3
    args = problem(T, B, H)
    sizes = SIZES[0]

    def bn(v: Tensor, counts: Tensor, gamma: Tensor, beta: Tensor | float) -> Tensor:
        n = counts.sum()
        mean = (v * counts).sum(0) / n
        var = ((v - mean).square() * counts).sum(0) / n
        return gamma * (v - mean) / (var + 1e-5).sqrt() + beta

    h, c = args["h"], args["c"]
    ys = []
    for t in range(T):
        runs = (torch.arange(B) < sizes[t])[:, None].double()
        counts = torch.ones_like(runs) if ended_count else runs
        a = bn(h @ args["weight_hh"].T, counts, args["gamma_hh"], 0.0)
        a = a + bn(args["x_proj"][t], counts, args["gamma_ih"], args["bias"])
        i, f, g, o = a.chunk(4, dim=1)
        c = runs * (f.sigmoid() * c + i.sigmoid() * g.tanh()) + (1 - runs) * c
        h = runs * o.sigmoid() * bn(c, counts, args["gamma_c"], args["beta_c"]).tanh() + (1 - runs) * h
        ys.append(h)
    options = {n: args[n] for n in OPTIONAL}
    y, state, _ = lstm_scan(*(args[n] for n in NAMES[:4]), **options, batch_sizes=sizes, ended_count=ended_count)
    for name, ref, out in (("y", torch.stack(ys), y), ("h", h, state[0]), ("c", c, state[1])):
        assert_near(name, ref, out)


def test_an_input_product_of_another_shape_is_named():
    for shape in ((3, 4, 22), (4, 20), (2, 3, 4, 20)):
        with pytest.raises(BnrnnError, match=r"x_proj must be \(T, B, 4H\), got"):
            scan.lstm_scan(torch.zeros(shape), torch.zeros(4, 5), torch.zeros(4, 5), torch.zeros(20, 5))


@pytest.mark.parametrize("engine", ENGINES)
def test_x_is_left_alone_unless_it_may_be_overwritten(engine):
    scan.set_backend(engine)
    args = problem(3, 4, 5)
    leaves = [args[n].float().requires_grad_() for n in NAMES[:4]]
    before = leaves[0].detach().clone()
    scan.lstm_scan(*leaves, gamma_ih=args["gamma_ih"].float())[0].sum().backward()
    assert torch.equal(leaves[0], before)


@pytest.mark.parametrize("engine", ENGINES)
def test_constant_columns_have_finite_gradients(engine):
    args = problem(3, 6, 5)
    args["h"].zero_()
    args["x_proj"][:, :, :10] = args["x_proj"][:, :1, :10]
    assert_agrees(engine, args)


def test_what_statistics_are_over_is_checked():
    args = {name: value for name, value in problem(3, 4, 5, population=True).items()}
    with pytest.raises(BnrnnError, match="over='layer' has no population statistics: leave population out"):
        scan.lstm_scan(**args, over="layer")
    with pytest.raises(BnrnnError, match="over='units' is unknown: use 'batch', 'layer', 'gate'"):
        scan.lstm_scan(**args, over="units")


def test_float64_keeps_its_precision_under_autocast():
    args = problem(3, 6, 5)
    expected = everything(scan.lstm_scan, args, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found = everything(scan.lstm_scan, args, torch.float64)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@needs_compiler
@pytest.mark.parametrize(("H", "batch_sizes"), [(150, [6, 6, 4, 3]), (40, [17, 17, 9, 4])])
def test_two_threads_give_what_one_gives(H, batch_sizes):
    """In the backward pass they divide a large W_hh, or else the sequences."""
    scan.set_backend("cpu")
    args = problem(4, batch_sizes[0], H, batch_sizes=batch_sizes, ended_count=True)
    one = everything(scan.lstm_scan, args, torch.float32)
    torch.set_num_threads(2)
    for name, value in everything(scan.lstm_scan, args, torch.float32).items():
        assert torch.equal(value, one[name]), name


@needs_compiler
def test_two_threads_normalize_layers_as_one_does():
    """The gradients of parameters are sums over the sequences, which two threads add in another order."""
    for batch_sizes, noise in ((None, None), ([7, 6, 4, 1], Noise(0.3, 0.2, 0.1, torch.tensor(5)))):
        args = problem(4, 7, 150, over="layer", batch_sizes=batch_sizes, noise=noise)
        torch.set_num_threads(2)
        assert_agrees("cpu", args)
        two = everything(scan.lstm_scan, args, torch.float32)
        again = everything(scan.lstm_scan, args, torch.float32)
        assert all(torch.equal(again[name], value) for name, value in two.items())
        torch.set_num_threads(1)
        assert torch.equal(two["y"], everything(scan.lstm_scan, args, torch.float32)["y"])


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"batch_sizes": SIZES[0]}, {"batch_sizes": SIZES[0], "ended_count": True}])
@pytest.mark.parametrize("population", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("over", ["batch", "layer", "gate"])
def test_the_product_of_an_input_of_one_feature_is_never_stored(normalized, population, options, over):
    """Its statistics and gradients follow from those of the feature."""
    T, B, H = 5, 6, 21
    given = [normalized, True, True, True, True]
    args = problem(T, B, H, given, population=population and over == "batch")
    options = options | {"over": over, "noise": Noise(0.3, 0.2, 0.1, torch.tensor(5)) if population else None}
    x, weight_ih = torch.rand(T, B, 1).double() + 0.5, torch.randn(4 * H, 1).double()
    found = {}
    for name, dtype in (("reference", torch.float64), ("cpu", torch.float32)):
        scan.set_backend(name)
        own = {k: v.to(dtype).requires_grad_() for k, v in args.items() if k in NAMES and v is not None}
        own["weight_ih"] = weight_ih.to(dtype).requires_grad_()
        statistics = args["population"] and Statistics(*(s.to(dtype) for s in args["population"]))
        own.pop("x_proj")
        y, state, used = scan.lstm_scan(x.to(dtype), **own, population=statistics, **options)
        torch.manual_seed(2)
        loss = sum((v * torch.randn(v.shape, dtype=torch.float64).to(dtype)).sum() for v in (y, *state))
        grads = torch.autograd.grad(loss, list(own.values()))
        found[name] = {
            "y": y,
            **{k: v for k, v in used._asdict().items() if v is not None},
            **dict(zip(own, grads, strict=True)),
        }
    assert found["cpu"].keys() == found["reference"].keys()
    for key, expected in found["reference"].items():
        assert_near(key, expected, found["cpu"][key], 2e-5)


@needs_compiler
def test_weights_that_change_between_evaluations_are_packed_again():
    """Also if the change does not increase the tensor's version, or if another tensor takes its memory."""
    scan.set_backend("cpu")
    args = {k: v.float() if isinstance(v, Tensor) else v for k, v in problem(3, 4, 40).items()}
    other = torch.randn(160, 40)

    def run(weight: Tensor) -> Tensor:
        return scan.lstm_scan(**{**args, "weight_hh": weight})[0]

    weight = args["weight_hh"]
    first, expected = run(weight), run(other.clone())
    assert torch.equal(run(weight), first)
    weight.data.copy_(other)
    assert torch.equal(run(weight), expected)
    weight.add_(1)
    assert not torch.equal(run(weight), expected)
