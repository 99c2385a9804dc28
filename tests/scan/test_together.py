"""Kernels of whole sequences whose programs run at the same time, in Triton's interpreter."""

from functools import partial

import pytest

from bnrnn import scan
from bnrnn.scan.triton_shared import launches
from tests.scan.cases import assert_agrees, problem
from tests.scan.test_triton import NONE, divide, run
from tests.scan.together import together

CASES = [
    partial(problem, 3, 6, 17),
    partial(problem, 3, 6, 33, batch_sizes=[6, 5, 1]),
    partial(problem, 2, 5, 17, population=True),
    partial(problem, 3, 5, 33, NONE),
]


@pytest.fixture(autouse=True)
def _whole_sequence(monkeypatch):
    launches._known.clear()
    scan.set_backend("triton")
    divide(monkeypatch, whole_sequence=True, fused=True, units=16)
    yield
    launches._known.clear()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_programs_that_run_at_the_same_time_agree_with_the_reference_and_do_not_conflict(number):
    with together(number) as found:
        assert_agrees("triton", CASES[number]())
    assert found.programs == [3 if number % 2 else 2] * 2
    assert found.conflicts == 0


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_programs_that_do_not_wait_for_each_other_conflict():
    """Whether their numbers are wrong is left to chance; that they conflict is not."""
    with together(waits=False) as found:
        run(problem(3, 6, 33))
    assert found.programs == [3]
    assert found.conflicts > 0
