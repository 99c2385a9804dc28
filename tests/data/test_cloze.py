"""Batches of questions: each question occurs once, lengths in a batch are similar, and entities are permuted."""

import numpy as np
import pytest
import torch

from bnrnn.data.base import POOL, SequenceData, by_length
from bnrnn.data.cloze import NIL, Cloze, Text, encode, most_relevant, sentences, tokens
from bnrnn.errors import BnrnnError
from tests.toy_cloze import ToyCloze


def spelled(data: Cloze, batch, names=None) -> list[tuple]:
    """The questions of a batch as words."""
    x = batch.inputs
    word = (lambda i: data.vocabulary[i]) if names is None else (lambda i: names[data.vocabulary[i]])
    return [
        (
            tuple(word(i) for i in x.passage[:n, b].tolist()),
            tuple(word(i) for i in x.question[:m, b].tolist()),
            word(batch.targets[0, b].item()),
        )
        for b, (n, m) in enumerate(zip(x.passage_lengths, x.question_lengths, strict=True))
    ]


def originals(data: Cloze, split: str) -> list[tuple]:
    rows = data.splits[split].with_format(None)
    names = data.vocabulary
    return [
        (tuple(names[i] for i in row["passage"]), tuple(names[i] for i in row["question"]), names[row["answer"]])
        for row in rows
    ]


@pytest.mark.parametrize("batch_size", [7, 10, 49, 50, 64])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_pass_has_every_question_once_in_batches_of_nearly_one_size(batch_size, seed):
    data = ToyCloze(50)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    batches = list(data.batches("train", batch_size, generator))
    assert len(batches) == data.num_batches("train", batch_size)
    sizes = [len(b.inputs.passage_lengths) for b in batches]
    assert sum(sizes) == 50 and max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1
    assert sorted(q for b in batches for q in spelled(data, b)) == sorted(originals(data, "train"))
    for batch in batches:
        x = batch.inputs
        assert x.passage.shape[0] == max(x.passage_lengths) <= data.t_max
        for ids, lengths in ((x.passage, x.passage_lengths), (x.question, x.question_lengths)):
            ended = torch.arange(len(ids))[:, None] >= torch.tensor(lengths)
            assert (ids[ended] == NIL).all() and (ids[~ended] != NIL).all()


@pytest.mark.parametrize("seed", [None, 0])
def test_the_longest_sequences_of_a_pool_come_first(seed):
    lengths = np.random.default_rng(0).integers(1, 90, 2 * 4 * POOL)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    batches = by_length(lengths, 4, generator)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    assert all((np.diff(lengths[batch]) <= 0).all() for batch in batches)
    if generator is None:  # then the batches keep their order, too
        pools = (lengths[np.concatenate(batches[n : n + POOL])] for n in (0, POOL))
        assert all((np.diff(pool) <= 0).all() for pool in pools)


def test_similar_lengths_are_together_and_orders_differ_by_seed():
    data = ToyCloze(200)
    orders = []
    for seed in (0, 0, 1):
        batches = list(data.batches("train", 8, torch.Generator().manual_seed(seed)))
        orders.append([b.inputs.passage_lengths for b in batches])
    assert orders[0] == orders[1] != orders[2]
    spread = np.mean([max(lengths) - min(lengths) for lengths in orders[0]])
    assert spread < 2 < np.ptp([n for lengths in orders[0] for n in lengths])
    longest = [lengths[0] for lengths in orders[0]]
    assert longest != sorted(longest, reverse=True), "a pass must not go from long to short"


@pytest.mark.parametrize("seed", [None, 3])
def test_a_pass_can_start_at_any_batch(seed):
    data = ToyCloze(50, permute_entities=True)

    def batches(start: int):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return list(data.batches("train", 8, generator, start))

    for one, other in zip(batches(0)[3:], batches(3), strict=True):
        assert torch.equal(one.targets, other.targets) and torch.equal(one.inputs.passage, other.inputs.passage)


def test_entities_have_other_names_in_every_training_batch_and_the_answer_has_the_same():
    data = ToyCloze(50, permute_entities=True)
    whole = {q for q in originals(data, "train")}
    drawn = []
    for batch in data.batches("train", 10, torch.Generator().manual_seed(0)):
        entities = [w for w in data.vocabulary if w.startswith("@entity")]
        found = {}
        for n, (passage, *_) in enumerate(
            spelled(data, batch)
        ):  # a permutation of entities keeps the structure of a passage
            shape = [w for w in passage if w not in entities]
            found[n] = [q for q in whole if [w for w in q[0] if w not in entities] == shape]
        names = {}
        for n, question in enumerate(spelled(data, batch)):
            if len(found[n]) == 1:
                [(passage, _, answer)] = found[n]
                pairs = [*zip(question[0], passage, strict=True), (question[2], answer)]
                for new, old in pairs:
                    assert names.setdefault(new, old) == old, "one name for two entities of a batch"
        renamed = {new: old for new, old in names.items() if new in entities}
        assert len(set(renamed.values())) == len(renamed) > 3
        assert all(new == old for new, old in names.items() if new not in entities)
        drawn.append(renamed)
    assert drawn[0] != drawn[1]
    kept = [q for b in data.batches("valid", 10) for q in spelled(data, b)]
    assert sorted(kept) == sorted(originals(data, "valid")), "evaluation keeps the names"


def test_candidates_are_the_entities_of_the_passage():
    data = ToyCloze(50)
    for batch in data.batches("train", 16):
        for b, (passage, _, answer) in enumerate(spelled(data, batch)):
            candidates = {data.vocabulary[i] for i in batch.inputs.candidates[:, b].tolist()}
            assert candidates == {w for w in passage if w.startswith("@entity")} and answer in candidates


def test_without_an_entity_in_the_passage_all_of_them_may_be_the_answer():
    text = [Text(["no", "names"], ["who", "?"], "yes")] * 3
    vocabulary = ["<nil>", "<eos>", "<unk>", "<num>", "no", "yes", "names", "who", "?"]
    data = Cloze({s: encode(text, vocabulary) for s in ("train", "valid", "test")}, vocabulary, range(4, 6), False, "")
    assert next(data.batches("train", 3)).inputs.candidates.T.tolist() == [[4]] * 3
    empty = Cloze({s: encode(text, vocabulary) for s in ("train", "valid", "test")}, vocabulary, range(7, 9), False, "")
    assert next(empty.batches("train", 3)).inputs.candidates.T.tolist() == [[7, 8]] * 3


def test_unknown_words_and_numbers_have_ids_of_their_own():
    vocabulary = ["<nil>", "<eos>", "<unk>", "<num>", "a", "b2"]
    split = encode([Text(["a", "b2", "c", "12", "3.5", "1,000"], ["a"], "c")], vocabulary)
    assert split[:] == {"passage": [[4, 5, 2, 3, 3, 3]], "question": [[4]], "answer": [2]}


def test_it_is_a_dataset_and_needs_two_questions():
    assert isinstance(ToyCloze(), SequenceData)
    with pytest.raises(BnrnnError, match="train has 1 questions, expected at least 2"):
        ToyCloze(1)


def test_sentences_end_behind_their_marks():
    words = tokens("He said \"Go!\" (twice). Mr Hall left... Why? It's 3.5 @entity4's")
    assert [" ".join(s) for s in sentences(words)] == [
        'he said " go ! "', "( twice ) .", "mr hall left . . .", "why ?", "it's 3.5 @entity4 ' s",
    ]  # fmt: skip
    assert sentences([]) == [] and sentences(["."]) == [["."]]


def test_the_sentences_kept_share_most_words_with_the_question():
    passage = tokens("The cat sat. A dog ran off. The cat and the dog ate fish. It rained. Fish swim.")
    kept = most_relevant(passage, tokens("Which @placeholder did the cat and dog eat, a fish?"), 2)
    assert [" ".join(s) for s, keep in kept if keep] == ["the cat sat .", "the cat and the dog ate fish ."]
    assert [word for s, _ in kept for word in s] == passage


def test_words_that_stand_in_every_question_do_not_make_a_sentence_relevant():
    passage = tokens("It was that to which you would have said what. A dog barked.")
    question = tokens("To whom was it that the dog would have said what?")
    assert [" ".join(s) for s, keep in most_relevant(passage, question, 1) if keep] == ["a dog barked ."]
