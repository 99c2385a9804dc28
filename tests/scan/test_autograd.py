"""What autograd knows of a scan: the memory that its backward pass needs."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from bnrnn import scan
from bnrnn.scan.lstm.triton import triton_scan
from bnrnn.scan.native import build
from bnrnn.scan.rhn.triton import rhn_triton_scan
from tests.helpers import assert_near
from tests.scan.cases import OF_RHN, gru_problem, in_dtype, problem, rhn_problem

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
CPU = pytest.param("cpu", marks=needs_compiler)


def run_lstm(engine: str, args: dict):
    return (triton_scan if engine == "triton" else scan.lstm_scan)(**args)


def run_rhn(engine: str, args: dict):
    return (rhn_triton_scan if engine == "triton" else scan.rhn_scan)(**args)


def run_gru(engine: str, args: dict):
    return scan.gru_scan(**args)


SCANS = [pytest.param(run, problem, engine, id=f"{name}-{engine}")
         for name, run, problem in (("lstm", run_lstm, problem), ("rhn", run_rhn, rhn_problem))
         for engine in ("fused", "cpu", "triton")]  # fmt: skip
SCANS += [pytest.param(run_gru, gru_problem, engine, id=f"gru-{engine}") for engine in ("fused", "cpu")]


@pytest.fixture(autouse=True)
def _engine(request):
    """The engine that is selected; the Triton engine is called directly."""
    engine = getattr(request.node, "callspec", None) and request.node.callspec.params.get("engine")
    if engine == "cpu" and build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    scan.set_backend(engine if engine and engine != "triton" else "auto")


def drawn(problem, **options) -> dict:
    """Random arguments in float32. All tensors but the population statistics require gradients."""
    args = in_dtype(problem(2, 4, 5, **options))
    return {k: v.requires_grad_() if isinstance(v, Tensor) else v for k, v in args.items()}


@pytest.mark.parametrize(("run", "problem", "engine"), SCANS)
def test_a_second_backward_raises(run, problem, engine):
    y, *_ = run(engine, drawn(problem))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already run backward, which spent its buffers"):
        y.sum().backward()


@pytest.mark.parametrize(("run", "problem", "engine"), SCANS)
@pytest.mark.parametrize("sizes", [None, [4, 3]])
def test_without_gradients_a_scan_gives_the_same(run, problem, engine, sizes):
    args = drawn(problem, batch_sizes=sizes)
    expected = tree_leaves(run(engine, args))
    with torch.no_grad():
        assert all(map(torch.equal, tree_leaves(run(engine, args)), expected))


@pytest.mark.parametrize(("run", "problem", "engine"), SCANS)
def test_what_the_backward_pass_reads_must_not_change_before_it(run, problem, engine):
    args = drawn(problem, population=True)
    copied = ["h", "s", "c"] if engine == "triton" else ["x_proj"]  # the scan has a copy of its own
    copied += ["y"] if run is run_rhn else []  # y is a copy of the states
    y, *_ = run(engine, args)
    expected = torch.autograd.grad(y.sum(), args["x_proj"])[0]
    tensors = [name for name, value in args.items() if isinstance(value, Tensor)]
    changing = (*copied[:2], "gamma_hh", "beta_s") if engine == "triton" else tensors  # the interpreter is slow
    others = ("y",) if run is run_gru else ("y", "population")
    for name in (*(name for name in changing if name in tensors), *others):
        before = {k: v.detach().clone() for k, v in args.items() if k in tensors}
        y, *_ = run(engine, args)
        loss = y.sum()
        with torch.no_grad():
            (y if name == "y" else args["population"][-1] if name == "population" else args[name]).mul_(2)
        if name in copied:
            assert torch.equal(torch.autograd.grad(loss, args["x_proj"])[0], expected), name
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        args |= {k: v.requires_grad_() for k, v in before.items()}


@pytest.mark.parametrize(("run", "problem", "engine"), SCANS)
def test_autograd_keeps_all_tensors_and_may_move_them(run, problem, engine):
    args = drawn(problem)
    leaves = {k: v for k, v in args.items() if isinstance(v, Tensor)}

    def gradients() -> dict[str, Tensor]:
        y, *_ = run(engine, args)
        if y.grad_fn.name().startswith("_Scan"):
            assert not any(isinstance(leaf, Tensor) for leaf in tree_leaves(vars(y.grad_fn)))
        return dict(zip(leaves, torch.autograd.grad(y.square().sum(), list(leaves.values())), strict=True))

    expected, moved = gradients(), []

    def pack(value: Tensor) -> int:
        moved.append(value.detach().clone())
        return len(moved) - 1

    with saved_tensors_hooks(pack, moved.__getitem__):
        found = gradients()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("run", "problem", "engine"), SCANS)
def test_a_forward_pass_without_a_backward_pass_is_freed_at_once(run, problem, engine):
    gc.collect()
    gc.disable()
    try:
        y, *_ = run(engine, drawn(problem))
        known = weakref.ref(y)
        del y, _
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ["reference", "fused", CPU, "auto"])
@pytest.mark.parametrize("population", [False, True])
def test_a_batch_without_sequences_has_empty_results_and_gradients_of_zero(engine, population):
    for run, draw in ((run_lstm, problem), (run_rhn, rhn_problem), (run_gru, gru_problem)):
        nothing = dict.fromkeys(OF_RHN, False) if run is run_rhn else (False,) * (5 if run is run_lstm else 3)
        args = drawn(draw, population=population, **({} if population else {"given": nothing}))
        args |= {
            k: v.detach()[..., :0, :].requires_grad_()
            for k, v in args.items()
            if k in ("x_proj", "h", "c", "s", "mask")
        }
        y, *_ = run(engine, args)
        assert y.shape == (2, 0, 5)
        y.sum().backward()
        assert all(v.grad is None or not v.grad.any() for v in args.values() if isinstance(v, Tensor))


@pytest.mark.parametrize(("run", "problem", "engine"), SCANS)
@pytest.mark.parametrize("grad", [True, False])
def test_the_last_state_has_memory_of_its_own(run, problem, engine, grad):
    with torch.set_grad_enabled(grad):
        y, last, *_ = run(engine, drawn(problem))
    before = y.detach().clone()
    for state in (last,) if isinstance(last, Tensor) else last:
        assert state.untyped_storage().nbytes() == state.nbytes
        state.detach_()
        state.data.zero_()
    assert torch.equal(y, before)


@needs_compiler
def test_a_change_of_any_weight_changes_an_evaluation():
    """`weight.data` has no version, and the memory of a freed weight is used again."""
    scan.set_backend("cpu")
    args = in_dtype(problem(2, 4, 5))
    args["weight_hh"] = torch.randn(20, 5)

    def evaluated() -> Tensor:
        with torch.no_grad():
            return run_lstm("cpu", args)[0]

    before = evaluated()
    for k in range(args["weight_hh"].numel()):
        args["weight_hh"].data.view(-1)[k] += 0.1
        after = evaluated()
        assert not torch.equal(after, before), k
        before = after
    args["weight_hh"].data.neg_()  # changes the same bit of all values
    last = evaluated()
    assert not torch.equal(last, before)
    wide = in_dtype(problem(1, 2, 32, (False,) * 5))
    with torch.no_grad():
        in_order = run_lstm("cpu", wide)[0]
        wide["weight_hh"].data.copy_(wide["weight_hh"].roll(2, 0))  # the fingerprint sums over every 64th value
        assert not torch.equal(run_lstm("cpu", wide)[0], in_order)
    scan.set_backend("reference")
    assert_near("y", evaluated(), last, 1e-5)
