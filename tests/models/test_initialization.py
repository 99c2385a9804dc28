from functools import partial

import pytest
import torch

from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.lstm import LSTM
from bnrnn.models.sequence_model import SequenceModel, init_cooijmans, init_glorot, init_uniform

H = 6
EYE = torch.eye(H)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5)


def initialised(hidden: str, per_gate: bool = False) -> LSTM:
    init = partial(init_cooijmans, hidden=hidden, per_gate=per_gate)
    return SequenceModel(LSTM, H, input_size=1, output_size=10, t_max=3, init=init).layer.layers[0]


def language_model(layer, init) -> SequenceModel:
    return SequenceModel(layer, 60, input_size=50, output_size=50, t_max=3, init=init, num_layers=2, embedding_size=40)


def test_identity_is_in_the_candidate_alone_and_one_orthogonal_matrix_in_the_others():
    i, f, g, o = initialised("identity").weight_hh.chunk(4)
    others = torch.cat([i, f, o])
    assert torch.equal(g, EYE)
    assert close(others.T @ others, EYE)
    assert not close(i.T @ i, EYE)


def test_orthogonal_is_one_matrix_over_all_gates_or_one_a_gate():
    joint = initialised("orthogonal").weight_hh
    assert close(joint.T @ joint, EYE)
    for gate in initialised("orthogonal", per_gate=True).weight_hh.chunk(4):
        assert close(gate.T @ gate, EYE)


def test_a_single_input_gets_a_unit_vector_over_all_gates():
    assert initialised("identity").weight_ih.norm().item() == pytest.approx(1.0)


def test_only_the_forget_gate_has_a_bias():
    assert initialised("identity").bias.tolist() == [0.0] * H + [1.0] * H + [0.0] * 2 * H


def test_a_plain_rnn_gets_the_identity():
    init = partial(init_cooijmans, hidden="identity")
    model = SequenceModel(BNRNN, H, input_size=1, output_size=4, t_max=3, init=init)
    assert torch.equal(model.layer.layers[0].weight_hh, EYE)
    assert close(model.head.weight @ model.head.weight.T, torch.eye(4))
    assert (model.head.bias == 0).all()


def test_uniform_reaches_every_parameter_and_no_scale_or_shift_of_a_normalization():
    model = language_model(LSTM, partial(init_uniform, bound=0.3))
    for name, parameter in model.named_parameters():
        if not name.startswith("initial_state"):
            assert parameter.abs().max() <= 0.3 and parameter.std().item() == pytest.approx(0.3 / 3**0.5, rel=0.2), name
    normalized = language_model(InputBNLSTM, partial(init_uniform, bound=0.3)).layer.layers[1]
    assert (normalized.bias == 0).all()
    assert (normalized.bn_ih.gamma == 1).all()


def test_glorot_goes_gate_by_gate_with_a_standard_normal_embedding_and_no_bias():
    model = language_model(LSTM, init_glorot)
    first, second = model.layer.layers
    for weight, bound in (
        (first.weight_ih, (6 / (40 + 60)) ** 0.5),
        (second.weight_hh, (6 / (60 + 60)) ** 0.5),
        (model.head.weight, (6 / (60 + 50)) ** 0.5),
    ):
        assert 0.95 * bound < weight.abs().max() <= bound
    assert model.embedding.weight.std().item() == pytest.approx(1.0, rel=0.1)
    assert all((layer.bias == 0).all() for layer in (first, second)) and (model.head.bias == 0).all()


def test_another_word_is_refused():
    with pytest.raises(BnrnnError, match=r"init.hidden is 'identify': use 'identity' or 'orthogonal'"):
        initialised("identify")
