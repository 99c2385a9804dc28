"""PyTorch's example of a word language model, with nn.LSTM and with bnrnn.LSTM in its place, on Penn Treebank.

    python experiments/programs/word_language_model.py [--updates 150] [--out-dir DIR]

The model and its training follow github.com/pytorch/examples, word_language_model: two LSTM layers between an embedding
and a linear readout, plain SGD at a rate of 20, gradients clipped to a norm of 0.25, windows of 35 words, batches of
20, dropout of 0.2, and a state that is carried from window to window. It is narrower (100 units instead of 200) and
trains for a part of an epoch. The text is Penn Treebank instead of WikiText-2.
"""

import os
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bnrnn
from bnrnn.data.ptb import PTBWord
from bnrnn.errors import report_errors
from bnrnn.report.markdown import markdown, spread
from bnrnn.report.site.curves import Line, Plot
from bnrnn.system.files import write_record
from bnrnn.training.provenance import provenance

KEY = "programs/word_language_model"
SIZE, WINDOW, BATCH_SIZE, EVAL_BATCH_SIZE = 100, 35, 20, 10
RATE, CLIP, DROPOUT = 20.0, 0.25, 0.2
EVAL_WINDOWS = 50  # windows of the validation text, which are 17,500 words
VARIANTS = {  # name: the line of the program that makes the recurrent layer
    "nn.LSTM": "nn.LSTM(SIZE, SIZE, 2, dropout=DROPOUT)",
    "bnrnn.LSTM, norm=None": "bnrnn.LSTM(SIZE, SIZE, 2, dropout=DROPOUT)",
    'bnrnn.LSTM, norm="batch"': (
        'bnrnn.LSTM(SIZE, SIZE, 2, dropout=DROPOUT, norm="batch", t_max=WINDOW, statistics="running")'
    ),
}
State = tuple[Tensor, Tensor]


class WordModel(nn.Module):
    """Logits (T, B, V) of the next word for ids (T, B), and the state after the last."""

    def __init__(self, layer: nn.Module, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(vocabulary_size, SIZE), layer
        self.readout, self.dropout = nn.Linear(SIZE, vocabulary_size), nn.Dropout(DROPOUT)
        for weight in (self.embedding.weight, self.readout.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.readout.bias)

    def forward(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.layer(self.dropout(self.embedding(ids)), state)
        return self.readout(self.dropout(y)), state


def build(variant: str, seed: int, vocabulary_size: int) -> WordModel:
    """The model of a variant. All variants of a seed begin with the same embedding and readout."""
    torch.manual_seed(seed)
    layer = eval(VARIANTS[variant], {"nn": nn, "bnrnn": bnrnn, **globals()})
    torch.manual_seed(seed)
    return WordModel(layer, vocabulary_size)


def streams(ids: Tensor, batch_size: int) -> Tensor:
    """The text as `batch_size` streams of equal length, (length, batch_size)."""
    length = len(ids) // batch_size
    return ids[: length * batch_size].view(batch_size, length).T.contiguous()


def windows(text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole windows of the streams with their targets, which are shifted by one word."""
    for t in range(0, len(text) - WINDOW, WINDOW):
        yield text[t : t + WINDOW], text[t + 1 : t + 1 + WINDOW]


def zeros(batch_size: int) -> State:
    return torch.zeros(2, batch_size, SIZE), torch.zeros(2, batch_size, SIZE)


def loss_of(model: WordModel, ids: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
    logits, state = model(ids, state)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), state


@torch.no_grad()
def evaluate(model: WordModel, text: Tensor) -> float:
    """The mean cross-entropy in nats over the first windows of the text."""
    model.eval()
    losses, state = [], zeros(EVAL_BATCH_SIZE)
    for ids, targets in islice(windows(text), EVAL_WINDOWS):
        loss, state = loss_of(model, ids, targets, state)
        losses.append(loss.item())
    model.train()
    return sum(losses) / len(losses)


def train(variant: str, seed: int, data: PTBWord, updates: int, every: int) -> dict[str, Any]:
    """Train one model: its validation cross-entropy by update, and the CPU milliseconds of an update."""
    train_text, valid_text = (
        streams(data.splits[s], n) for s, n in (("train", BATCH_SIZE), ("valid", EVAL_BATCH_SIZE))
    )
    model, state, milliseconds, valid = build(variant, seed, len(data.vocabulary)), zeros(BATCH_SIZE), [], {}
    for update, (ids, targets) in enumerate(windows(train_text), 1):
        started = time.process_time()
        model.zero_grad()
        loss, state = loss_of(model, ids, targets, (state[0].detach(), state[1].detach()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-RATE)
        milliseconds.append(1000 * (time.process_time() - started))
        if update % every == 0:
            valid[str(update)] = round(evaluate(model, valid_text), 4)
            print(f"{variant}, seed {seed}, update {update}: {valid[str(update)]:.3f} nats", flush=True)
        if update == updates:
            break
    return {"valid": valid, "milliseconds": round(median(milliseconds), 2)}


def measure(data_dir: str, updates: int, seeds: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    bnrnn.keep_heap()
    about = provenance()  # the program as it is when it starts
    data = PTBWord(data_dir, WINDOW)
    every = max(1, updates // 6)
    runs = {v: {str(seed): train(v, seed, data, updates, every) for seed in seeds} for v in VARIANTS}
    return {"name": KEY, **about, "updates": updates, "data": data.description, "runs": runs}


def plot(result: dict[str, Any]) -> Plot:
    """The interactive plot: validation cross-entropy by update."""
    lines = [
        Line(variant, {"updates": [int(u) for u in run["valid"]]}, list(run["valid"].values()), member=seed)
        for variant, runs in result["runs"].items()
        for seed, run in runs.items()
    ]
    return Plot(["updates"], {"": "validation cross-entropy in nats per word"}, lines)


def render(result: dict[str, Any]) -> str:
    """The results as a table: the last validation cross-entropy, and the time of an update."""
    rows = []
    for variant, runs in result["runs"].items():
        last = [list(run["valid"].values())[-1] for run in runs.values()]
        rows.append([f"`{variant}`", spread(last, 3), spread([run["milliseconds"] for run in runs.values()], 1)])
    header = ["layer", f"validation cross-entropy (nats) after {result['updates']:,} updates", "CPU ms of an update"]
    return markdown(header, rows)


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data-dir", default=os.environ.get("BNRNN_DATA", "data"))
    parser.add_argument("--out-dir", type=Path, default=Path("outputs"))
    args = parser.parse_args()
    result = measure(args.data_dir, args.updates, args.seeds)
    write_record(args.out_dir / f"{KEY}.json", result)
    print(render(result))


if __name__ == "__main__":
    report_errors(main)
