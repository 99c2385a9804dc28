"""A word language model that is evaluated after every epoch: running statistics need no pass to estimate them.

    python examples/word_model.py [--norm batch|layer|torch] [--epochs 3] [--words N]

Programs such as PyTorch's word_language_model read a text in parallel streams, carry the state from window to window,
and call `model.eval()` after every epoch. They have no place for an estimate of population statistics. With
`statistics="running"` they need none: only the line that builds the layer changes. Layer norm never needs statistics.

The text is the language reference that Python carries for its own `help()`, so nothing is downloaded. Prints the
perplexity on the last twentieth of the text after each epoch, and the median time of an update. A minute on one core.
"""

import math
import re
import statistics
import time
from argparse import ArgumentParser
from functools import partial
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bnrnn

T, STREAMS, SIZE, NUM_LAYERS = 35, 20, 200, 2  # steps of a window, parallel streams, units, layers
LAYERS = {
    "batch": partial(bnrnn.LSTM, norm="batch", t_max=T, statistics="running"),
    "layer": partial(bnrnn.LSTM, norm="layer"),
    "torch": nn.LSTM,
}


class WordModel(nn.Module):
    """Logits (T, B, V) of the next word for ids (T, B), and the state after the last."""

    def __init__(self, vocabulary_size: int, norm: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, SIZE)
        self.lstm = LAYERS[norm](SIZE, SIZE, NUM_LAYERS, dropout=0.2)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(SIZE, vocabulary_size)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor] | None):
        y, state = self.lstm(self.dropout(self.embedding(ids)), state)
        return self.head(self.dropout(y)), state


def streams(words: list[str], vocabulary: dict[str, int]) -> Tensor:
    """The ids of the words in parallel streams (N, STREAMS)."""
    ids = torch.tensor([vocabulary.get(word, 0) for word in words])
    length = len(ids) // STREAMS
    return ids[: length * STREAMS].view(STREAMS, length).T.contiguous()


def losses(model: WordModel, text: Tensor):
    """Yield the loss of each window of a text, in order. The state is carried over, its gradient is not."""
    state = None
    for t in range(0, len(text) - T, T):
        logits, (h, c) = model(text[t : t + T], state)
        state = (h.detach(), c.detach())
        yield F.cross_entropy(logits.flatten(0, 1), text[t + 1 : t + T + 1].flatten())


def main() -> None:
    parser = ArgumentParser(description="A word language model")
    parser.add_argument("--norm", choices=LAYERS, default="batch", help="torch is torch.nn.LSTM")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--words", type=int, help="use only the beginning of the text")
    args = parser.parse_args()
    torch.manual_seed(0)
    bnrnn.keep_heap()

    words = re.findall(r"\w+|[^\w\s]", " ".join(topics[name] for name in sorted(topics)).lower())[: args.words]
    split = len(words) * 19 // 20
    vocabulary = {word: n for n, word in enumerate(["<unknown>", *dict.fromkeys(words[:split])])}
    train, valid = streams(words[:split], vocabulary), streams(words[split:], vocabulary)
    print(f"{len(words):,} words, {len(vocabulary):,} types")
    model = WordModel(len(vocabulary), args.norm)
    optimizer, seconds = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for epoch in range(1, args.epochs + 1):
        model.train()
        begun = time.perf_counter()
        for loss in losses(model, train):
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
        model.eval()  # nothing else: the running statistics are ready
        with torch.no_grad():
            cost = [loss.item() for loss in losses(model, valid)]
        print(f"perplexity after epoch {epoch}: {math.exp(statistics.mean(cost)):.1f}")
    print(f"milliseconds per update: {1000 * statistics.median(seconds):.1f}")


if __name__ == "__main__":
    main()
