import torch
from torch import nn

from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.scan.norm import normalize
from tests.helpers import assert_near


def test_every_time_step_is_batchnorm1d():
    norm = SequenceBatchNorm(3, t_max=4, gamma_init=0.7, beta=True).double()
    nn.init.normal_(norm.beta)
    x = torch.randn(4, 6, 3, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    torchs = nn.BatchNorm1d(3).double()
    torchs.weight, torchs.bias = norm.gamma, norm.beta
    ref = torch.stack([torchs(step) for step in x])
    weight = torch.randn_like(ref)
    inputs = (x, norm.gamma, norm.beta)
    for name, out, r in zip(
        ("y", "dx", "dgamma", "dbeta"),
        (y, *torch.autograd.grad((y * weight).sum(), inputs)),
        (ref, *torch.autograd.grad((ref * weight).sum(), inputs)),
        strict=True,
    ):
        assert_near(name, r, out)


def test_statistics_are_mean_and_biased_variance_also_without_any_spread():
    x = torch.randn(50, 4) * torch.tensor([1.0, 1e-3, 1e3, 0.0]) + torch.tensor([0.0, 5.0, 1.0, 3.0])
    _, mean, var = normalize(x, torch.ones(4), None, 1e-5)
    assert_near("mean", x.double().mean(0), mean)
    assert_near("var", x.double().var(0, correction=0)[[0, 2]], var[[0, 2]])
    assert_near("var of a small spread", x.double().var(0, correction=0)[1], var[1], 1e-4)
    assert var[3] < 1e-6 * 1e-5  # nothing beside eps
