"""Trainings that take turns: their random numbers are their own, and their scans are computed together."""

import random
import signal
import time

import numpy as np
import pytest
import torch

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan.lstm import triton
from bnrnn.training.state import Clock, TrainState
from bnrnn.training.stop import Stop
from bnrnn.training.turns import group_size, num_live, take_turns
from tests.helpers import assert_near, without_shape_checks
from tests.scan.cases import NAMES, OPTIONAL, problem


@pytest.fixture(autouse=True)
def _engine():
    scan.set_backend("reference")
    yield
    scan.set_backend("auto")


def run(case: dict, fails: bool = False, **options) -> list[torch.Tensor]:
    """Outputs, statistics and gradients of a scan, from a loss that uses both states and all outputs."""
    leaves = {name: case[name].clone().requires_grad_() for name in NAMES if case[name] is not None}
    y, (h, c), used = scan.lstm_scan(
        *(leaves[name] for name in NAMES[:4]), **{name: leaves.get(name) for name in OPTIONAL}, **options
    )
    if fails:
        raise BnrnnError("this one ends between its passes")
    loss = y.square().sum() + (2 * h).sum() + c.square().sum()
    seen = [value for value in used if value is not None]
    return [y.detach(), h.detach(), c.detach(), *seen, *torch.autograd.grad(loss, list(leaves.values()))]


def evaluate(case: dict) -> None:
    with torch.no_grad():
        scan.lstm_scan(*(case[name] for name in NAMES[:4]), **{name: case[name] for name in OPTIONAL})


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_scans_of_one_form_are_computed_in_one_call_with_the_numbers_of_separate_ones():
    cases = [problem(3, 4, 8) for _ in range(3)]
    expected = [run(case) for case in cases]
    found, group = take_turns([lambda case=case: run(case) for case in cases])
    for own, alone in zip(found, expected, strict=True):
        assert_equal(own, alone)
    assert (group.num_scans, group.num_calls) == (6, 2)


def test_on_a_gpu_they_are_one_scan_of_its_engine(monkeypatch):
    """The engine for GPUs in Triton's interpreter, in float32."""
    cases = [{k: v if v is None else v.float() for k, v in problem(2, 3, 4).items() if k in NAMES} for _ in range(2)]
    expected = [run(case) for case in cases]
    shapes, original = [], triton.triton_scan
    monkeypatch.setattr(triton, "triton_scan", lambda x, *a, **k: shapes.append(x.shape) or original(x, *a, **k))
    scan.set_backend("triton")
    found, _ = take_turns([lambda case=case: run(case) for case in cases])
    assert shapes == [(2, 2, 3, 16)]
    for own, alone in zip(found, expected, strict=True):
        for value, ref in zip(own, alone, strict=True):
            assert_near("value", ref, value, 1e-4)


def test_scans_of_other_forms_are_computed_apart():
    several = [(problem(3, 4, 8), {}), (problem(3, 4, 8, (True, False, True, True, True)), {}), (problem(2, 4, 8), {}),
               (problem(3, 4, 8), {"eps": 1e-3}), *[(problem(3, 4, 8), {"batch_sizes": [4, 3, 2]})] * 2]  # fmt: skip
    expected = [run(case, **options) for case, options in several]
    found, group = take_turns([lambda case=case, given=given: run(case, **given) for case, given in several])
    for own, alone in zip(found, expected, strict=True):
        assert_equal(own, alone)
    assert (group.num_scans, group.num_calls) == (12, 10)


def test_one_that_ends_between_its_passes_does_not_stop_the_others():
    cases = [problem(3, 4, 8) for _ in range(3)]
    expected = run(cases[2])
    found, group = take_turns([lambda n=n: run(cases[n], fails=n == 1) for n in range(3)])
    assert isinstance(found[1], BnrnnError)
    assert_equal(found[2], expected)
    assert (group.num_scans, group.num_calls) == (5, 2)


def test_an_error_of_a_scan_is_the_error_of_all_that_it_computes(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("bnrnn.scan.lstm.reference.lstm_scan", fail)
    found, _ = take_turns([lambda: run(problem(2, 3, 4)), lambda: run(problem(2, 3, 4)), lambda: "fine"])
    assert [str(outcome) for outcome in found] == ["CUDA out of memory", "CUDA out of memory", "fine"]


def test_after_an_evaluation_of_one_they_wait_for_the_same_scan_again():
    case = problem(2, 3, 4)

    def train(evaluated_first: int) -> None:
        for _ in range(evaluated_first):
            evaluate(case)
        for _ in range(10):
            run(case)

    _, group = take_turns([lambda: train(0), lambda: train(1), lambda: train(3)])
    assert group.num_scans == 4 + 3 * 20
    assert group.num_calls <= 4 + 2 * 10 + 2 * 3  # alone, each of the three would need 20


def test_each_has_its_own_random_numbers_and_those_of_the_process_do_not_change():
    def draw(seed: int) -> list[float]:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        drawn = []
        for _ in range(3):
            evaluate(problem(2, 3, 4))  # draws from torch's generator, then lets the others draw
            drawn += [torch.rand(()).item(), np.random.rand(), random.random()]
        return drawn

    before = torch.get_rng_state(), np.random.get_bit_generator(), random.getstate()
    with without_shape_checks():  # they draw numbers too
        found, _ = take_turns([lambda seed=seed: draw(seed) for seed in range(3)])
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_bit_generator(), random.getstate()) == before[1:]
        assert found == [draw(seed) for seed in range(3)] and found[0] != found[1]


def test_they_know_how_many_they_are():
    def count() -> tuple[int, int]:
        sizes = group_size(), num_live()
        evaluate(problem(2, 3, 4))
        return sizes

    assert take_turns([count, count, count])[0] == [(3, 3)] * 3
    assert (group_size(), num_live()) == (1, 1)


def test_they_share_the_time_of_the_process():
    def train() -> float:
        state, clock = TrainState("", []), Clock(Stop())
        time.sleep(0.05)
        evaluate(problem(2, 3, 4))  # waits for the other
        clock.add_to(state)
        evaluate(problem(2, 3, 4))
        return state.seconds

    started = time.monotonic()
    found, _ = take_turns([train, train])
    assert 0.07 < sum(found) < time.monotonic() - started


def test_a_second_interrupt_ends_all_at_once(monkeypatch):
    previous, ended = signal.signal(signal.SIGINT, signal.default_int_handler), []

    def train(n: int) -> None:
        try:
            while True:
                evaluate(problem(2, 3, 4))
                if n == 1:
                    signal.raise_signal(signal.SIGINT)
        finally:
            ended.append(n)

    try:
        with pytest.raises(KeyboardInterrupt):
            take_turns([lambda n=n: train(n) for n in range(3)])
    finally:
        signal.signal(signal.SIGINT, previous)
    assert sorted(ended) == [0, 1, 2]


def test_trainings_that_wait_for_each_other_are_a_bug():
    case = problem(2, 3, 4)

    def train(first: int) -> None:
        leaves = [case["x_proj"].clone().requires_grad_() for _ in range(2)]
        ys = [scan.lstm_scan(leaf, *(case[name].detach() for name in NAMES[1:4]))[0] for leaf in leaves]
        ys[first].sum().backward()

    with pytest.raises(RuntimeError, match="the trainings wait for each other: they must run the same code"):
        take_turns([lambda: train(0), lambda: train(1)])
