"""The engine `fused` as CUDA graphs. What a graph would launch runs on the CPU (captured.py)."""

import logging

import pytest
import torch
from torch import Tensor

from bnrnn import scan
from bnrnn.scan import graphs
from tests.scan import captured
from tests.scan.cases import problem as lstm_problem
from tests.scan.cases import rhn_problem

CASES = [
    pytest.param(scan.lstm_scan, lstm_problem, (4, 5, 3), id="lstm"),
    pytest.param(scan.rhn_scan, rhn_problem, (4, 5, 3, 2), id="rhn"),
]


class Call:
    """A scan's arguments, and its results as tensors by name."""

    def __init__(self, run, problem: dict) -> None:
        self.leaves = {k: v.clone().requires_grad_() for k, v in problem.items() if isinstance(v, Tensor)}
        y, state, used = run(**problem | self.leaves)
        last = state if isinstance(state, Tensor) else torch.cat(state)
        self.results = {"y": y, "last": last, **{k: v for k, v in used._asdict().items() if v is not None}}

    def gradients(self) -> dict[str, Tensor]:
        loss = self.results["y"].sin().sum() + self.results["last"].cos().sum()
        return dict(zip(self.leaves, torch.autograd.grad(loss, list(self.leaves.values())), strict=True))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("population", [False, True])
@pytest.mark.parametrize(("run", "problem", "sizes"), CASES)
def test_scans_of_one_form_share_graphs_and_nothing_else(run, problem, sizes, population):
    scan.set_backend("fused")
    several = [problem(*sizes, population=population) for _ in range(5)]
    alone = [Call(run, each) for each in several]
    expected = [call.gradients() for call in alone]
    with captured.graphs() as made:
        together = [Call(run, each) for each in several]  # none is run backward before the last was run forward
        found = [call.gradients() for call in reversed(together)][::-1]
    for i in range(5):
        assert_equal(together[i].results, alone[i].results)
        assert_equal(found[i], expected[i])
    assert [graph.replays for graph in made] == [4, 4], "all but the first are replayed, forward and backward"


def test_another_form_is_another_graph_and_only_so_many_are_remembered(monkeypatch):
    scan.set_backend("fused")
    monkeypatch.setattr(graphs, "MAX_FORMS", 2)
    with captured.graphs() as made:
        for eps in (0.2, 0.3, 0.2, 0.3, 0.4, 0.2, 0.2):  # the last two begin again, since 0.4 displaced 0.2
            Call(scan.lstm_scan, lstm_problem(2, 3, 2, eps=eps))
        assert len(graphs._known) == 2
    assert [graph.replays for graph in made] == [1, 1, 1]


def test_a_scan_without_gradients_is_captured_too():
    scan.set_backend("fused")
    args = {k: v for k, v in lstm_problem(3, 4, 2).items() if v is not None}
    expected = scan.lstm_scan(**args)[0]
    with captured.graphs() as made, torch.no_grad():
        assert all(torch.equal(scan.lstm_scan(**args)[0], expected) for _ in range(3))
    assert [graph.replays for graph in made] == [2]


def test_padded_batches_and_other_devices_run_step_by_step():
    scan.set_backend("fused")
    with captured.graphs() as made:
        for _ in range(3):
            Call(scan.lstm_scan, lstm_problem(3, 4, 2, batch_sizes=[4, 2, 1])).gradients()
    for _ in range(3):
        Call(scan.lstm_scan, lstm_problem(3, 4, 2))
    assert made == [] and not graphs._known


WHY = "The engine `fused` cannot be captured as a CUDA graph (%s). It runs step by step, more slowly."


@pytest.mark.parametrize("what", ["captured", "tree_map_only"])  # the second makes copies
@pytest.mark.parametrize("error", [RuntimeError("not permitted\nwhen capturing"), torch.OutOfMemoryError("no memory")])
def test_what_cannot_be_captured_runs_step_by_step_and_says_so_once_for_each_pass(what, error, monkeypatch, caplog):
    def refused(*_):
        raise error

    scan.set_backend("fused")
    args = lstm_problem(3, 4, 2)
    expected = Call(scan.lstm_scan, args).gradients()
    with captured.graphs(), caplog.at_level(logging.WARNING, "bnrnn"):
        monkeypatch.setattr(graphs, what, refused)
        for _ in range(4):
            assert_equal(Call(scan.lstm_scan, args).gradients(), expected)
    assert caplog.messages == 2 * [WHY % str(error).splitlines()[0]]


@pytest.mark.parametrize("method", ["forward", "gradients"])
@pytest.mark.parametrize(("run", "problem", "sizes"), CASES)
def test_a_graph_that_computes_something_else_is_not_used(run, problem, sizes, method, monkeypatch, caplog):
    replay = captured.Graph.replay

    def wrong(graph):
        replay(graph)
        if graph.run.__self__.method.__name__ == method:
            replay(graph)  # on memory that the first time has written

    scan.set_backend("fused")
    args = problem(*sizes)
    expected = Call(run, args)
    gradients = expected.gradients()
    monkeypatch.setattr(captured.Graph, "replay", wrong)
    with captured.graphs() as made, caplog.at_level(logging.WARNING, "bnrnn"):
        for _ in range(4):
            call = Call(run, args)
            assert_equal(call.results, expected.results)
            assert_equal(call.gradients(), gradients)
    assert caplog.messages == [WHY % "its replay computes something else"]
    assert sorted(graph.replays for graph in made) == [2, 3], (
        "one is replayed whenever it may be, the other never again"
    )


def test_a_run_that_has_diverged_says_nothing_about_graphs(caplog):
    scan.set_backend("fused")
    args = lstm_problem(3, 4, 2)
    args["weight_hh"][0, 0] = float("nan")
    with captured.graphs() as made, caplog.at_level(logging.WARNING, "bnrnn"):
        for _ in range(3):
            Call(scan.lstm_scan, args)
    assert not caplog.messages and made[0].replays == 2


@pytest.mark.parametrize(("run", "problem", "sizes"), CASES)
def test_a_scan_writes_into_nothing_that_it_was_given(run, problem, sizes):
    """Several scans may have the same weights, and autograd refuses a backward pass through what was changed later."""
    scan.set_backend("fused")
    given = {k: v.requires_grad_() for k, v in problem(*sizes).items() if isinstance(v, Tensor)}

    def gradients() -> tuple[Tensor, ...]:
        total = sum(run(**given)[0].sin().sum() for _ in range(3))
        return torch.autograd.grad(total, list(given.values()))

    expected, before = gradients(), [value._version for value in given.values()]
    with captured.graphs() as made:
        found = gradients()
    assert len(made) == 2 and [value._version for value in given.values()] == before
    assert all(map(torch.equal, found, expected))
