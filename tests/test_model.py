from functools import partial

import pytest
import torch
from torch import nn

from bnrnn.init import init_cooijmans
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.lstm import LSTM
from bnrnn.layers.rnn import RNN
from bnrnn.model import SequenceModel
from tests.helpers import assert_near

SIZES = {"hidden_size": 4, "input_size": 2, "output_size": 3, "t_max": 5}


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_it_starts_from_the_learned_state_and_reads_out_every_step(options):
    model = SequenceModel(LSTM, **SIZES, **options)
    num_states = len(model.layer.layers)
    for state in model.initial_state.values():
        assert state.shape == (num_states, 4)
        nn.init.normal_(state)
    x = torch.randn(5, 6, 2)
    state = tuple(model.initial_state[k][:, None].expand(num_states, 6, 4) for k in "hc")
    assert_near("logits", model.head(model.layer(x, state)[0]), model(x))
    model(x).square().sum().backward()
    assert all((state.grad.abs().sum(1) > 0).all() for state in model.initial_state.values())


def test_state_noise_is_drawn_anew_in_every_pass_also_in_evaluation_for_every_h_and_no_c():
    layer = partial(BNLSTM, gamma_init=1.0)
    model = SequenceModel(layer, **SIZES | {"input_size": 1, "t_max": 2}, state_noise=0.1, num_layers=2)
    seen = []
    model.layer.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    x = torch.randn(2, 5000, 1)
    model(x), model(x)
    model.layer.forward = lambda x, state: (x.new_zeros(*x.shape[:2], 4), state)
    model.eval()(x)
    for h, c in seen:
        assert (h.std((1, 2)) - 0.1).abs().max() < 0.002
        assert (c == 0).all()
    drawn = [noise for h, _ in seen for noise in h]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_every_single_layer_is_initialised():
    init = partial(init_cooijmans, hidden="identity")
    model = SequenceModel(LSTM, **SIZES, num_layers=2, bidirectional=True, init=init)
    assert [layer.input_size for layer in model.layer.layers] == [2, 2, 8, 8]
    for layer in model.layer.layers:
        assert torch.equal(layer.weight_hh.chunk(4)[2], torch.eye(4))
        assert (layer.bias.chunk(4)[1] == 1).all()
    weight = model.head.weight
    assert weight.shape == (3, 8)
    assert torch.allclose(weight @ weight.T, torch.eye(3), atol=1e-5)


def test_one_layer_has_the_parameters_of_layer_state_and_head():
    count = sum(p.numel() for p in SequenceModel(BNLSTM, **SIZES).parameters())
    assert count == sum(p.numel() for p in BNLSTM(2, 4, 5).parameters()) + 2 * 4 + (4 + 1) * 3


def test_dropout_acts_between_layers_in_training_alone():
    model = SequenceModel(RNN, **SIZES, num_layers=2, dropout=0.5)
    x = torch.randn(5, 6, 2)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
