"""Measures a step of the five bidirectional layers of the speech models, with and without BN, against nn.LSTM."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from bnrnn.bench.timing import NN_LSTM, Case, Plan
from bnrnn.layers.stack import LSTM

T, QUICK_T, B, F, H, NUM_LAYERS = 500, 60, 24, 123, 250, 5
TARGET = 0.6  # target ratio to nn.LSTM on packed sequences
STACKS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "input_bn_lstm_sequence": {"norm": "input_batch", "input_statistics": "sequence"},
}


def step(lstm: nn.Module, x: Tensor, lengths: list[int], dy: Tensor) -> None:
    """One forward and backward pass over packed sequences."""
    packed = pack_padded_sequence(x, torch.tensor(lengths))
    torch.autograd.grad(lstm(packed)[0].data, list(lstm.parameters()), dy)


def speech_case(device: torch.device, plan: Plan) -> Case:
    """A step on the engine that `auto` selects. The lengths of sequences are uniform between 80 % of T and T."""
    num_steps = T if plan.full_length else QUICK_T
    torch.manual_seed(0)
    lengths = sorted([num_steps, *torch.randint(num_steps * 4 // 5, num_steps + 1, (B - 1,)).tolist()], reverse=True)
    x, dy = torch.randn(num_steps, B, F, device=device), torch.randn(sum(lengths), 2 * H, device=device)
    models = {NN_LSTM: nn.LSTM(F, H, NUM_LAYERS, bidirectional=True)}
    models |= {name: LSTM(F, H, NUM_LAYERS, bidirectional=True, **options) for name, options in STACKS.items()}
    runs = {name: partial(step, model.to(device), x, lengths, dy) for name, model in models.items()}
    targets = dict.fromkeys(STACKS, TARGET) if device.type == "cpu" else {}
    return Case("Speech", f"five layers, both directions, packed, T {num_steps}", runs, NN_LSTM, targets)
