"""Every engine against the reference in float64: outputs, statistics and all gradients."""

import itertools
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.evidence import ROOT
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.scan import lstm_cpu
from bnrnn.scan.lstm import Statistics, lstm_scan
from tests.helpers import assert_near

needs_compiler = pytest.mark.skipif(lstm_cpu.compiler() is None, reason="needs a C++ compiler")
ENGINES = ["fused", pytest.param("cpu", marks=needs_compiler)]
NAMES = ("gates_x", "h", "c", "weight_hh", "gamma_hh", "gamma_c", "beta_c")


@pytest.fixture(autouse=True)
def _restore():
    yield
    scan.set_backend("auto")
    lstm_cpu.library.cache_clear()
    scan._has_kernel.cache_clear()


def problem(T: int, B: int, H: int, hh: bool, cell: bool, beta: bool, population: bool) -> dict:
    """Random arguments in float64, by the shape and the halves of BN that are there."""
    shapes = [(T, B, 4 * H), (B, H), (B, H), (4 * H, H), (4 * H,), (H,), (H,)]
    given = (True, True, True, True, hh, cell, beta)
    args = {n: torch.randn(s, dtype=torch.float64) if g else None for n, s, g in zip(NAMES, shapes, given, strict=True)}
    args["weight_hh"] /= H**0.5
    if hh:
        args["gamma_hh"] *= 0.3  # larger scales make the recurrence chaotic, and rounding errors grow with every step
    stats = Statistics(torch.randn(T, 4 * H), torch.rand(T, 4 * H) + 0.1, torch.randn(T, H), torch.rand(T, H) + 0.1)
    return {**args, "population": Statistics(*(s.double() for s in stats)) if population else None}


def everything(run: Callable, problem: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs, statistics and gradients, by name."""
    torch.manual_seed(1)
    args = {n: None if problem[n] is None else problem[n].to(dtype).requires_grad_() for n in NAMES}
    population = problem["population"] and Statistics(*(s.to(dtype) for s in problem["population"]))
    y, (h, c), seen = run(**args, population=population, collect=True)
    weights = [torch.randn(v.shape, dtype=torch.float64).to(dtype) for v in (y, h, c)]
    leaves = {n: a for n, a in args.items() if a is not None}
    loss = sum((v * w).sum() for v, w in zip((y, h, c), weights, strict=True))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"y": y, "h": h, "c": c, **seen._asdict(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def assert_agrees(name: str, problem: dict) -> None:
    expected = everything(lstm_scan, problem, torch.float64)
    scan.set_backend(name)
    dtype = torch.float64 if name == "fused" else torch.float32
    found = everything(scan.lstm_scan, problem, dtype)
    assert found.keys() == expected.keys()
    tol = 1e-9
    if dtype == torch.float32:
        # In a batch of two, normalized to ±1, gradients are small differences of large numbers: there the reference
        # itself is off by more than 1e-5 in float32, and an engine is held to the size of that error.
        rounded = everything(lstm_scan, problem, dtype)
        errors = [(rounded[k] - ref).norm() / ref.norm().clamp_min(1e-8) for k, ref in expected.items()]
        tol = max(1e-5, 3 * max(errors).item())
    for key, ref in expected.items():
        assert_near(key, ref, found[key], tol)


HALVES = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("hh", "cell", "beta"), HALVES)
@pytest.mark.parametrize("population", [False, True])
def test_engines_agree_with_the_reference_with_any_half_of_bn(engine, hh, cell, beta, population):
    assert_agrees(engine, problem(5, 6, 23, hh, cell, beta, population))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(1, 5, 16), (4, 2, 19), (3, 9, 1), (2, 4, 3), (2, 3, 100), (40, 7, 36)])
def test_engines_agree_at_edges_of_shape(engine, shape):
    assert_agrees(engine, problem(*shape, True, True, True, False))


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_at_random_shapes(engine):
    draw = random.Random(0)
    for _ in range(15):
        shape = draw.randint(1, 9), draw.randint(3, 20), draw.randint(1, 70)
        assert_agrees(engine, problem(*shape, *(draw.random() < 0.5 for _ in range(4))))


@pytest.mark.parametrize("engine", ENGINES)
def test_constant_columns_have_finite_gradients(engine):
    args = problem(3, 6, 5, True, True, True, False)
    args["h"].zero_()
    args["gates_x"][:, :] = args["gates_x"][:, :1]
    assert_agrees(engine, args)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_second_backward_raises(engine):
    scan.set_backend(engine)
    args = problem(3, 4, 5, True, True, True, False)
    y, _, _ = scan.lstm_scan(*(args[n].float().requires_grad_() for n in NAMES))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="its buffers are spent"):
        y.sum().backward()


@needs_compiler
def test_auto_takes_the_kernel_for_float32_and_the_reference_for_the_rest():
    cpu = torch.device("cpu")
    assert scan.backend(cpu, torch.float32) == "cpu"
    assert scan.backend(cpu, torch.float64) == "reference"
    assert scan.backend(torch.device("cuda"), torch.float32) == "reference"


def test_without_a_compiler_auto_takes_the_reference_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(lstm_cpu, "compiler", lambda: None)
    lstm_cpu.library.cache_clear()
    scan._has_kernel.cache_clear()
    assert [scan.backend(torch.device("cpu"), torch.float32) for _ in range(2)] == ["reference"] * 2
    assert len(caplog.messages) == 1
    assert "needs a C++ compiler" in caplog.messages[0]


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    lstm_cpu.library.cache_clear()
    with pytest.raises(BnrnnError, match="cannot be written"):
        scan.set_backend("cpu")


@needs_compiler
def test_an_engine_that_cannot_run_is_an_error(monkeypatch):
    with pytest.raises(BnrnnError, match="backend=gpu is unknown: use auto, reference, fused, cpu"):
        scan.set_backend("gpu")
    scan.set_backend("cpu")
    with pytest.raises(BnrnnError, match=r"float32 on the CPU, not for torch.float64"):
        BNLSTM(2, 3, 4).double()(torch.randn(4, 5, 2, dtype=torch.float64))
    monkeypatch.setattr(lstm_cpu, "compiler", lambda: None)
    lstm_cpu.library.cache_clear()
    with pytest.raises(BnrnnError, match=r"needs a C\+\+ compiler"):
        scan.set_backend("cpu")


@needs_compiler
def test_what_the_compiler_says_is_reported(monkeypatch, tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    monkeypatch.setattr(lstm_cpu, "SOURCE", source)
    lstm_cpu.library.cache_clear()
    with pytest.raises(BnrnnError, match=r"could not build broken.cpp: (.|\n)*error"):
        scan.set_backend("cpu")


@needs_compiler
@pytest.mark.slow
def test_several_processes_can_build_the_kernel_at_once(tmp_path):
    code = "from bnrnn import scan; scan.set_backend('cpu')"
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env) for _ in range(3)]
    assert [p.wait() for p in processes] == [0, 0, 0]
    assert len(list((tmp_path / "bnrnn").iterdir())) == 1
