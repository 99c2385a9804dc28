"""Captions from a trained captioner, greedy or by beam search, and the scores that Zhang et al. 2017 report.

Scores are those of pycocoevalcap, the evaluation of COCO captions; it comes with the extra `captions`.
"""

import re
import shutil
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bnrnn.data.captions import END, START

MAX_WORDS = 20
SCORES = ("bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider", "meteor")
TOKEN = re.compile(r"n't\b|'(?:s|re|ve|ll|d|m)\b|\w+?(?=n't\b)|\w+(?:[-/&]\w+)*(?:\.\w+)*|[^\w\s]")
SIGNS = "&$%#+=*@/~<>"  # that count as words


class Decoded(NamedTuple):
    """Ids of a caption without its end, and its log-probability with it."""

    ids: list[int]
    log_probability: float


@torch.no_grad()
def decode(model: Any, features: Float[Tensor, "N F"], beam_size: int = 1, max_words: int = MAX_WORDS) -> list[Decoded]:
    """The most probable caption that a bnrnn.captioner.Captioner gives each image.

    One that has not ended after `max_words` is cut. A beam of 1 is greedy; a larger one returns the greedy caption
    where it has found nothing more probable.
    """
    model.eval()
    found = _search(model, features, beam_size, max_words)
    if beam_size > 1:
        greedy = _search(model, features, 1, max_words)
        found = [max(pair, key=lambda caption: caption.log_probability) for pair in zip(found, greedy, strict=True)]
    return found


def _search(model: Any, features: Float[Tensor, "N F"], k: int, max_words: int) -> list[Decoded]:
    N, V = len(features), model.head.out_features
    state = tuple(s.repeat_interleave(k, 1) for s in model.start(features))  # (L, N k, H) each
    total = features.new_full((N, k), -torch.inf)
    total[:, 0] = 0.0  # all beams begin equal: count them once
    words = torch.full((N, k), START, device=features.device)
    ended = torch.zeros(N, k, dtype=torch.bool, device=features.device)
    history = words.new_empty(N, k, 0)
    for t in range(max_words):
        scores, state = model.step(words.flatten(), state, t)
        scores = scores.view(N, k, V)
        only_end = torch.full_like(scores[0, 0], -torch.inf)
        only_end[END] = 0.0
        scores = torch.where(ended[..., None], only_end, scores)
        total, place = (total[..., None] + scores).flatten(1).topk(k)  # (N, k)
        parent, words = place // V, place % V
        rows = (parent + k * torch.arange(N, device=parent.device)[:, None]).flatten()
        state = tuple(s.index_select(1, rows) for s in state)
        history = torch.cat([history.gather(1, parent[..., None].expand_as(history)), words[..., None]], 2)
        ended = ended.gather(1, parent) | (words == END)
        if ended.all():
            break
    best = total.argmax(1).tolist()
    captions = [history[n, b].tolist() for n, b in enumerate(best)]
    return [
        Decoded(ids[: ids.index(END)] if END in ids else ids, float(total[n, b]))
        for n, (ids, b) in enumerate(zip(captions, best, strict=True))
    ]


def has_java() -> bool:
    """Whether METEOR, and the tokenizer that pycocoevalcap uses, can run: both are Java programs."""
    return shutil.which("java") is not None


def score(candidates: list[str], references: list[list[str]]) -> dict[str, float]:
    """BLEU-1 to 4, ROUGE-L, CIDEr, and METEOR if there is Java, of one caption an image against its references.

    Without Java captions are cut into words by `tokenize`, which differs from pycocoevalcap's tokenizer in one of some
    600 captions.
    """
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.rouge.rouge import Rouge

    given, expected = _tokenized([[c] for c in candidates]), _tokenized(references)
    bleu, _ = Bleu(4).compute_score(expected, given, verbose=0)
    values = {f"bleu{n}": float(b) for n, b in enumerate(bleu, 1)}
    values |= {"rouge_l": float(Rouge().compute_score(expected, given)[0])}
    values |= {"cider": float(Cider().compute_score(expected, given)[0])}
    if has_java():
        meteor = Meteor()
        values |= {"meteor": float(meteor.compute_score(expected, given)[0])}
        meteor.meteor_p.communicate()  # ends the program and closes its pipes
    return values


def _tokenized(captions: list[list[str]]) -> dict[int, list[str]]:
    if not has_java():
        return {n: [tokenize(caption) for caption in of_image] for n, of_image in enumerate(captions)}
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    given: dict[int, Any] = {n: [{"caption": c} for c in of_image] for n, of_image in enumerate(captions)}
    return PTBTokenizer().tokenize(given)


def tokenize(caption: str) -> str:
    """Lower-case words with blanks between, contractions apart, without punctuation, as the Penn Treebank's."""
    return " ".join(w for w in TOKEN.findall(caption.lower()) if any(c.isalnum() for c in w) or w in SIGNS)
