"""Measures a training step on sequences of different lengths: nn.LSTM padded and packed, bnrnn.LSTM with lengths."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bnrnn.bench.timing import BN_LSTM, NO_NORM, PACKED, PADDED, Case
from bnrnn.layers.stack import LSTM

SECTION = "Sequences of different lengths"
SIZES = ((20, 32, 128), (100, 32, 128), (100, 32, 256), (300, 32, 128), (50, 64, 512))  # T, B, and I and H


def of_whole(lstm: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """Ignores the lengths: the states after the last step of shorter sequences are those of padding."""
    return lstm(x)[0]


def of_packed(lstm: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    return pad_packed_sequence(lstm(packed)[0], total_length=len(x))[0]


def with_lengths(lstm: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    return lstm(x, lengths=lengths)[0]


def padded_cases(device: torch.device) -> Iterator[Case]:
    """One case per size, on the engine that `auto` selects. LENGTHS says how long the sequences are."""
    for T, B, H in SIZES:
        torch.manual_seed(0)
        lengths = torch.tensor([T, *torch.randint(T // 2, T + 1, (B - 1,)).tolist()])
        x, dy = torch.randn(T, B, H, device=device, requires_grad=True), torch.randn(T, B, H, device=device)
        variants = {
            PADDED: (nn.LSTM(H, H), of_whole),
            PACKED: (nn.LSTM(H, H), of_packed),
            NO_NORM: (LSTM(H, H), with_lengths),
            BN_LSTM: (LSTM(H, H, norm="batch", t_max=T), with_lengths),
        }

        def step(lstm: nn.Module, run, x: Tensor = x, lengths: Tensor = lengths, dy: Tensor = dy) -> None:
            torch.autograd.grad(run(lstm, x, lengths), [*lstm.parameters(), x], dy)

        runs = {name: partial(step, lstm.to(device), run) for name, (lstm, run) in variants.items()}
        yield Case(SECTION, f"B {B}, I and H {H}, T {T}", runs, PADDED)
