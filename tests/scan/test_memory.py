"""Empty and freed tensors, and forks: what would crash, hang or read memory of others runs in a child process."""

from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan.native import build, threads
from bnrnn.scan.rnn import rnn_scan
from tests.helpers import assert_near
from tests.scan.test_arguments import SCANS, B, H, T, changed, places

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
ENGINES = ["reference", "fused", pytest.param("cpu", marks=needs_compiler)]
SECONDS = 60  # for what takes milliseconds, on a busy machine


def in_child(run: Callable[[], Any]) -> Any:
    """What a function returns in a forked child. A child that crashes or hangs fails the test."""
    here, there = get_context("fork").Pipe(duplex=False)
    child = get_context("fork").Process(target=lambda: there.send(run()))
    child.start()
    there.close()
    try:
        answered = here.poll(SECONDS)
        return here.recv() if answered else pytest.fail("the child hangs")
    except EOFError:
        child.join()
        pytest.fail(f"the child ended with the exit status {child.exitcode}")
    finally:
        child.kill()
        child.join()


def message(run: Callable[[], Any]) -> str:
    try:
        run()
    except BnrnnError as error:
        return str(error)
    return "no error"


def rnn() -> dict[str, Any]:
    named = {"x_proj": torch.randn(T, B, H), "h": torch.randn(B, H), "weight_hh": torch.randn(H, H)}
    return named | {
        "gamma": torch.randn(H),
        "beta": torch.randn(H),
        "population": (torch.randn(T, H), torch.rand(T, H)),
    }


def linear() -> dict[str, Any]:
    return {"x": torch.randn(T, B, H), "weight": torch.randn(7, H), "bias": torch.randn(7), "population": ()}


def run_linear(x: Tensor, weight: Tensor, bias: Tensor, population: tuple[()]) -> Tensor:
    return scan.linear(x, weight, bias)


def one_feature() -> dict[str, Any]:
    named = {"x_proj": torch.randn(T, B, 1), "weight_ih": torch.randn(4 * H, 1), "weight_hh": torch.randn(4 * H, H)}
    return named | {"h": torch.randn(B, H), "c": torch.randn(B, H), "population": ()}


def run_one_feature(population: tuple[()], **arguments: Any) -> Any:
    return scan.lstm_scan(**arguments)


ALL = {**SCANS, rnn_scan: rnn, run_linear: linear, run_one_feature: one_feature}


def freed(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def cut(tensor: Tensor) -> Tensor:
    """With a storage that lacks its last value."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(copy.nbytes - copy.itemsize)
    return copy


def freed_view(tensor: Tensor) -> Tensor:
    """A view that begins behind the first value and has gaps, whose storage was freed."""
    wide = torch.cat([tensor, tensor], -1)
    view = wide[..., 1 : 1 + tensor.shape[-1]]
    wide.untyped_storage().resize_(0)
    return view


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 4, 0, 7), (0, 4, 5, 7), (3, 4, 5, 0), (0, 0, 0, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_empty_product_is_zeros_or_the_bias(shape, has_bias):
    scan.set_backend("cpu")
    steps, batch, size, units = shape
    for _ in range(20):  # memory that is not written would sometimes be zeros
        torch.full((steps, batch, units), 7.0)
        x, weight = torch.randn(steps, batch, size, requires_grad=True), torch.randn(units, size, requires_grad=True)
        bias = torch.randn(units) if has_bias else None
        y = scan.linear(x, weight, bias)
        expected = torch.zeros(steps, batch, units)
        assert torch.equal(y, expected if bias is None else expected + bias)
        dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
        assert torch.equal(dx, weight.detach().sum(0).expand_as(x))
        assert torch.equal(dweight, x.detach().sum((0, 1)).expand_as(weight))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("steps", "units"), [(2, 0), (0, 2)])
def test_a_scan_without_units_or_steps_is_refused(engine, steps, units):
    scan.set_backend(engine)
    z, state = torch.zeros, torch.zeros(2, units)
    runs = [
        lambda: scan.lstm_scan(z(steps, 2, 4 * units), state, state, z(4 * units, units)),
        lambda: scan.lstm_scan(z(steps, 2, 1), state, state, z(4 * units, units), weight_ih=z(4 * units, 1)),
        lambda: scan.rhn_scan(z(steps, 2, 2 * units), state, z(1, 2 * units, units)),
        lambda: rnn_scan(z(steps, 2, units), state, z(units, units)),
    ]
    expected = f"a scan needs at least one time step and one unit, got T = {steps} and H = {units}"
    assert in_child(lambda: [message(run) for run in runs]) == [expected] * len(runs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("run", ALL, ids=lambda run: run.__name__)
@pytest.mark.parametrize("damage", [freed, cut, freed_view], ids=lambda damage: damage.__name__)
def test_freed_memory_is_refused_also_in_a_form_that_was_accepted(engine, run, damage):
    scan.set_backend(engine)
    arguments = ALL[run]()
    run(**arguments)  # the check of shapes remembers this form
    found = in_child(lambda: [message(partial(run, **changed(arguments, p, damage))) for p in places(arguments)])
    for (name, n), text in zip(places(arguments), found, strict=True):
        assert f"the memory of {name if n is None else f'population[{n}]'} has " in text
        assert text.endswith("it was freed, so compute it again")


@pytest.mark.parametrize("run", ALL, ids=lambda run: run.__name__)
def test_views_and_repeated_values_have_all_the_memory_that_they_need(run):
    arguments = ALL[run]()
    for place in places(arguments):
        for view in (lambda v: torch.cat([v, v], -1)[..., : v.shape[-1]], lambda v: v[..., :1].expand(v.shape)):
            copied = changed(arguments, place, lambda v, view=view: view(v).contiguous())
            assert_near(str(place), run(**copied)[0], run(**changed(arguments, place, view))[0])


@needs_compiler
@pytest.mark.parametrize("run", [run for run in ALL if run is not rnn_scan], ids=lambda run: run.__name__)
def test_memory_that_was_freed_before_the_backward_pass_is_refused(run):
    scan.set_backend("cpu")
    arguments = {k: v.requires_grad_() if isinstance(v, Tensor) else v for k, v in ALL[run]().items()}
    if run is run_one_feature:
        arguments["x_proj"].requires_grad_(False)

    def freed_between() -> str:
        result = run(**arguments)
        y = result if isinstance(result, Tensor) else result[0]
        for name in ("weight_hh", "weight", "gamma"):
            if name in arguments:
                arguments[name].untyped_storage().resize_(0)
        return message(lambda: y.sum().backward())

    assert "the memory of kept[" in in_child(freed_between)


@needs_compiler
@pytest.mark.parametrize("first", ["a scan", "torch"])
def test_a_child_that_was_forked_after_several_threads_runs(first):
    """OpenMP's threads do not survive a fork: without care, the child would wait for them for ever."""
    scan.set_backend("cpu")
    arguments = [torch.randn(20, 8, 4 * 64), torch.zeros(8, 64), torch.zeros(8, 64), torch.randn(4 * 64, 64)]

    def run(num_threads: int) -> Tensor:
        torch.set_num_threads(num_threads)
        x = arguments[0].clone().requires_grad_()
        y = scan.lstm_scan(x, *arguments[1:])[0]
        return torch.autograd.grad(y.square().sum(), x)[0]

    expected = run(1)
    torch.set_num_threads(3)
    if first == "torch":
        torch.randn(1 << 20).exp_()
    else:
        run(3)
    for _ in range(2):
        torch.testing.assert_close(torch.tensor(in_child(lambda: run(2).tolist())), expected)
        torch.testing.assert_close(run(3), expected)


def test_a_child_of_a_process_whose_threads_could_not_be_ended_has_one(monkeypatch):
    torch.set_num_threads(3)
    assert in_child(threads.num_threads) == 3
    monkeypatch.setattr(threads, "_ending", list)
    assert in_child(threads.num_threads) == 1
    monkeypatch.setattr(threads, "_ending", lambda: [lambda kind: -1])
    assert in_child(threads.num_threads) == 1
    assert threads.num_threads() == 3
