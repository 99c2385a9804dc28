"""The Triton engine in Triton's interpreter: small shapes, on the CPU, against the reference in float64."""

import gc
import sys

import pytest
import torch

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan import backends
from bnrnn.scan.lstm.reference import lstm_scan
from bnrnn.scan.triton_shared import workspace
from tests.helpers import assert_near
from tests.scan.cases import NAMES, OPTIONAL, assert_agrees, everything, problem
from tests.scan.hopper import assert_compiles

NONE = (False,) * 5


@pytest.fixture(autouse=True)
def _triton():
    workspace._free.clear()
    scan.set_backend("triton")


@pytest.fixture(params=["fused", "apart"])
def product(request, monkeypatch):
    """Whether the recurrent product is part of the kernel."""
    monkeypatch.setattr(workspace, "FUSED_UP_TO", 2**17 if request.param == "fused" else 0)


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(
    "case",
    [
        problem(3, 6, 17),
        problem(2, 6, 21, NONE),
        problem(2, 5, 17, (True, False, True, True, False)),
        problem(2, 5, 17, (False, True, False, False, True)),
        problem(2, 5, 9, population=True),
        problem(1, 2, 33),
        problem(1, 70, 5),  # two tiles of sequences
        problem(3, 6, 5, batch_sizes=[6, 5, 1]),
        problem(3, 6, 5, batch_sizes=[5, 4, 3], ended_count=True),
        problem(3, 6, 5, NONE, batch_sizes=[5, 4, 3]),
        problem(3, 6, 5, population=True, batch_sizes=[5, 4, 1]),
    ],
    ids=lambda case: "",
)
def test_it_agrees_with_the_reference(case):
    assert_agrees("triton", case)


@pytest.mark.usefixtures("product")
def test_replicas_go_in_one_launch_and_share_nothing():
    several = [problem(2, 5, 6, batch_sizes=[5, 3]) for _ in range(2)]
    stacked = {n: torch.stack([p[n] for p in several]) for n in NAMES}
    found = everything(scan.lstm_scan, {**several[0], **stacked}, torch.float32)
    torch.manual_seed(1)  # the weights of `everything`
    weights = [torch.randn(found[key].shape, dtype=torch.float64) for key in ("y", "h", "c")]
    for r, own in enumerate(several):
        leaves = {n: own[n].clone().requires_grad_() for n in NAMES}
        y, (h, c), used = lstm_scan(
            *(leaves[n] for n in NAMES[:4]), **{n: leaves[n] for n in OPTIONAL}, batch_sizes=[5, 3]
        )
        loss = sum((v * w[r]).sum() for v, w in zip((y, h, c), weights, strict=True))
        grads = torch.autograd.grad(loss, list(leaves.values()))
        expected = {"y": y, "h": h, "c": c, **used._asdict(), **{f"d{n}": g for n, g in zip(NAMES, grads, strict=True)}}
        for key, ref in expected.items():
            assert_near(key, ref, found[key][r], 1e-5)


def run(args: dict, with_grad: bool = True) -> tuple:
    leaves = {n: args[n].float().requires_grad_(with_grad) for n in NAMES}
    y, _, _ = scan.lstm_scan(*(leaves[n] for n in NAMES[:4]), **{n: leaves[n] for n in OPTIONAL})
    return y, leaves


def test_a_workspace_is_used_again_and_by_one_scan_at_a_time():
    first, second = problem(2, 5, 6), problem(2, 5, 6)
    scan.set_backend("reference")
    expected = []
    for args in (first, second):
        y, leaves = run(args)
        expected.append([y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))])
    scan.set_backend("triton")
    for _ in range(2):  # the second time in the workspaces of the first
        together = [run(args) for args in (first, second)]
        for (y, leaves), refs in zip(together, expected, strict=True):
            found = [y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))]
            for name, ref, out in zip(["y", *NAMES], refs, found, strict=True):
                assert_near(name, ref, out, 1e-5)
    assert [len(free) for free in workspace._free.values()] == [2]


def test_workspaces_come_back_from_scans_without_a_backward_pass():
    args = problem(2, 4, 3)
    y, leaves = run(args)
    del y, leaves
    gc.collect()
    with torch.no_grad():
        run(args, with_grad=False)
    assert sorted(len(free) for free in workspace._free.values()) == [1, 1]


def test_only_so_many_workspaces_are_kept(monkeypatch):
    monkeypatch.setattr(workspace, "MAX_FREE", 2)
    for H in (3, 4, 5):
        run(problem(1, 3, H), with_grad=False)
    assert sorted(kind.shape[3] for kind in workspace._free) == [4, 5]


def test_a_second_backward_raises():
    y, _ = run(problem(2, 4, 5))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already run backward, which freed its buffers"):
        y.sum().backward()


def test_bfloat16_products_keep_statistics_and_states_in_float32():
    args = problem(3, 5, 20)
    full = everything(lstm_scan, args, torch.float32)
    low = everything(scan.lstm_scan, {**args, "product_dtype": torch.bfloat16}, torch.float32)
    assert all(v.dtype == torch.float32 for v in low.values())
    assert not torch.equal(full["y"], low["y"])
    assert_near("y", full["y"], low["y"], 1e-2)


def test_it_needs_a_gpu_and_at_most_float32(monkeypatch):
    with pytest.raises(BnrnnError, match=r"float32, bfloat16 and float16 on a GPU, not torch.float64 on cpu"):
        scan.backend(torch.device("cpu"), torch.float64)
    assert scan.backend(torch.device("cuda"), torch.float32) == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BnrnnError, match=r"not torch.float32 on cpu"):
        scan.backend(torch.device("cpu"), torch.float32)


def test_without_triton_auto_uses_the_reference_and_triton_is_an_error(monkeypatch, caplog):
    scan.set_backend("auto")
    monkeypatch.setitem(sys.modules, "bnrnn.scan.lstm.triton", None)
    backends.triton_engine.cache_clear()
    backends._has.cache_clear()
    cuda = torch.device("cuda")
    assert [scan.backend(cuda, torch.float32) for _ in range(2)] == ["reference"] * 2
    assert len(caplog.messages) == 1
    with pytest.raises(BnrnnError, match="pip install triton"):
        scan.set_backend("triton")
    backends.triton_engine.cache_clear()


@pytest.mark.slow
def test_the_kernels_compile_for_a_hopper_gpu(tmp_path):
    cases = """
from bnrnn.scan.lstm.triton_kernels import backward_step, forward_step

COMMON = dict(R=2, B=64, H=100, J=16, TILE=64, K=32, BATCH=True, ALL_COUNT=True, FUSED=True, LOW=tl.float32,
              WIDEN=False, PRECISION="tf32")
CASES = [(forward_step, COMMON | dict(U_STEPS=True), ["running"]),
         (backward_step, COMMON | dict(LAST=False), ["running"]),
         (backward_step, COMMON | dict(LAST=True, FUSED=False), ["gamma_ih", "dgamma_ih", "var_ih"]),
         (forward_step, COMMON | dict(U_STEPS=False, BATCH=False, ALL_COUNT=False, LOW=tl.bfloat16, B=300),
          ["gamma_hh"])]
"""
    assert_compiles(cases, tmp_path)
