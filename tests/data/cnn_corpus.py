"""Question files in the format of Hermann et al. 2015, with our own text."""

import random
from pathlib import Path

STORIES = [
    ("@entity1 ( @entity0 ) -- The mayor of @entity2 , @entity5 , opened a new bridge on Monday . It cost 3,500 . "
     "`` It will last for 100 years , '' said @entity5 . Nobody in @entity7 believed him ! Few people came .",
     "the mayor , @placeholder , opened the bridge", "@entity5",
     ["@entity0:CNN", "@entity1:Oldtown", "@entity2:Oldtown City", "@entity5:Ed Smith", "@entity7:West Side"]),
    ("@entity3 won the match . Rain fell on @entity10 all day . The crowd of @entity3 sang . It was late . @entity10 "
     "lost its keeper before the match ? Yes .",
     "crowd of @placeholder sang after the match", "@entity3", ["@entity3:Reds", "@entity10:Blues"]),
]  # fmt: skip


def spell(passage: str, question: str, answer: str, entities: list[str], url: str = "http://news.example/1") -> str:
    return f"{url}\n\n{passage}\n\n{question}\n\n{answer}\n\n" + "\n".join(entities) + "\n"


def make(folder: Path, sizes: dict[str, int], seed: int = 0, length: int = 0) -> Path:
    """A corpus with the given numbers of files in training, validation and test: stories with some random words."""
    rng = random.Random(seed)
    words = [f"word{n}" for n in range(2000)]
    for split, size in sizes.items():
        path = folder / "questions" / split
        path.mkdir(parents=True)
        for n in range(size):
            passage, *rest = STORIES[n % len(STORIES)]
            drawn = " ".join(rng.choices(words, k=length or rng.randint(0, 30)))
            (path / f"{rng.getrandbits(160):040x}.question").write_text(spell(f"{passage} {drawn} .", *rest))
    return folder
