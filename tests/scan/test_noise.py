"""The generator of zoneout and recurrent dropout: its distribution, and an independent implementation."""

import itertools

import pytest
import torch
from torch import Tensor

from bnrnn import scan
from bnrnn.scan.noise import Noise
from tests.scan.cases import ALL, assert_agrees, problem

KEY = torch.tensor(-8_664_432_177_021_117_319)
SIZES = [6, 5, 5, 4, 4]


def factors(noise: Noise, T: int, B: int, H: int) -> Tensor:
    """(T, 3, B, H)"""
    return torch.stack([torch.stack(noise.factors(t, torch.zeros(B, H))) for t in range(T)])


def mixed(x: int, more: int = 0) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D + more) % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def test_the_factors_are_those_of_the_hash_computed_with_pythons_numbers():
    T, B, H = 3, 4, 5
    noise = Noise(0.4, 0.3, 0.25, KEY)
    found = factors(noise, T, B, H)
    low, high = KEY.item() % 2**32, (KEY.item() >> 32) % 2**32
    spread = 0x9E3779B1
    for t, b, j in itertools.product(range(T), range(B), range(H)):
        first, second = mixed((low + t * spread) % 2**32), mixed(high ^ (t * spread % 2**32))
        first, second = mixed((first + b * spread) % 2**32), mixed(second ^ (b * spread % 2**32))
        word = mixed((first + j * spread) % 2**32, second)
        expected = [
            word % 2**16 < round(0.4 * 2**16),
            word // 2**16 < round(0.3 * 2**16),
            word * 0x9E485565 % 2**32 // 2**16 >= round(0.25 * 2**16),
        ]
        assert found[t, :, b, j].tolist() == [float(v) for v in expected]


def test_the_factors_have_their_probabilities_and_are_independent():
    """Of each other, and along time, sequences and units: all correlations are those of chance."""
    T, B, H = 40, 30, 101
    p = torch.tensor([0.4, 0.15, 0.7])
    found = factors(Noise(0.4, 0.15, 0.3, KEY), T, B, H)
    n = T * B * H
    assert ((found.mean((0, 2, 3)) - p).abs() < 4 * (p * (1 - p) / n).sqrt()).all()
    z = (found - p[:, None, None]) / (p * (1 - p)).sqrt()[:, None, None]
    limit = 4.5 / n**0.5
    for k, m in itertools.combinations(range(3), 2):
        assert (z[:, k] * z[:, m]).mean().abs() < limit
    for axis, lag in itertools.product((0, 2, 3), (1, 2, 3, 7, 16)):
        length = z.shape[axis] - lag
        pairs = z.narrow(axis, 0, length)[:, :, None] * z.narrow(axis, lag, length)[:, None]
        assert pairs.mean((0, 3, 4)).abs().max() < limit * (z.shape[axis] / length) ** 0.5, (axis, lag)
    for axis in (0, 2, 3):  # no step, sequence or unit is special
        others = [k for k in (0, 2, 3) if k != axis]
        means = z.mean(others) * (n / z.shape[axis]) ** 0.5
        assert means.abs().max() < 4.5 and 0.7 < means.var() < 1.3, axis


def test_other_keys_give_other_factors():
    noise = Noise(0.5, 0.5, 0.5, KEY)
    first = factors(noise, 4, 5, 60)
    for bit in (0, 1, 31, 32, 63):
        other = factors(noise._replace(key=KEY ^ torch.tensor(1).bitwise_left_shift(bit)), 4, 5, 60)
        assert 0.44 < (first != other).float().mean() < 0.56, bit


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_events_are_certain(p):
    kept_c, kept_h, passed = factors(Noise(p, p, p, KEY), 5, 6, 70).unbind(1)
    assert (kept_c == p).all() and (kept_h == p).all() and (passed == 1 - p).all()


@pytest.mark.parametrize("engine", ["fused", "cpu"])
@pytest.mark.parametrize("over", ["batch", "layer", "gate"])
@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize(
    "given", [ALL, (False,) * 5, (True, False, True, True, False), (False, True, True, False, True)]
)
def test_engines_draw_the_same_factors(engine, over, key, given):
    for levels, sizes in (((0.4, 0.3, 0.2), None), ((0.0, 0.5, 0.0), SIZES), ((0.5, 0.0, 0.4), SIZES)):
        noise = Noise(*levels, key)
        for ended_count in (False, True)[: 1 + (over == "batch" and sizes is not None)]:
            options = {"over": over, "noise": noise, "batch_sizes": sizes, "ended_count": ended_count}
            assert_agrees(engine, problem(5, 6, 21, given, **options))
    population = over == "batch"
    assert_agrees(engine, problem(5, 6, 37, given, population, over=over, noise=Noise(0.3, 0.2, 0.1, key)))
    scan.set_backend("auto")
