"""Generated questions, the same on every machine: people are at places; a question asks where one of them is."""

import random

from bnrnn.data.cloze import SPECIAL, Cloze, Text, encode

PLACES, VERBS = [f"@entity{n}" for n in range(12)], ["is", "sat", "slept", "waited"]
NAMES = ["ann", "bob", "cid", "dora", "eve"]


def text(rng: random.Random) -> Text:
    names, places = rng.sample(NAMES, rng.randint(2, 4)), rng.sample(PLACES, 4)
    passage = [
        w for name, place in zip(names, places, strict=False) for w in (name, rng.choice(VERBS), "at", place, ".")
    ]
    n = rng.randrange(len(names))
    return Text(passage, ["where", "is", names[n], *["now"] * rng.randint(0, 2)], places[n])


class ToyCloze(Cloze):
    def __init__(self, num_questions: int = 50, permute_entities: bool = False, state_noise: float = 0.0) -> None:
        rng = random.Random(0)
        vocabulary = [*SPECIAL, *PLACES, *sorted({*NAMES, *VERBS, "at", ".", "where", "now"})]
        splits = {
            split: encode([text(rng) for _ in range(size)], vocabulary)
            for split, size in (("train", num_questions), ("valid", 10), ("test", 10))
        }
        entities = range(len(SPECIAL), len(SPECIAL) + len(PLACES))
        super().__init__(splits, vocabulary, entities, permute_entities, "toy questions")
