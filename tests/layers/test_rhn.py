import pytest
import torch
from torch import nn

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.layers import base
from bnrnn.layers.bn_rhn import BNRHN, PLACES
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.population import batch_statistics, estimate_population_statistics
from bnrnn.layers.rhn import RHN
from bnrnn.layers.stack import Stack
from tests.helpers import assert_near

I, H, T, B = 4, 6, 7, 5


@pytest.fixture(autouse=True)
def _engine():
    yield
    scan.set_backend("auto")


def drawn(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
    return layer.double()


def test_at_depth_1_it_is_a_highway_step():
    layer, x = drawn(RHN(I, H, depth=1)), torch.randn(T, B, I).double()
    y, (last,) = layer(x)
    s = torch.zeros(B, H).double()
    for x_t, y_t in zip(x, y, strict=True):
        a = s @ layer.weight_hh[0].T + x_t @ layer.weight_ih.T + layer.bias[0]
        h, t = a[:, :H].tanh(), a[:, H:].sigmoid()
        s = h * t + s * (1 - t)
        assert_near("y", s, y_t)
    assert torch.equal(last, y[-1])


def test_without_norm_and_with_coupled_gates_bn_rhn_is_rhn():
    plain, other = drawn(RHN(I, H)), BNRHN(I, H, T, place=None, coupled=True).double()
    other.load_state_dict(plain.state_dict())
    x = torch.randn(T, B, I).double()
    assert_near("y", plain(x)[0], other(x)[0])


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_every_place_by_its_equation(engine):
    scan.set_backend(engine)
    x = torch.randn(T, B, I).double()

    def bn(v, gamma, beta):
        return gamma * (v - v.mean(0)) / (v.var(0, correction=0) + 1e-3).sqrt() + beta

    for place in PLACES:
        layer, s = drawn(BNRHN(I, H, T, depth=2, place=place)), torch.zeros(B, H).double()
        for x_t, y_t in zip(x, layer(x)[0], strict=True):
            of_x = x_t @ layer.weight_ih.T
            of_x = of_x if place == "sum" else bn(of_x, layer.bn_x.gamma, 0)
            for d in range(2):
                v = s
                if place == "every" or (place == "first" and d == 0):
                    v = bn(s, layer.bn_s.gamma.view(-1, H)[d], layer.bn_s.beta.view(-1, H)[d])
                a = v @ layer.weight_hh[d].T + (of_x if d == 0 else 0)
                a = bn(a, layer.bn_sum.gamma.view(2, -1)[d], layer.bias[d]) if place == "sum" else a + layer.bias[d]
                h, t, c = a.chunk(3, dim=1)
                s = h.tanh() * t.sigmoid() + s * c.sigmoid()
            assert_near(place, s, y_t)


@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_population_statistics_of_one_batch_give_its_outputs(place):
    stack = drawn(Stack(lambda *sizes, t_max: BNRHN(*sizes, t_max, place=place), I, H, t_max=T))
    x, lengths = torch.randn(T, B, I).double(), [7, 5, 7, 3, 2]
    stack.eval()
    with pytest.raises(BnrnnError, match="evaluation needs population statistics"):
        stack(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack

        def forward(self, x):
            return stack(x, lengths=lengths)[0]

    model = Model().eval()
    estimate_population_statistics(model, [x])
    with batch_statistics(model):
        expected = model(x)
    found = model(x)
    assert_near("y", expected, found)
    norms = [m for m in stack.modules() if isinstance(m, SequenceBatchNorm)]
    assert all(m.pop_var.isfinite().all() and m.pop_mean.shape[0] == T for m in norms)
    assert_near("padding", expected, stack(x + 1e3 * (found == 0).all(2, keepdim=True), lengths=lengths)[0])
    assert_near("alone", found[:3, 3], stack(x[:3, 3:4])[0][:, 0])


@pytest.mark.parametrize("place", [None, *PLACES])
@torch.no_grad()
def test_a_sequence_may_be_fed_in_pieces(place):
    layer = drawn(BNRHN(I, H, T, place=place))
    x = torch.randn(T, B, I).double()
    estimate_population_statistics(layer, [x])
    layer.eval()
    whole, (last,) = layer(x)
    first, state = layer(x[:3])
    second, (end,) = layer(x[3:], state, 3)
    assert_near("y", whole, torch.cat([first, second]))
    assert_near("state", last, end)


def test_the_initial_bias_carries_the_state():
    for layer in (RHN(I, H), BNRHN(I, H, T)):
        a = layer.bias.detach()
        assert (a[:, :H] == 0).all() and (a[:, H : 2 * H] == -2).all() and (a[:, 2 * H :] == 2).all()
        s = torch.randn(B, H)
        y, _ = layer(torch.zeros(1, B, I), (s,))
        assert (y[0] - s).norm() < s.norm()


def test_bad_arguments_are_errors():
    with pytest.raises(BnrnnError, match="depth must be at least 1, got 0"):
        RHN(I, H, depth=0)
    with pytest.raises(BnrnnError, match="place='gates' is unknown: use None, 'every', 'first', 'sum'"):
        BNRHN(I, H, T, place="gates")
    with pytest.raises(BnrnnError, match="batch statistics need at least 2 sequences"):
        BNRHN(I, H, T)(torch.randn(T, 1, I))


def test_bfloat16_keeps_the_state_in_float32():
    layer, x = BNRHN(I, H, T), torch.randn(T, B, I)
    expected, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, (s,) = layer(x)
    assert s.dtype == torch.float32
    assert_near("y", expected, y.float(), 0.1)


def test_a_state_of_another_shape_or_dtype_is_an_error():
    with pytest.raises(BnrnnError, match=r"a tuple of s, each of shape \(40000, 512\)"):
        RHN(3, 512)(torch.randn(2, 40000, 3), (torch.zeros(1, 512),))
    stack, x = Stack(RHN, I, H), torch.randn(T, B, I)
    _, (state,) = stack(x)
    with pytest.raises(BnrnnError, match="s does not match x_proj"):
        stack(x, (state.double(),))


@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_long_sequences_in_bounded_memory_give_the_same(place, monkeypatch):
    layer, x = drawn(BNRHN(I, H, T, place=place)), torch.randn(T, B, I).double()
    estimate_population_statistics(layer, [x])
    expected = {name: value.clone() for name, value in layer.named_buffers()}
    monkeypatch.setattr(base, "MAX_PRODUCT_SIZE", 2 * B * len(layer.weight_ih))  # two steps at once
    estimate_population_statistics(layer, [x])
    for name, value in layer.named_buffers():
        assert_near(name, expected[name], value)
