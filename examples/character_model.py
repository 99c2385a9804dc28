"""A character language model: `bnrnn.LSTM` between an embedding and a linear readout, trained and then sampled from.

    python examples/character_model.py [--updates 300]

The text is the language reference that Python carries for its own `help()`, so nothing is downloaded. Batch statistics
normalize in training; after it, one pass over training windows estimates the population statistics that evaluation
uses. Sampling feeds one character at a time and passes the state on.

Prints bits per character on the last twentieth of the text, before and after training, and 300 sampled characters.
Guessing each character by its frequency alone costs about 4.7 bits. Half a minute on one core.
"""

import math
from argparse import ArgumentParser
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bnrnn

T, BATCH_SIZE = 64, 32  # characters of a window, windows of a batch


class CharacterModel(nn.Module):
    """Logits (T, B, V) of the next character for ids (T, B), and the state after the last."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, 32)
        self.lstm = bnrnn.LSTM(32, 100, norm="batch", t_max=T)
        self.head = nn.Linear(100, vocabulary_size)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor] | None = None, t_start: int = 0):
        y, state = self.lstm(self.embedding(ids), state, t_start)
        return self.head(y), state


def windows(text: Tensor) -> Tensor:
    """The text in windows (T + 1, N), of which each begins with the last character of the one before."""
    return text.unfold(0, T + 1, T).T


@torch.no_grad()
def bits_per_character(model: CharacterModel, train: Tensor, valid: Tensor) -> float:
    """Cost of every character of `valid` but the first of each window, with population statistics of `train`."""
    bnrnn.estimate_population_statistics(model, [train[:-1, :320]])  # large batches; a part of the text is enough
    model.eval()
    logits, _ = model(valid[:-1])
    model.train()
    return F.cross_entropy(logits.flatten(0, 1), valid[1:].flatten()).item() / math.log(2)


@torch.no_grad()
def sample(model: CharacterModel, first: int, count: int) -> list[int]:
    """`count` characters, drawn one by one. t_start, the number of steps before, selects the population statistics."""
    model.eval()
    ids, state = [first], None
    for t in range(count - 1):
        logits, state = model(torch.tensor([[ids[-1]]]), state, t_start=t)
        ids.append(int(torch.multinomial(logits[0, 0].softmax(0), 1)))
    return ids


def main() -> None:
    parser = ArgumentParser(description="A character language model")
    parser.add_argument("--updates", type=int, default=300)
    args = parser.parse_args()
    torch.manual_seed(0)
    bnrnn.keep_heap()  # a training step frees what the next one needs again: let the process keep it

    text = "\n".join(topics[name] for name in sorted(topics))
    symbols = sorted(set(text))
    numbers = {symbol: i for i, symbol in enumerate(symbols)}
    ids = torch.tensor([numbers[c] for c in text])
    split = len(ids) * 19 // 20
    train, valid = windows(ids[:split]), windows(ids[split:])
    print(f"{len(text):,} characters, {len(symbols)} symbols")

    model = CharacterModel(len(symbols))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    print(f"after 0 updates: {bits_per_character(model, train, valid):.3f} bits per character")
    for _ in range(args.updates):
        batch = train[:, torch.randint(train.shape[1], (BATCH_SIZE,))]
        logits, _ = model(batch[:-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"after {args.updates} updates: {bits_per_character(model, train, valid):.3f} bits per character")
    print("".join(symbols[i] for i in sample(model, numbers["T"], 300)))


if __name__ == "__main__":
    main()
