"""Streaming: a signal that arrives piece by piece, with the state carried from one piece to the next.

    python examples/streaming.py [--updates 200]

A batch-normalized LSTM learns to predict the next value of a noisy oscillation from windows of 50 steps. Then a signal
of 200 steps arrives in pieces of 7, as from a sensor. Population statistics belong to time steps, so each call says
with `t_start` how many steps came before; steps beyond the 50 of training use the statistics of the last.

Prints the mean squared error of the stream beside that of predicting the last value again, and the largest difference
between the predictions in pieces and those of the whole signal at once, which is rounding. Seconds on one core.
"""

from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bnrnn

T, T_LONG, PIECE, BATCH_SIZE = 50, 200, 7, 32


class Predictor(nn.Module):
    """The next value at every step (T, B, 1), and the state to carry on."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = bnrnn.LSTM(1, 32, norm="batch", t_max=T)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None, t_start: int = 0):
        y, state = self.lstm(x, state, t_start)
        return self.head(y), state


def make_signals(num_steps: int, count: int) -> Tensor:
    """Sums of two sine waves with random frequencies and phases, and a little noise: (num_steps, count, 1)."""
    steps = torch.arange(num_steps, dtype=torch.float32)[:, None]
    signal = 0.05 * torch.randn(num_steps, count)
    for fastest in (0.4, 0.8):  # radians a step
        signal += torch.sin(steps * fastest * (0.5 + 0.5 * torch.rand(count)) + 6.3 * torch.rand(count))
    return signal[..., None]


def main() -> None:
    parser = ArgumentParser(description="Streaming with a carried state")
    parser.add_argument("--updates", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(0)

    model = Predictor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(args.updates):
        x = make_signals(T + 1, BATCH_SIZE)
        y, _ = model(x[:-1])
        loss = F.mse_loss(y, x[1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    bnrnn.estimate_population_statistics(model, [make_signals(T, 500) for _ in range(4)])

    model.eval()
    signal = make_signals(T_LONG + 1, 1)
    state, t, predictions = None, 0, []
    with torch.no_grad():
        for piece in signal[:-1].split(PIECE):  # (7, 1, 1); the last has 4 steps
            y, state = model(piece, state, t_start=t)
            predictions.append(y)
            t += len(piece)
        whole, _ = model(signal[:-1])
    streamed = torch.cat(predictions)
    print(f"mean squared error of the stream: {F.mse_loss(streamed, signal[1:]):.3f}")
    print(f"mean squared error of the last value: {F.mse_loss(signal[:-1], signal[1:]):.3f}")
    print(f"largest difference between pieces and the whole: {(streamed - whole).abs().max():.1e}")


if __name__ == "__main__":
    main()
