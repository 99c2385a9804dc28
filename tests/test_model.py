from functools import partial

import torch

from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.lstm import LSTM
from bnrnn.model import SequenceModel
from tests.helpers import assert_near


def test_it_starts_from_the_learned_state_and_reads_out_every_step():
    model = SequenceModel(LSTM, hidden_size=4, input_size=2, output_size=3, t_max=5)
    for state in model.initial_state.values():
        torch.nn.init.normal_(state)
    x = torch.randn(5, 6, 2)
    h, c = (model.initial_state[k].expand(6, -1) for k in "hc")
    assert_near("logits", model.head(model.layer(x, (h, c))[0]), model(x))
    model(x).sum().backward()
    assert all(state.grad.abs().sum() > 0 for state in model.initial_state.values())


def test_state_noise_is_drawn_anew_in_every_pass_also_in_evaluation_and_for_h_alone():
    layer = partial(BNLSTM, gamma_init=1.0)
    model = SequenceModel(layer, hidden_size=4, input_size=1, output_size=3, t_max=2, state_noise=0.1)
    seen = []
    model.layer.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    x = torch.randn(2, 5000, 1)
    model(x), model(x)
    model.layer.forward = lambda x, state: (x.new_zeros(*x.shape[:2], 4), state)
    model.eval()(x)
    for h, c in seen:
        assert abs(h.std().item() - 0.1) < 0.002
        assert (c == 0).all()
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[1][0], seen[2][0])
