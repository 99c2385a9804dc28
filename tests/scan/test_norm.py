import pytest
import torch

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan.native import build
from bnrnn.scan.norm import reference as norm
from tests.helpers import assert_near

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize("function", ["normalize_sequence", "normalize_over_time"])
@pytest.mark.parametrize("shape", [(4, 6, 23), (1, 3, 16), (3, 5, 1), (2, 40, 68), (3, 4, 300)])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("has_beta", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_the_kernel_is_the_reference_in_outputs_and_gradients(function, shape, padded, has_beta, given):
    T, B, F = shape
    x, gamma, beta = torch.randn(shape).double(), torch.randn(F).double(), torch.randn(F).double()
    num_statistics = 1 if function == "normalize_over_time" else T
    population = torch.randn(num_statistics, F).double(), torch.rand(num_statistics, F).double() + 0.1
    batch_sizes = [max(B - t, 3) for t in range(T)] if padded else None  # of 2, dx is rounding alone
    weight = torch.randn(shape).double()
    results = []
    for engine, dtype in ((norm, torch.float64), (scan, torch.float32)):
        leaves = [v.to(dtype).requires_grad_() for v in ((x, gamma, beta) if has_beta else (x, gamma))]
        stats = tuple(s.to(dtype) for s in population) if given else None
        of_beta = leaves[2] if has_beta else None
        y, *used = getattr(engine, function)(leaves[0], leaves[1], of_beta, 1e-5, stats, batch_sizes)
        results.append([y, *used, *torch.autograd.grad((y * weight.to(dtype)).sum(), leaves)])
    assert scan.backend(x.device, torch.float32) == "cpu"
    for name, ref, out in zip(["y", "mean", "var", "dx", "dgamma", "dbeta"], *results, strict=False):
        assert_near(name, ref, out)


@needs_compiler
@pytest.mark.parametrize("engine", [norm, scan])
def test_over_time_is_one_normalization_of_the_rows_that_count(engine):
    T, B, F, batch_sizes = 5, 4, 3, [4, 4, 3, 1, 1]
    x = torch.randn(T, B, F)
    counted = torch.arange(B) < torch.tensor(batch_sizes)[:, None]
    padded = x.masked_fill(~counted[..., None], 1e9).requires_grad_()
    y, mean, var = engine.normalize_over_time(padded, torch.ones(F), None, 0.0, None, batch_sizes)
    rows = x[counted]
    assert_near("y", (rows - rows.mean(0)) / rows.std(0, correction=0), y[counted])
    assert_near("mean", rows.mean(0), mean[0])
    assert_near("var", rows.var(0, correction=0), var[0])
    (dx,) = torch.autograd.grad((y * torch.randn(T, B, F)).sum(), padded)
    assert not y[~counted].any() and not dx[~counted].any()


@needs_compiler
def test_a_sum_over_many_steps_keeps_its_digits():
    x = torch.randn(3000, 8, 5) + 100
    mean, var = scan.normalize_over_time(x, torch.ones(5), None, 0.0)[1:]
    assert_near("mean", x.double().mean((0, 1)), mean[0], 1e-6)
    assert_near("var", x.double().var((0, 1), correction=0), var[0], 1e-5)


@needs_compiler
def test_several_threads_give_the_same():
    x, gamma, weight = torch.randn(7, 5, 600), torch.randn(600), torch.randn(7, 5, 600)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        leaves = [v.clone().requires_grad_() for v in (x, gamma)]
        y, mean, var = scan.normalize_over_time(*leaves, None, 1e-5, None, [5, 5, 5, 4, 3, 3, 3])
        results.append([y, mean, var, *torch.autograd.grad((y * weight).sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_sequence_without_a_batch_axis_is_named():
    with pytest.raises(BnrnnError, match=r"x must be \(T, B, F\), got \(4, 3\)"):
        scan.normalize_sequence(torch.randn(4, 3), torch.ones(3), None, 1e-5)


@pytest.mark.parametrize("engine", ["reference", "auto"])
@pytest.mark.parametrize("normalize", [scan.normalize_sequence, scan.normalize_over_time])
def test_zero_time_steps_are_named_by_every_engine(engine, normalize):
    scan.set_backend(engine)
    with pytest.raises(BnrnnError, match=r"x must have at least one time step, got \(0, 4, 3\)"):
        normalize(torch.zeros(0, 4, 3), torch.ones(3), None, 1e-5)
