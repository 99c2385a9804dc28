"""The check of the Triton engine at its first use on a GPU, in Triton's interpreter."""

import logging

import pytest
import torch

from bnrnn import scan
from bnrnn.scan import backends, selfcheck
from bnrnn.scan.lstm import triton as engine

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    monkeypatch.setattr(backends, "_problems", {})
    monkeypatch.setattr(backends, "_checks", list(backends._checks))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    scan.set_backend("auto")
    yield
    scan.set_backend("auto")


def test_an_engine_that_is_right_has_no_problem_and_draws_no_random_numbers():
    before = torch.get_rng_state()
    with torch.inference_mode():  # the first use may be in an evaluation
        assert selfcheck.problem_on(CPU) is None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_an_engine_that_computes_something_else_is_a_problem(monkeypatch, factor):
    right = engine.triton_scan

    def wrong(*given, **options):
        y, (h, c), used = right(*given, **options)
        return y, (h, c * factor), used

    monkeypatch.setattr(engine, "triton_scan", wrong)
    assert selfcheck.problem_on(CPU).startswith("its error is ")


def test_an_engine_that_fails_is_a_problem_in_one_line(monkeypatch):
    def fail(*given, **options):
        raise RuntimeError("PTXAS error\nand a page of code")

    monkeypatch.setattr(engine, "triton_scan", fail)
    assert selfcheck.problem_on(CPU) == "RuntimeError: PTXAS error"


def test_on_a_gpu_auto_takes_the_engine_only_if_it_is_right_and_says_once_if_not(caplog):
    asked = []

    def find(answer):
        asked.append(answer)
        return answer

    backends.check_with(lambda device: find(None))
    assert [scan.backend(GPU, torch.float32) for _ in range(2)] == ["triton", "triton"] and len(asked) == 1
    backends._problems.clear()
    backends.check_with(lambda device: find("its error is 1"))
    with caplog.at_level(logging.WARNING, "bnrnn"):
        assert [scan.backend(GPU, torch.float32) for _ in range(2)] == ["fused", "fused"] and len(asked) == 2
    (line,) = caplog.messages
    assert line.startswith(
        "The Triton engine is wrong on this machine (its error is 1). The engine `fused` runs instead"
    )
    scan.set_backend("triton")
    assert scan.backend(GPU, torch.float32) == "triton", "who asks for it gets it"


def test_while_a_graph_is_captured_nothing_is_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    backends.check_with(lambda device: pytest.fail("it was checked"))
    assert scan.backend(GPU, torch.float32) == "triton"
