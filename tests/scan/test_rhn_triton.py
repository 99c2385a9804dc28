"""The highway recurrence's Triton engine in Triton's interpreter: small shapes, on the CPU, against the reference."""

import pytest
import torch

from bnrnn import scan
from bnrnn.scan.rhn.triton import rhn_triton_scan
from bnrnn.scan.triton_shared import workspace
from tests.helpers import assert_near
from tests.scan.hopper import assert_compiles
from tests.scan.test_rhn import OPTIONAL, assert_close_to_reference, call, everything, problem

BARE = dict.fromkeys(OPTIONAL, False)
PLACE_B = {"bias": True, "gamma_x": True, "gamma_s": True, "beta_s": True, "gamma_z": False}
PLACE_C = BARE | {"bias": True, "gamma_z": True}


@pytest.fixture(autouse=True)
def _fresh():
    workspace._free.clear()


@pytest.mark.parametrize(
    "case",
    [
        dict(T=2, H=17),
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
    [dict(T=2, D=2, H=17), dict(T=2, given=BARE, coupled=True), dict(T=2, given=PLACE_B, K=1, batch_sizes=[6, 3])],
)
def test_it_agrees_where_products_are_not_part_of_the_kernel(case, monkeypatch):
    monkeypatch.setattr(workspace, "FUSED_UP_TO", 0)
    assert_close_to_reference(rhn_triton_scan, problem(**case), torch.float32)


def test_without_gradients_it_gives_the_same_and_keeps_less():
    args = problem(T=3, D=2, batch_sizes=[6, 5, 3])
    leaves = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    expected = call(rhn_triton_scan, {k: v.requires_grad_() if k == "weight" else v for k, v in leaves.items()})
    with torch.no_grad():
        found = call(rhn_triton_scan, leaves)
    for ref, out in zip((*expected[:2], *expected[2]), (*found[:2], *found[2]), strict=True):
        assert torch.equal(ref, out)
    (kind,) = workspace._free  # the one with gradients is still held
    assert not kind.with_grad
    assert len(workspace._free[kind][0].buffers["a"]) == 1


def test_values_left_in_a_workspace_do_not_matter():
    """Values of a diverged scan must not affect the next scan through finished sequences."""
    args = problem(T=2, batch_sizes=[5, 3])
    everything(rhn_triton_scan, args | {"s": args["s"] * torch.nan, "batch_sizes": [6, 6]}, torch.float32)
    assert [len(free) for free in workspace._free.values()] == [1]
    assert_close_to_reference(rhn_triton_scan, args, torch.float32)


def test_a_second_backward_raises():
    args = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in problem(T=2).items()}
    y, _, _ = call(rhn_triton_scan, args | {"weight": args["weight"].requires_grad_()})
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already run backward, which freed its buffers"):
        y.sum().backward()


def test_bfloat16_products_keep_statistics_and_states_in_float32():
    args = problem(T=2, D=2, H=20)
    scan.set_backend("triton")
    full = everything(scan.rhn_scan, args, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        low = everything(scan.rhn_scan, args, torch.float32)
    assert all(v.dtype == torch.float32 for v in low.values())
    assert not torch.equal(full["y"], low["y"])
    assert_near("y", full["y"], low["y"], 3e-2)


@pytest.mark.slow
def test_the_kernels_compile_for_a_hopper_gpu(tmp_path):
    cases = """
from bnrnn.scan.rhn.triton_kernels import backward_layer, enter_first, forward_layer, leave_first

EDGE = dict(B=64, H=100, J=16, TILE=64, BATCH=True)
COMMON = EDGE | dict(Q=3, D=3, L=3, K=32, FUSED=True, LOW=tl.float32, WIDEN=False, PRECISION="tf32")
FORWARD = COMMON | dict(FIRST=True, ENTERED=True, NEXT_ENTERS=True, TOP=False, KEEP=True)
BACKWARD = COMMON | dict(FIRST=True, TOP=False, LAST=False, NEXT_ENTERED=True)
X, Z = ["gamma_x", "mean_x", "var_x"], ["gamma_z", "mean_z", "var_z"]
S = ["gamma_s", "beta_s", "mean_s", "var_s", "normal", "entering"]
CASES = [
    (forward_layer, FORWARD, ["running"]),
    (forward_layer, FORWARD | dict(FIRST=False, TOP=True, KEEP=False, LOW=tl.bfloat16, B=300), Z),
    (forward_layer, FORWARD | dict(Q=2, L=0, ENTERED=False, NEXT_ENTERS=False, FUSED=False), [*X, *S, *Z, "bias"]),
    (backward_layer, BACKWARD, ["running"]),
    (backward_layer, BACKWARD | dict(TOP=True, FIRST=False, B=300, BATCH=False), ["gamma_z", "var_z", "dgamma_z"]),
    (backward_layer, BACKWARD | dict(LAST=True, Q=2, L=0, FUSED=False, NEXT_ENTERED=False, LOW=tl.bfloat16),
     [*X, *S, *Z, "bias", "dbias", "dgamma_x", "dgamma_s", "dbeta_s", "dgamma_z"]),
    (enter_first, EDGE, ["beta_s"]),
    (leave_first, EDGE | dict(ENTERED=True), []),
    (leave_first, EDGE | dict(ENTERED=False), [*S, "dgamma_s", "dbeta_s"]),
]
"""
    assert_compiles(cases, tmp_path)
