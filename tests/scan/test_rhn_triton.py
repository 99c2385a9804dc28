"""The highway recurrence's Triton engine in Triton's interpreter: small shapes, on the CPU, against the reference."""

from dataclasses import replace

import pytest
import torch

from bnrnn import scan
from bnrnn.scan.rhn.triton import rhn_triton_scan
from bnrnn.scan.triton_shared import launches, tuning
from tests.helpers import assert_near
from tests.scan.captured import graphs
from tests.scan.test_rhn import OPTIONAL, assert_close_to_reference, call, everything, problem

BARE = dict.fromkeys(OPTIONAL, False)
PLACE_B = {"bias": True, "gamma_x": True, "gamma_s": True, "beta_s": True, "gamma_z": False}
PLACE_C = BARE | {"bias": True, "gamma_z": True}


@pytest.fixture(autouse=True)
def _fresh():
    launches._known.clear()


@pytest.mark.parametrize(
    "case",
    [
        dict(T=2, H=17, D=2),
        dict(T=2, given=BARE, D=2),
        dict(T=3, given=BARE, coupled=True, D=1),
        dict(T=2, given=PLACE_B, coupled=True, D=2),
        dict(T=2, given=PLACE_B, K=1),
        dict(T=2, given=PLACE_C, D=2),
        dict(T=2, given=PLACE_B | {"beta_s": False}, D=2, population=True),
        dict(T=2, population=True, D=2),
        dict(T=1, B=4, D=1, K=1),
        dict(T=1, B=70, H=5, D=2),  # two tiles of sequences
        dict(T=3, H=5, given=PLACE_B, D=2, batch_sizes=[6, 5, 3]),
        dict(T=3, H=5, K=1, D=2, coupled=True, batch_sizes=[5, 4, 3]),
        dict(T=3, H=5, given=BARE, D=2, batch_sizes=[5, 4, 3]),
        dict(T=3, H=5, population=True, D=2, batch_sizes=[5, 4, 1]),
    ],
    ids=str,
)
def test_it_agrees_with_the_reference(case):
    assert_close_to_reference(rhn_triton_scan, problem(**case), torch.float32)


@pytest.mark.parametrize(
    "case",
    [dict(T=2, D=2, H=5), dict(T=2, given=BARE, coupled=True), dict(T=2, given=PLACE_B, K=1, batch_sizes=[6, 3])],
)
def test_it_agrees_where_products_are_not_part_of_the_kernel(case, monkeypatch):
    rule = tuning.by_rule
    monkeypatch.setattr(tuning, "by_rule", lambda size: replace(rule(size), fused=False))
    assert_close_to_reference(rhn_triton_scan, problem(**case), torch.float32)


def test_without_gradients_it_gives_the_same():
    args = problem(T=3, D=2, batch_sizes=[6, 5, 3])
    leaves = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    expected = call(rhn_triton_scan, {k: v.requires_grad_() if k == "weight" else v for k, v in leaves.items()})
    with torch.no_grad():
        found = call(rhn_triton_scan, leaves)
    for ref, out in zip((*expected[:2], *expected[2]), (*found[:2], *found[2]), strict=True):
        assert torch.equal(ref, out)


def test_a_captured_graph_runs_scans_of_any_length_and_batch_size(monkeypatch):
    monkeypatch.setattr(launches, "CHUNKS", (2, 1))
    with graphs() as made:
        for T, B in ((1, 6), (3, 5), (2, 4)):
            assert_close_to_reference(rhn_triton_scan, problem(T=T, B=B, D=2, H=3, K=1), torch.float32)
    assert sorted(graph.replays for graph in made) == [1, 1, 2, 2]


def test_a_second_backward_raises():
    args = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in problem(T=2).items()}
    y, _, _ = call(rhn_triton_scan, args | {"weight": args["weight"].requires_grad_()})
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already run backward, which spent its buffers"):
        y.sum().backward()


def test_bfloat16_products_keep_statistics_and_states_in_float32():
    args = problem(T=2, D=2, H=12)
    scan.set_backend("triton")
    full = everything(scan.rhn_scan, args, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        low = everything(scan.rhn_scan, args, torch.float32)
    assert all(v.dtype == torch.float32 for v in low.values())
    assert not torch.equal(full["y"], low["y"])
    assert_near("y", full["y"], low["y"], 3e-2)
