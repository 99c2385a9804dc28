"""Captioners, decoding, and scores compared with direct calls of pycocoevalcap."""

import shutil
import signal
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bnrnn import metrics
from bnrnn.data.captions import UNK
from bnrnn.errors import BnrnnError
from bnrnn.inputs import END, START, Captioned
from bnrnn.layers.bn_rhn import BNRHN
from bnrnn.layers.lstm import LSTM
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.population import estimate_population_statistics
from bnrnn.layers.rhn import RHN
from bnrnn.metrics import cross_entropy, score, tokenize
from bnrnn.models import captioner as captioning
from bnrnn.models import decoding
from bnrnn.models.captioner import Captioner, init_captioner
from bnrnn.models.decoding import Decoded, decode
from bnrnn.training import evaluation
from bnrnn.training.evaluation import Evaluator
from bnrnn.training.stop import Interrupted, Stop
from tests.helpers import assert_near, without_shape_checks
from tests.toy_captions import ToyCaptions

MODELS = {"lstm": {"layer": LSTM, "image": "step"}, "rhn": {"layer": RHN}, "bn_rhn": {"layer": BNRHN}}
each_model = pytest.mark.parametrize("name", MODELS)
needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")


def captioner(name: str, data: ToyCaptions, size: int = 12, **options) -> Captioner:
    sizes = {"input_size": data.input_size, "output_size": data.output_size, "t_max": data.t_max}
    init = partial(init_captioner, bound=0.5)
    given = {"hidden_size": size, "embedding_size": size, "feature_size": data.feature_size, "init": init}
    return Captioner(**given | MODELS[name] | sizes | options)


def ready(name: str, data: ToyCaptions) -> Captioner:
    """A model with random weights in float64 and with population statistics."""
    model = captioner(name, data).double()
    estimate_population_statistics(model, [in_double(b.inputs) for b in data.batches("train", 20)])
    return model.eval()


def in_double(inputs: Captioned) -> Captioned:
    return inputs._replace(features=inputs.features.double())


@each_model
@torch.no_grad()
def test_word_after_word_it_is_the_whole_caption(name):
    data = ToyCaptions()
    model = ready(name, data)
    inputs = in_double(next(data.batches("valid", 6)).inputs)
    logits, _ = model(inputs)
    state = model.start(inputs.features)
    for t, words in enumerate(inputs.words):
        scores, state = model.step(words, state, t)
        runs = torch.tensor(inputs.lengths) > t
        assert_near(f"word {t}", logits[t].log_softmax(1)[runs], scores[runs])


@each_model
def test_padding_changes_nothing(name):
    data = ToyCaptions()
    model = captioner(name, data).double()
    batch = next(data.batches("train", 8))
    inputs = in_double(batch.inputs)
    longer = inputs._replace(words=torch.cat([inputs.words, torch.full((3, 8), UNK)]))
    one, other = model(inputs)[0], model(longer)[0]
    for b, n in enumerate(inputs.lengths):
        assert_near(f"caption {b}", one[:n, b], other[:n, b])


def test_counted_padding_affects_only_the_statistics():
    data = ToyCaptions()
    model = captioner("bn_rhn", data, padding="counted").double()
    inputs = in_double(next(data.batches("train", 8)).inputs)
    whole = inputs._replace(lengths=[len(inputs.words)] * 8)
    masked = captioner("bn_rhn", data).double()
    masked.load_state_dict(model.state_dict())
    assert_near("statistics of all", masked(whole)[0], model(inputs)[0])
    assert (masked(inputs)[0] - model(inputs)[0]).norm() > 0.1
    estimate_population_statistics(model, [inputs])
    masked.load_state_dict(model.state_dict())
    one, other = model.eval()(inputs)[0], masked.eval()(inputs)[0]
    for b, n in enumerate(inputs.lengths):
        assert_near(f"caption {b}", other[:n, b], one[:n, b])


def by_hand(model: Captioner, features: torch.Tensor, max_words: int) -> list[Decoded]:
    """Greedy captions, computed image by image."""
    found = []
    for f in features:
        state, word, ids, total = model.start(f[None]), START, [], 0.0
        for t in range(max_words):
            scores, state = model.step(torch.tensor([word]), state, t)
            word = int(scores.argmax())
            total += float(scores[0, word])
            if word == END:
                break
            ids.append(word)
        found.append(Decoded(ids, total))
    return found


@each_model
@torch.no_grad()
def test_a_beam_of_one_is_greedy_and_a_larger_one_never_less_probable(name):
    data = ToyCaptions()
    model, features = ready(name, data), data.features_of("train").double()
    expected, greedy = by_hand(model, features, 7), decode(model, features, 1, 7)
    assert [c.ids for c in greedy] == [c.ids for c in expected]
    assert [c.log_probability for c in greedy] == pytest.approx([c.log_probability for c in expected])
    gained = 0
    for size in (2, 3, 5):
        for beam, alone in zip(decode(model, features, size, 7), greedy, strict=True):
            assert beam.log_probability >= alone.log_probability - 1e-9
            assert END not in beam.ids and len(beam.ids) <= 7
            gained += beam.log_probability > alone.log_probability + 1e-6
    assert gained > 0


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 3, 5])
def test_the_probability_of_a_caption_is_that_of_its_words_and_its_end(size):
    data, max_words = ToyCaptions(), 5
    model, features = captioner("rhn", data).double().eval(), data.features_of("train").double()
    model.head.weight *= 6  # so that two words after a probable one are more probable than a finished caption
    found = decoding._search(model, features, size, max_words)
    assert len({len(caption.ids) for caption in found}) > 1
    for f, caption in zip(features, found, strict=True):
        state, word, total = model.start(f[None]), START, 0.0
        for t, following in enumerate([*caption.ids, END][:max_words]):
            scores, state = model.step(torch.tensor([word]), state, t)
            total, word = total + float(scores[0, following]), following
        assert caption.log_probability == pytest.approx(total)


@torch.no_grad()
def test_a_beam_of_all_finds_the_most_probable_caption_and_a_finished_one_stays_finished():
    """Compared with all captions of up to three words, for a model with four words."""
    data = ToyCaptions()
    model = captioner("rhn", data, input_size=4, output_size=4).double().eval()
    features = data.features_of("test")[:2].double()
    for n, found in enumerate(decode(model, features, 64, 3)):
        best = {}

        def extend(ids, state, total, n=n, best=best):
            if len(ids) == 3:
                best[tuple(ids)] = total
                return
            scores, state = model.step(torch.tensor([ids[-1] if ids else START]), state, len(ids))
            for word in range(4):
                if word == END:
                    best[(*ids, END)] = total + float(scores[0, word])
                else:
                    extend([*ids, word], state, total + float(scores[0, word]))

        extend([], model.start(features[n : n + 1]), 0.0)
        ids = max(best, key=best.__getitem__)
        assert found.ids == [i for i in ids if i != END]
        assert found.log_probability == pytest.approx(best[ids])


@each_model
def test_it_overfits_16_images(name):
    torch.manual_seed(1)
    data = ToyCaptions(20)
    model = captioner(name, data, size=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    words, lengths, targets = first_captions(data)
    firsts = Captioned(data.features_of("train"), words, lengths)
    with without_shape_checks():
        for _ in range(300):
            optimizer.zero_grad()
            loss = cross_entropy(model(firsts)[0], targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    estimate_population_statistics(model, [firsts])
    found = [data.spell(c.ids) for c in decode(model, firsts.features, 1)]
    assert found == [image.captions[0] for image in data.images["train"]]


def first_captions(data: ToyCaptions):
    index = {word: i for i, word in enumerate(data.vocabulary)}
    ids = torch.tensor([[index[w] for w in image.captions[0].split()] for image in data.images["train"]]).T
    B = ids.shape[1]
    words = torch.cat([torch.full((1, B), START), ids])
    return words, [4] * B, torch.cat([ids, torch.full((1, B), END)])


def test_captions_begin_as_the_papers_recipes_say():
    data = ToyCaptions()
    lstm, rhn, bn = (captioner(name, data, init=partial(init_captioner, bound=0.08)) for name in MODELS)
    for model in (lstm, rhn, bn):
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.shape != model.layer.layers[0].bias.shape:
                assert 0.07 < parameter.abs().max() <= 0.08
        assert model.head.bias.count_nonzero() == 0
    assert lstm.layer.layers[0].bias.view(4, -1)[1].unique().tolist() == [1.0]
    assert rhn.layer.layers[0].bias.view(3, 2, -1)[:, 1].unique().tolist() == [-2.0]
    assert bn.layer.layers[0].bias.view(3, 3, -1)[:, 2].unique().tolist() == [2.0]
    assert all((m.gamma == 1).all() for m in bn.modules() if isinstance(m, SequenceBatchNorm))


def test_an_unknown_switch_is_an_error():
    with pytest.raises(BnrnnError, match=r"model.image=word is unknown: use state or step"):
        captioner("lstm", ToyCaptions(), image="word")
    with pytest.raises(BnrnnError, match=r"model.padding=skip is unknown: use masked or counted"):
        captioner("lstm", ToyCaptions(), padding="skip")


CANDIDATES = ["a red dog runs", "the cat's hat isn't here.", "a man riding a wave on top of a surfboard"]
REFERENCES = [
    ["A red dog is running.", "The dog runs in a red field"],
    ["The cat isn't wearing its hat", "Here's a cat's hat!"],
    ["A man rides a wave on a surfboard.", "a surfer on top of a big wave", "Man surfing"],
]
METEOR = 0.4251722509854391  # by pycocoevalcap with its own tokenizer, computed once since METEOR takes long to start


def by_pycocoevalcap() -> dict[str, float]:
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    res = PTBTokenizer().tokenize({n: [{"caption": c}] for n, c in enumerate(CANDIDATES)})
    gts = PTBTokenizer().tokenize({n: [{"caption": c} for c in r] for n, r in enumerate(REFERENCES)})
    bleu = Bleu(4).compute_score(gts, res, verbose=0)[0]
    others = {"rouge_l": Rouge(), "cider": Cider()}
    values = {name: scorer.compute_score(gts, res)[0] for name, scorer in others.items()}
    return {f"bleu{n}": b for n, b in enumerate(bleu, 1)} | values


@needs_java
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pycocoevalcap leaves pipes open
def test_scores_are_those_of_pycocoevalcap(monkeypatch):
    expected = by_pycocoevalcap()
    assert score(CANDIDATES, REFERENCES) == pytest.approx(expected | {"meteor": METEOR}, abs=1e-6)
    monkeypatch.setattr(metrics, "has_java", lambda: False)
    assert score(CANDIDATES, REFERENCES) == pytest.approx(expected, abs=1e-6), "without Java all but METEOR is there"


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A dog's ball isn't red, is it?", "a dog 's ball is n't red is it"),
        ("Two t-shirts (blue/white) & a hat...", "two t-shirts blue/white & a hat"),
        ("They're on a \"boat\"; we've seen", "they 're on a boat we 've seen"),
    ],
)
def test_words_of_a_caption(caption, words):
    assert tokenize(caption) == words


def test_the_test_images_are_captioned_greedily_and_by_a_beam_of_three(monkeypatch):
    data, asked, scored = ToyCaptions(), [], []

    def decode_as_number(model, features, beam_size):
        assert not model.training
        asked.append((beam_size, features.tolist()))
        return [Decoded([3 + beam_size], 0.0)] * len(features)

    def number_of_call(found, references):
        scored.append((found, references))
        return {"call": float(len(scored))}

    monkeypatch.setattr(captioning, "decode", decode_as_number)
    monkeypatch.setattr(evaluation, "score", number_of_call)
    run = SimpleNamespace(data=data, model=captioner("lstm", data), device=torch.device("cpu"))
    run.cfg, run._precision, run._measuring = SimpleNamespace(seed=0), nullcontext, lambda: Evaluator._measuring(run)
    run.log, run.stop = SimpleNamespace(track=lambda parts, total, what: parts), Stop()
    monkeypatch.setattr(evaluation, "IMAGES", 3)
    assert Evaluator.evaluate_generated(run) == {"test/call": 1.0, "test/call_beam3": 2.0}
    images, features = data.images["test"], data.features_of("test").tolist()
    assert asked == [(size, features[n : n + 3]) for n in range(0, len(features), 3) for size in (1, 3)]
    words, references = [data.vocabulary[3 + size] for size in (1, 3)], [image.captions for image in images]
    assert scored == [([word] * len(images), references) for word in words]
    run.stop.received = signal.SIGTERM
    with pytest.raises(Interrupted):  # it does not wait for the other images
        Evaluator.evaluate_generated(run)
