"""Classification of sequences of different lengths: batches are `PackedSequence`s, as for `torch.nn.LSTM`.

    python examples/packed_sequences.py [--updates 150]

The data are made here: noisy sine, square, triangle and sawtooth waves of 20 to 60 steps with random frequency and
phase. A batch-normalized LSTM reads each to its end and a linear layer names the kind of the wave. Statistics of a time
step are over the sequences that still run, so sequences of similar length are trained together.

Prints the accuracy on 400 new waves, of which guessing gets a quarter, and the largest difference between the logits of
a wave in a packed batch and those of the same wave alone: evaluation never reads the rest of the batch, so it is
rounding. Seconds on one core.
"""

import math
from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import bnrnn

T_MIN, T_MAX, BATCH_SIZE = 20, 60, 50


class Classifier(nn.Module):
    """Logits (B, 4) for packed sequences of one feature."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = bnrnn.LSTM(1, 48, norm="batch", t_max=T_MAX)
        self.head = nn.Linear(48, 4)

    def forward(self, packed: PackedSequence) -> Tensor:
        _, (h, _) = self.lstm(packed)  # (1, B, 48), each after its sequence's own last step, in the order given
        return self.head(h[-1])


def make_waves(count: int) -> tuple[list[Tensor], Tensor]:
    """Waves (T, 1), and their kinds (count,)."""
    kinds = torch.randint(4, (count,))
    waves = []
    for kind in kinds.tolist():
        steps = torch.arange(int(torch.randint(T_MIN, T_MAX + 1, ())))
        turns = torch.rand(()) + steps * (0.05 + 0.05 * torch.rand(()))  # 10 to 20 steps a period
        ramp = turns % 1
        wave = [(2 * math.pi * ramp).sin(), (ramp - 0.5).sign(), 4 * (ramp - 0.5).abs() - 1, 2 * ramp - 1][kind]
        waves.append((wave + 0.1 * torch.randn(len(steps)))[:, None])
    return waves, kinds


def batches(waves: list[Tensor], kinds: Tensor) -> list[tuple[PackedSequence, Tensor]]:
    """All waves once, those of similar length together."""
    order = sorted(range(len(waves)), key=lambda i: len(waves[i]))
    chosen = [order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE)]
    return [(pack_sequence([waves[i] for i in some], enforce_sorted=False), kinds[some]) for some in chosen]


def main() -> None:
    parser = ArgumentParser(description="Classification of packed sequences")
    parser.add_argument("--updates", type=int, default=150)
    args = parser.parse_args()
    torch.manual_seed(0)

    train = batches(*make_waves(1000))
    waves, kinds = make_waves(400)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(args.updates):
        packed, targets = train[int(torch.randint(len(train), ()))]
        loss = F.cross_entropy(model(packed), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    bnrnn.estimate_population_statistics(model, [packed for packed, _ in train])
    model.eval()
    with torch.no_grad():
        together = model(pack_sequence(waves, enforce_sorted=False))
        alone = torch.cat([model(pack_sequence([wave])) for wave in waves[:50]])
    print(f"test accuracy after {args.updates} updates: {(together.argmax(1) == kinds).float().mean():.3f}")
    print(f"largest difference between a wave in a batch and alone: {(together[:50] - alone).abs().max():.1e}")


if __name__ == "__main__":
    main()
