"""How long a step of the five bidirectional layers of speech takes, with BN and without, beside nn.LSTM."""

import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from bnrnn.bench import NN_LSTM, Plan, time_in_turn
from bnrnn.layers.stack import LSTM

T, QUICK_T, B, F, H, NUM_LAYERS = 500, 60, 24, 123, 250, 5
TARGET = 1.1  # BN over the plain stack, and over nn.LSTM on packed sequences
STACKS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "input_bn_lstm_sequence": {"norm": "input_batch", "input_statistics": "sequence"},
}


def step(lstm: nn.Module, x: Tensor, lengths: list[int], dy: Tensor) -> None:
    """Forward and backward over packed sequences."""
    packed = pack_padded_sequence(x, torch.tensor(lengths))
    torch.autograd.grad(lstm(packed)[0].data, list(lstm.parameters()), dy)


def speech_cost(device: torch.device, plan: Plan) -> dict[str, Any]:
    """Milliseconds of a step, all in turn, with the engine that `auto` takes; sequences of 80 % of T to all of it."""
    num_steps = T if plan.full_length else QUICK_T
    torch.manual_seed(0)
    lengths = sorted([num_steps, *torch.randint(num_steps * 4 // 5, num_steps + 1, (B - 1,)).tolist()], reverse=True)
    x, dy = torch.randn(num_steps, B, F, device=device), torch.randn(sum(lengths), 2 * H, device=device)
    models = {NN_LSTM: nn.LSTM(F, H, NUM_LAYERS, bidirectional=True)}
    models |= {name: LSTM(F, H, NUM_LAYERS, bidirectional=True, **options) for name, options in STACKS.items()}
    times = time_in_turn({k: partial(step, m.to(device), x, lengths, dy) for k, m in models.items()}, device, plan)
    median = {name: statistics.median(t) for name, t in times.items()}
    return {"T": num_steps, "B": B, "target": TARGET, "ms": times, "median_ms": median}
