"""Matrix products before and after the recurrence."""

import pytest
import torch
import torch.nn.functional as F

from bnrnn import scan
from bnrnn.scan.native import build
from tests.helpers import assert_near

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
ENGINES = ["reference", "fused", pytest.param("cpu", marks=needs_compiler)]


def test_a_product_that_does_not_fit_is_an_error_of_torch_and_is_not_read_by_the_kernel():
    for weight in (torch.zeros(4, 7), torch.zeros(4, 5).double()):
        with pytest.raises(RuntimeError, match=r"must match|cannot be multiplied|same dtype"):
            scan.linear(torch.zeros(2, 3, 5), weight)


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 4, 1, 7), (2, 5, 6, 1), (7, 300, 130, 70), (1, 1, 3, 2), (3, 7, 1100, 37)])
def test_the_compiled_product_is_linear_in_outputs_and_gradients(shape):
    scan.set_backend("cpu")
    T, B, I, G = shape
    x, weight, bias, dy = torch.randn(T, B, I), torch.randn(G, I), torch.randn(G), torch.randn(T, B, G)
    results = []
    for dtype, run in ((torch.float64, F.linear), (torch.float32, scan.linear)):
        leaves = [v.to(dtype).requires_grad_() for v in (x, weight, bias)]
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(dtype))])
    for name, ref, out in zip(("y", "dx", "dweight", "dbias"), *results, strict=True):
        assert_near(name, ref, out)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_product_with_ids_is_that_with_one_hot_vectors(engine):
    scan.set_backend(engine)
    ids, weight, bias = torch.randint(5, (4, 3)), torch.randn(7, 5), torch.randn(7)
    for b in (None, bias):
        assert_near("product", scan.linear(F.one_hot(ids, 5).float(), weight, b), scan.linear(ids, weight, b))
