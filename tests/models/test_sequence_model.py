from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.lstm import LSTM
from bnrnn.layers.population import estimate_population_statistics
from bnrnn.layers.rnn import RNN
from bnrnn.models.sequence_model import SequenceModel, init_cooijmans, init_glorot, init_uniform
from tests.helpers import assert_near

H = 6
EYE = torch.eye(H)
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
    y, last = model.layer(x, state)
    logits, ended = model(x)
    assert_near("logits", model.head(y), logits)
    assert all(torch.equal(a, b) for a, b in zip(last, ended, strict=True))
    logits.square().sum().backward()
    assert all((state.grad.abs().sum(1) > 0).all() for state in model.initial_state.values())


def test_only_scored_steps_are_read_out():
    torch.manual_seed(0)
    whole, model = SequenceModel(LSTM, **SIZES), SequenceModel(LSTM, **SIZES, scored_steps=2)
    model.load_state_dict(whole.state_dict())
    x = torch.randn(5, 6, 2)
    (logits, _), (expected, _) = model(x), whole(x)
    assert logits.shape == (2, 6, 3)
    assert_near("logits", expected[-2:], logits)
    logits.square().sum().backward()
    expected[-2:].square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        if q.grad is not None:
            assert_near(name, q.grad, p.grad)


def test_state_noise_is_drawn_in_every_pass_also_in_evaluation_for_h_but_not_for_c():
    layer = partial(BNLSTM, gamma_init=1.0)
    model = SequenceModel(layer, **SIZES | {"input_size": 1, "t_max": 2}, state_noise=0.1, num_layers=2)
    seen = []
    model.layer.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    x = torch.randn(2, 5000, 1)
    model(x), model(x)
    model.layer.forward = lambda x, state, t_start, lengths: (x.new_zeros(*x.shape[:2], 4), state)
    model.eval()(x)
    for h, c in seen:
        assert (h.std((1, 2)) - 0.1).abs().max() < 0.002
        assert (c == 0).all()
    drawn = [noise for h, _ in seen for noise in h]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_every_layer_is_initialized():
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


@pytest.mark.parametrize("layer", [LSTM, BNLSTM, InputBNLSTM, RNN, BNRNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_ids_are_one_hot_rows_in_outputs_and_gradients(layer, options):
    model = SequenceModel(layer, **SIZES | {"input_size": 7}, **options).double()
    ids = torch.randint(7, (5, 6))
    parameters = list(model.parameters())
    runs = []
    for x in (ids, F.one_hot(ids, 7).double()):
        logits, _ = model(x)
        runs.append([logits, *torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)])
    for got, expected in zip(*runs, strict=True):
        assert (got is None and expected is None) or torch.allclose(got, expected, atol=1e-12)


def test_ids_beyond_the_vocabulary_are_refused_with_their_position():
    model = SequenceModel(LSTM, **SIZES | {"input_size": 7})
    ids = torch.zeros(5, 6, dtype=torch.long)
    ids[3, 2] = 7
    with pytest.raises(BnrnnError, match=r"ids from 0 to 6, got 7 at time step 3 of sequence 2"):
        model(ids)


def test_an_embedding_is_what_the_first_layer_reads():
    model = SequenceModel(LSTM, **SIZES | {"input_size": 7}, embedding_size=3)
    ids = torch.randint(7, (5, 6))
    assert model.layer.input_size == 3
    state = tuple(model.initial_state[k][:, None].expand(1, 6, 4) for k in "hc")
    assert torch.equal(model(ids)[0], model.head(model.layer(model.embedding(ids), state)[0]))


def test_dropout_of_a_language_model_is_on_embedded_ids_between_layers_and_before_the_head():
    model = SequenceModel(RNN, **SIZES | {"input_size": 7}, embedding_size=50, num_layers=2, dropout=0.5)
    seen = {}
    model.layer.register_forward_pre_hook(lambda _, args: seen.update(embedded=args[0]))
    model.layer.layers[1].register_forward_pre_hook(lambda _, args: seen.update(between=args[0]))
    model.head.register_forward_pre_hook(lambda _, args: seen.update(read=args[0]))
    model(torch.randint(7, (40, 6)))
    for x in seen.values():
        assert 0.4 < (x == 0).float().mean() < 0.6
    model.eval()(torch.randint(7, (40, 6)))
    assert all((x != 0).all() for x in seen.values())


def test_without_a_learned_state_sequences_begin_with_zeros():
    model = SequenceModel(LSTM, **SIZES, learned_state=False)
    assert not model.initial_state
    x = torch.randn(5, 6, 2)
    assert torch.equal(model(x)[0], model.head(model.layer(x)[0]))


@pytest.mark.parametrize("layer", [LSTM, BNLSTM, InputBNLSTM, BNRNN])
def test_a_sequence_cut_in_windows_gives_the_logits_of_the_uncut_one(layer):
    model = SequenceModel(layer, **SIZES | {"input_size": 7}, num_layers=2).double()
    ids = torch.randint(7, (11, 6))
    estimate_population_statistics(model, [ids])
    model.eval()
    whole, _ = model(ids)
    state, pieces = None, []
    for t in range(0, 11, 4):
        logits, state = model(ids[t : t + 4], state, t)
        pieces.append(logits)
    assert_near("logits", whole, torch.cat(pieces))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5)


def initialized(hidden: str, per_gate: bool = False) -> LSTM:
    init = partial(init_cooijmans, hidden=hidden, per_gate=per_gate)
    return SequenceModel(LSTM, H, input_size=1, output_size=10, t_max=3, init=init).layer.layers[0]


def language_model(layer, init) -> SequenceModel:
    return SequenceModel(layer, 60, input_size=50, output_size=50, t_max=3, init=init, num_layers=2, embedding_size=40)


def test_identity_is_in_the_candidate_alone_and_one_orthogonal_matrix_in_the_others():
    layer = initialized("identity")
    assert layer.weight_ih.norm().item() == pytest.approx(1.0), "a single input gets a unit vector over all gates"
    assert layer.bias.tolist() == [0.0] * H + [1.0] * H + [0.0] * 2 * H, "only the forget gate has a bias"
    i, f, g, o = layer.weight_hh.chunk(4)
    others = torch.cat([i, f, o])
    assert torch.equal(g, EYE)
    assert close(others.T @ others, EYE)
    assert not close(i.T @ i, EYE)


def test_orthogonal_is_one_matrix_over_all_gates_or_one_per_gate():
    joint = initialized("orthogonal").weight_hh
    assert close(joint.T @ joint, EYE)
    for gate in initialized("orthogonal", per_gate=True).weight_hh.chunk(4):
        assert close(gate.T @ gate, EYE)


def test_a_plain_rnn_gets_the_identity():
    init = partial(init_cooijmans, hidden="identity")
    model = SequenceModel(BNRNN, H, input_size=1, output_size=4, t_max=3, init=init)
    assert torch.equal(model.layer.layers[0].weight_hh, EYE)
    assert close(model.head.weight @ model.head.weight.T, torch.eye(4))
    assert (model.head.bias == 0).all()


def test_the_identity_is_refused_where_the_candidate_is_not_known():
    class TwoGates(BNRNN):
        num_gates = 2

    def build(hidden: str) -> SequenceModel:
        init = partial(init_cooijmans, hidden=hidden)
        return SequenceModel(TwoGates, H, input_size=1, output_size=4, t_max=3, init=init)

    weight = build("orthogonal").layer.layers[0].weight_hh
    assert close(weight.T @ weight, EYE)
    with pytest.raises(BnrnnError, match=r"TwoGates has 2 gates: use model.init.hidden=orthogonal"):
        build("identity")


def test_uniform_initializes_every_parameter_but_no_gamma_or_beta():
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


def test_an_unknown_initialization_is_an_error():
    with pytest.raises(BnrnnError, match=r"init.hidden is 'identify': use 'identity' or 'orthogonal'"):
        initialized("identify")
