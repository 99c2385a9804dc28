import pytest
import torch

from bnrnn import scan
from bnrnn.scan import lstm_cpu, norm
from tests.helpers import assert_near


@pytest.mark.skipif(lstm_cpu.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("shape", [(4, 6, 23), (1, 3, 16), (3, 5, 1), (2, 40, 68)])
@pytest.mark.parametrize("has_beta", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_the_kernel_is_the_reference_in_outputs_and_gradients(shape, has_beta, given):
    T, _, F = shape
    x, gamma, beta = torch.randn(shape).double(), torch.randn(F).double(), torch.randn(F).double()
    population = (torch.randn(T, F).double(), torch.rand(T, F).double() + 0.1) if given else None
    weight = torch.randn(shape).double()
    results = []
    for engine, dtype in ((norm.normalize_sequence, torch.float64), (scan.normalize_sequence, torch.float32)):
        leaves = [v.to(dtype).requires_grad_() for v in ((x, gamma, beta) if has_beta else (x, gamma))]
        stats = population and tuple(s.to(dtype) for s in population)
        y = engine(leaves[0], leaves[1], leaves[2] if has_beta else None, 1e-5, stats)
        results.append([y, *torch.autograd.grad((y * weight.to(dtype)).sum(), leaves)])
    assert scan.backend(x.device, torch.float32) == "cpu"
    for name, ref, out in zip(["y", "dx", "dgamma", "dbeta"], *results, strict=False):
        assert_near(name, ref, out)
