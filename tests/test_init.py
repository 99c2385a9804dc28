import pytest
import torch
from torch import nn

from bnrnn.errors import BnrnnError
from bnrnn.init import init_cooijmans
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.lstm import LSTM

H = 6
EYE = torch.eye(H)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5)


def initialised(hidden: str, per_gate: bool = False) -> LSTM:
    layer = LSTM(1, H)
    init_cooijmans(layer, nn.Linear(H, 10), hidden=hidden, per_gate=per_gate)
    return layer


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
    layer = BNRNN(1, H, 3)
    init_cooijmans(layer, head := nn.Linear(H, 4), hidden="identity")
    assert torch.equal(layer.weight_hh, EYE)
    assert close(head.weight @ head.weight.T, torch.eye(4))
    assert (head.bias == 0).all()


def test_another_word_is_refused():
    with pytest.raises(BnrnnError, match=r"init.hidden is 'identify': use 'identity' or 'orthogonal'"):
        initialised("identify")
