"""Decoding: captions from a trained captioner, by greedy or beam search."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bnrnn.inputs import END, START

MAX_WORDS = 20
BEAM_SIZE = 3  # as in im2txt, the code of Vinyals et al.


class Decoded(NamedTuple):
    """The ids of a caption without END, and the log-probability of the caption with END."""

    ids: list[int]
    log_probability: float


@torch.no_grad()
def decode(model: Any, features: Float[Tensor, "N F"], beam_size: int = 1, max_words: int = MAX_WORDS) -> list[Decoded]:
    """The most probable caption that the search finds for each image. The model is left in evaluation mode.

    Args:
        model: a bnrnn.models.captioner.Captioner.
        beam_size: 1 is greedy search. A larger beam also runs greedy search, and returns its caption if that is more
            probable.
        max_words: unfinished captions are cut after so many words.
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
    total[:, 0] = 0.0  # all beams are equal at the start, so only one of them may be extended
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
