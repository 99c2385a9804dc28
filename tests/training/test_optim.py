import copy

import pytest
import torch

from bnrnn.errors import BnrnnError
from bnrnn.training.build import optimizer_of
from bnrnn.training.optim import RMSProp, learning_rate
from tests.helpers import composed


def trajectories(first, second, num_steps: int = 5, scale: float = 1.0):
    """The weights after some steps of two optimizers that get the same gradients."""
    start = [torch.randn(3, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
    params = [[torch.nn.Parameter(p.clone()) for p in start] for _ in range(2)]
    optimizers = first(params[0]), second(params[1])
    for _ in range(num_steps):
        grads = [scale * torch.randn_like(p) for p in start]
        for optimizer, weights in zip(optimizers, params, strict=True):
            for p, g in zip(weights, grads, strict=True):
                p.grad = g.clone()
            optimizer.step()
    return start, *params


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_torchs_rmsprop_without_eps(momentum):
    _, ours, torchs = trajectories(
        lambda p: RMSProp(p, lr=0.01, decay=0.9, momentum=momentum),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=0.0, momentum=momentum),
    )
    for p, q in zip(ours, torchs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


def test_below_1e_5_the_denominator_is_1e_5_and_not_a_sum():
    start, ours, _ = trajectories(
        lambda p: RMSProp(p, lr=0.01), lambda p: torch.optim.SGD(p, lr=0.01), num_steps=1, scale=1e-6
    )
    torch.manual_seed(0)
    [torch.randn_like(p) for p in start]  # the weights were drawn first
    grads = [1e-6 * torch.randn_like(p) for p in start]
    for p, q, g in zip(start, ours, grads, strict=True):
        torch.testing.assert_close(q.data, p - 0.01 * g / 1e-5, rtol=1e-12, atol=0)


def test_its_state_survives_a_checkpoint():
    p = torch.nn.Parameter(torch.randn(3))
    optimizer = RMSProp([p])
    p.grad = torch.randn(3)
    optimizer.step()
    q = torch.nn.Parameter(p.data.clone())
    other = RMSProp([q])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    p.grad = q.grad = torch.randn(3)
    optimizer.step(), other.step()
    assert torch.equal(p, q)


def test_a_rate_that_is_divided_very_often_is_0():
    assert learning_rate(1.0, 1100, 6, 2) == learning_rate(1.0, 1100, 6, 2.0) == 0.0


@pytest.mark.parametrize(("divisor", "rate"), [(0.5, "1.36113e\\+39"), (1e-300, "inf")])
def test_a_rate_that_grows_beyond_float32_is_one_message(divisor, rate):
    message = f"lr_decay.divisor={divisor:g} makes the learning rate {rate} in epoch 130: use a divisor from 1"
    with pytest.raises(BnrnnError, match=message):
        learning_rate(1.0, 129, 0, divisor)


@pytest.mark.parametrize(
    ("optimizer", "override", "message"),
    [
        ("adam", "+optim.weight_decy=1e-4", "unexpected keyword argument 'weight_decy'"),
        ("adam", "optim.betas=0.9", "not subscriptable"),
        ("adam", "optim.betas=[0.9,2]", "Invalid beta parameter at index 1: 2"),
        ("adam", "+optim.weight_decay=-1", "Invalid weight_decay value: -1"),
        ("sgd", "+optim.nesterov=true", "Nesterov momentum requires a momentum"),
    ],
)
def test_an_option_that_the_optimizer_does_not_take_is_one_message(optimizer, override, message):
    cfg = composed(f"optim={optimizer}", override)
    with pytest.raises(BnrnnError, match=f"^optim cannot be built .*{message}.*: use the options of torch.optim."):
        optimizer_of(cfg, torch.nn.Linear(1, 1))


@pytest.mark.parametrize("bad", [{"decay": 1.0}, {"decay": -0.1}, {"momentum": 1.5}])
def test_rates_outside_zero_to_one_are_refused(bad):
    with pytest.raises(ValueError, match=f"optim.{next(iter(bad))} must be in"):
        RMSProp([torch.nn.Parameter(torch.zeros(1))], **bad)
