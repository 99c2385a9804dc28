"""The reader compared with its equations for single questions, and independence of padding."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bnrnn.errors import BnrnnError
from bnrnn.inputs import Question
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.lstm import LSTM
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.population import batch_statistics, estimate_population_statistics
from bnrnn.metrics import cross_entropy
from bnrnn.models.attentive_reader import AttentiveReader, init_reader
from tests.helpers import assert_near
from tests.toy_cloze import ToyCloze

H, V, T = 5, 17, 9
SEQUENCE = partial(BNLSTM, input_statistics="sequence", input_eps=1e-6)
VARIANTS = {
    "lstm": {"layer": LSTM},
    "bn_lstm": {"layer": BNLSTM},
    "bn_everywhere": {"layer": BNLSTM, "gamma_init": 0.1},
    "bn_e_star": {"layer": SEQUENCE, "gamma_init": 0.1},
    "bn_e_star_star": {"layer": SEQUENCE, "gamma_init": 0.1, "bidirectional": True},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def reader(variant: str, **options) -> AttentiveReader:
    """A small reader with random weights in float64, without dropout."""
    given = {"hidden_size": H, "input_size": V, "output_size": V, "t_max": T, "dropout": 0.0}
    model = AttentiveReader(**given | VARIANTS[variant] | options).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("gamma"):
                parameter.normal_(0, 0.5)
    return model


def question(lengths=(7, 3, 9, 5, 6), asked=(2, 4, 3, 4, 1), T=9, S=4) -> Question:
    passage, words = torch.randint(1, V, (T, len(lengths))), torch.randint(1, V, (S, len(lengths)))
    for b, (n, m) in enumerate(zip(lengths, asked, strict=True)):
        passage[n:, b], words[m:, b] = 0, 0
    return Question(passage, list(lengths), words, list(asked), passage[:1])


def gradients(model: nn.Module, inputs: Question, rows: slice) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits, _ = model(inputs)
    logits[:, rows].square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_hand(model: AttentiveReader, passage: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The logits (V,) of one unpadded question, computed from the equations with torch's encoders."""

    def read(encoder, ids, initial):
        x, ys, last = model.embedding.weight[ids], [], []
        for d, stack in enumerate(encoder):
            theirs, ours = nn.LSTM(H, H).double(), stack.layers[0]
            state = {"weight_ih_l0": ours.weight_ih, "weight_hh_l0": ours.weight_hh, "bias_ih_l0": ours.bias}
            theirs.load_state_dict(state | {"bias_hh_l0": torch.zeros(4 * H)})
            y, (h, _) = theirs(x.flip(0) if d else x, (initial[d][None], torch.zeros(1, H).double()))
            ys.append(y.flip(0) if d else y)
            last.append(h[0])
        return torch.cat(ys, 1), torch.cat(last)

    d, _ = read(model.passage_encoder, passage, model.initial_h[0])
    _, q = read(model.question_encoder, words, model.initial_h[1])
    scores = []
    for d_t in d:
        a = model.attend_passage.weight @ d_t + model.attend_passage.bias + model.attend_question.weight @ q
        s = (model.bilinear.weight @ d_t) @ (model.bilinear.weight @ q)
        scores.append(model.score.weight[0] @ (a + s).tanh())
    r = sum(w * d_t for w, d_t in zip(torch.stack(scores).softmax(0), d, strict=True))
    g = model.read_context.weight @ r + model.read_question.weight @ q + model.read_question.bias
    g = g + model.read_mean.weight @ d.mean(0)
    return model.head.weight @ g.tanh() + model.head.bias


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("padding", ["masked", "zeros", "wrap"])
def test_without_norm_it_is_the_equations_question_by_question(bidirectional, padding):
    model, inputs = reader("lstm", bidirectional=bidirectional, padding=padding), question()
    logits, state = model(inputs)
    assert logits.shape == (1, 5, V) and state == ()
    for b, (n, m) in enumerate(zip(inputs.passage_lengths, inputs.question_lengths, strict=True)):
        assert_near(f"question {b}", by_hand(model, inputs.passage[:n, b], inputs.question[:m, b]), logits[0, b])


def test_normalized_products_have_the_statistics_of_what_was_read():
    model, inputs, seen = reader("bn_everywhere"), question(), {}
    for name in ("attend_passage", "attend_question", "read_context", "read_question", "read_mean"):
        keep = lambda module, given, y, name=name: seen.update({name: (module, *given, y)})  # noqa: E731
        getattr(model, name).register_forward_hook(keep)
    model(inputs)
    assert {name: len(y) for name, (*_, y) in seen.items()} == {
        "attend_passage": sum(inputs.passage_lengths),
        **dict.fromkeys(("attend_question", "read_context", "read_question", "read_mean"), 5),
    }
    for name, (module, x, y) in seen.items():
        theirs = nn.BatchNorm1d(H).double()
        with torch.no_grad():
            theirs.weight.copy_(module.bn.gamma)
            theirs.bias.copy_(torch.zeros(H) if module.bias is None else module.bias)
        assert_near(name, theirs(x @ module.weight.T), y)


@each_variant
def test_padded_steps_and_padded_questions_change_nothing(variant):
    model, inputs = reader(variant), question()
    logits, expected = model(inputs)[0], gradients(model, inputs, slice(5))
    padded = Question(
        F.pad(inputs.passage, (0, 2, 0, 4)),
        [*inputs.passage_lengths, 0, 0],
        F.pad(inputs.question, (0, 2, 0, 3)),
        [*inputs.question_lengths, 0, 0],
        F.pad(inputs.candidates, (0, 2)),
    )
    padded.passage[9:, :5], padded.question[4:, 2] = 3, 7  # words after the end
    found = model(padded)[0]
    assert_near("logits", logits, found[:, :5])
    assert found[:, 5:].count_nonzero() == 0
    grads = gradients(model, padded, slice(7))
    assert expected.keys() == grads.keys() and len(grads) > 14
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() < 1e-9 * max(grad.norm(), 1), name
    statistics = []
    for batch in (inputs, padded):
        estimate_population_statistics(model, [batch])
        statistics.append([(m.pop_mean.clone(), m.pop_var.clone()) for m in norms(model)])
    for one, other in zip(*statistics, strict=True):
        torch.testing.assert_close(one, other)


def norms(model):
    return [m for m in model.modules() if isinstance(m, SequenceBatchNorm)]


@pytest.mark.parametrize("padding", ["zeros", "wrap"])
def test_where_padding_counts_it_changes_the_statistics(padding):
    model, inputs = reader("bn_e_star", padding=padding), question()
    masked = reader("bn_e_star")
    masked.load_state_dict(model.state_dict())
    ours, exact = model(inputs)[0], masked(inputs)[0]
    assert (ours - exact).abs().max() > 1e-3
    full = question(lengths=(9,) * 5, asked=(4,) * 5)
    assert_near("without padding", masked(full)[0], model(full)[0])


def test_a_wrapped_passage_is_the_passage_read_again():
    model, inputs = reader("bn_lstm", padding="wrap"), question(lengths=(3, 9, 9), asked=(4, 4, 4))
    again = inputs.passage.clone()
    again[:, 0] = inputs.passage[:3, 0].repeat(3)
    longer = inputs._replace(passage=again)
    assert_near("logits", model(longer)[0], model(inputs)[0])
    other = inputs._replace(passage=again, passage_lengths=[9, 9, 9])
    assert_near("states of the others", model(other)[0][:, 1:], model(inputs)[0][:, 1:])


@each_variant
def test_attention_is_a_distribution_over_what_was_read(variant):
    model, inputs = reader(variant), question()
    weights = model.attention(inputs)
    assert_near("sum", torch.ones(5).double(), weights.sum(0))
    for b, n in enumerate(inputs.passage_lengths):
        assert weights[:n, b].min() > 0 and weights[n:, b].count_nonzero() == 0


@each_variant
def test_other_names_of_the_words_give_the_answer_its_other_name(variant):
    model, inputs = reader(variant), question()
    logits = model(inputs)[0]
    names = torch.randperm(V)
    with torch.no_grad():
        for rows in (model.embedding.weight, model.head.weight, model.head.bias):
            rows[names] = rows.clone()
    renamed = inputs._replace(passage=names[inputs.passage], question=names[inputs.question])
    assert_near("logits", logits, model(renamed)[0][..., names])


@each_variant
@torch.no_grad()
def test_evaluation_does_not_depend_on_batches_or_their_order(variant):
    model, inputs = reader(variant), question()
    estimate_population_statistics(model, [inputs, question(lengths=(9, 8, 7), asked=(4, 4, 4))])
    model.eval()
    logits = model(inputs)[0]
    for rows in ([4, 2, 0, 3, 1], [1], [3, 0]):
        chosen = Question(
            inputs.passage[:, rows],
            [inputs.passage_lengths[b] for b in rows],
            inputs.question[:, rows],
            [inputs.question_lengths[b] for b in rows],
            inputs.candidates[:, rows],
        )
        assert_near(f"rows {rows}", logits[:, rows], model(chosen)[0])


def test_population_statistics_are_the_batchs_where_it_is_the_whole_set():
    for variant in ("bn_everywhere", "bn_e_star", "bn_e_star_star"):
        model, inputs = reader(variant), question(lengths=(9, 9, 9, 9, 9), asked=(4,) * 5)
        estimate_population_statistics(model, [inputs])
        model.eval()
        with batch_statistics(model):
            expected = model(inputs)[0]
        assert_near(variant, expected, model(inputs)[0])


def test_a_readout_over_the_passage_answers_with_one_of_its_candidates():
    model, inputs = reader("lstm", readout="passage"), question()
    candidates = torch.tensor([[3, 5, 7, 9, 11], [4, 5, 8, 9, 12]])
    logits = model(inputs._replace(candidates=candidates))[0][0]
    everywhere = reader("lstm")
    everywhere.load_state_dict(model.state_dict())
    for b, row in enumerate(logits):
        allowed = candidates[:, b].unique()
        assert (row > -torch.inf).nonzero()[:, 0].tolist() == allowed.tolist()
        assert_near("kept logits", everywhere(inputs)[0][0, b, allowed], row[allowed])


def test_an_unknown_switch_is_an_error():
    with pytest.raises(BnrnnError, match=r"model.padding=ones is unknown: use masked, zeros, wrap"):
        reader("lstm", padding="ones")
    with pytest.raises(BnrnnError, match=r"model.readout=all is unknown: use vocabulary, passage"):
        reader("lstm", readout="all")


@pytest.mark.parametrize("equal_draws", [True, False])
def test_initial_matrices_are_small_and_equal_or_drawn_independently(equal_draws):
    model = AttentiveReader(BNLSTM, 8, V, V, T, partial(init_reader, scale=0.05, equal_draws=equal_draws))
    blocks = [b for encoder in (model.passage_encoder, model.question_encoder) for name in ("weight_ih", "weight_hh")
              for b in getattr(encoder[0].layers[0], name).chunk(4)]  # fmt: skip
    blocks += [model.attend_passage.weight, model.bilinear.weight]
    for block in blocks:
        assert_near("scaled orthogonal", 0.05**2 * torch.eye(8), block @ block.T)
    assert all(torch.equal(blocks[0], b) for b in blocks[1:]) == equal_draws
    assert torch.equal(model.embedding.weight, model.head.weight) == equal_draws
    assert 0.9 < model.head.weight.abs().max().item() / (6 / (8 + V + 1)) ** 0.5 <= 1
    assert all(p.count_nonzero() == 0 for name, p in model.named_parameters() if "bias" in name or "initial" in name)
    assert all((m.gamma == 0.1).all() for m in norms(model))


@pytest.mark.parametrize("padding", ["masked", "wrap"])
@each_variant
def test_it_overfits_32_questions(variant, padding):
    data = ToyCloze(32)
    given = {"hidden_size": 24, "input_size": data.input_size, "output_size": data.output_size, "t_max": data.t_max}
    model = AttentiveReader(**given | VARIANTS[variant], padding=padding, dropout=0.0,
                            init=partial(init_reader, scale=1.0, equal_draws=False))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    batch = next(data.batches("train", 32))
    for _ in range(150):
        optimizer.zero_grad()
        logits, _ = model(batch.inputs)
        cross_entropy(logits, batch.targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if (logits.argmax(-1) == batch.targets).all():
            break
    assert torch.equal(logits.argmax(-1), batch.targets)


@pytest.mark.parametrize("padding", ["masked", "zeros", "wrap"])
@pytest.mark.parametrize("lengths", [(7, 3, 9), (7, 0, 9)])
def test_a_batch_is_read_without_looking_at_a_value(monkeypatch, padding, lengths):
    """On a GPU, the program would wait until all earlier work is done. Tensors on "meta" have no values."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # cannot be asked about this device
    given = question(lengths, asked=(2, 4, 3))
    model = reader("bn_lstm", padding=padding).to("meta")
    on_meta = Question(given.passage.to("meta"), list(lengths), given.question.to("meta"), [2, 4, 3],
                       given.candidates.to("meta"))  # fmt: skip
    logits, _ = model(on_meta)
    logits.sum().backward()
    assert logits.shape == (1, 3, V)
