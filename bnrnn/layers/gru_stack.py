"""Stacks of GRUs and of light GRUs. `GRU` replaces torch.nn.GRU, `LiGRU` the module of this name in SpeechBrain."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.layers import nn_lstm, speechbrain
from bnrnn.layers.base import State
from bnrnn.layers.gru import GRU as SingleGRU
from bnrnn.layers.ligru import LiGRU as SingleLiGRU
from bnrnn.layers.stack import Stack, reverse
from bnrnn.layers.torch_forms import TorchForms, TorchNames


class GRU(TorchNames, Stack):  # pyright: ignore[reportIncompatibleMethodOverride]: forward has torch's names
    """torch.nn.GRU with optional normalization. Arguments, shapes and order of the states are those of nn.GRU.

    `output, h_n = GRU(input_size, hidden_size, ..., norm="layer")(input, hx=None)`.

    `load_state_dict` accepts the state_dict of a torch.nn.GRU, also as part of a larger model. With norm=None the
    outputs are then the same. With a norm, use strict=False, and train the model further.

    Args:
        bias, batch_first, dropout, bidirectional, device, dtype: as in nn.GRU.
        norm: None for no normalization, "input_batch" for BN of the input product, or "layer" for layer normalization
            of both products (bnrnn.layers.gru).
        t_max, input_statistics, statistics, momentum: as in bnrnn.LSTM, for norm="input_batch".

    Raises BnrnnError for arguments that contradict each other.
    """

    has_both_biases = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str | None = None,
        t_max: int | None = None,
        input_statistics: str = "frame",
        statistics: str = "exact",
        momentum: float = 0.1,
    ) -> None:
        if norm != "input_batch" and (input_statistics, statistics) != ("frame", "exact"):
            raise BnrnnError("input_statistics and statistics need norm='input_batch': set it, or leave them out")
        if (norm, input_statistics, t_max) == ("input_batch", "frame", None):
            raise BnrnnError(
                "norm='input_batch' keeps population statistics for every time step: set t_max, the length of the "
                "training sequences (input_statistics='sequence' needs none)"
            )
        options: Any = {"input_statistics": input_statistics, "statistics": statistics, "momentum": momentum}
        layer = partial(SingleGRU, bias=bias, norm=norm, **options)
        super().__init__(layer, input_size, hidden_size, num_layers, bidirectional, dropout, t_max)
        self.bias, self.batch_first, self.norm = bias, batch_first, norm
        self.register_load_state_dict_pre_hook(nn_lstm.rename_from)
        self.register_state_dict_post_hook(nn_lstm.rename_to)
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)


class LiGRU(TorchForms, Stack):  # pyright: ignore[reportIncompatibleMethodOverride]: forward has torch's names
    """A stack of light GRUs (bnrnn.layers.ligru), with batch normalization of the input product by default.

    `output, h_n = LiGRU(input_size, hidden_size)(input, hx=None)`. Shapes and order of the states are those of nn.GRU.

    As in SpeechBrain, the two directions of a bidirectional layer share their weights, and the statistics are those of
    both. `load_state_dict` accepts the state_dict of SpeechBrain's LiGRU with normalization="batchnorm", and that of
    its SLiGRU for norm="layer"; the model must be batch_first to take SpeechBrain's input.

    Args:
        bias: whether there is a bias, the shift of the normalization.
        batch_first, dropout, bidirectional, device, dtype: as in nn.GRU; dropout acts between layers.
        norm, nonlinearity, recurrent_dropout, statistics, momentum: as in bnrnn.layers.ligru.LiGRU.
            `recurrent_dropout` is what SpeechBrain calls dropout.

    Raises BnrnnError for arguments out of range.
    """

    directions_share = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str | None = "input_batch",
        nonlinearity: str = "relu",
        recurrent_dropout: float = 0.0,
        statistics: str = "running",
        momentum: float = 0.05,
    ) -> None:
        options: Any = {"nonlinearity": nonlinearity, "recurrent_dropout": recurrent_dropout, "statistics": statistics}
        layer = partial(SingleLiGRU, bias=bias, norm=norm, momentum=momentum, **options)
        super().__init__(layer, input_size, hidden_size, num_layers, bidirectional, dropout)
        self.bias, self.batch_first, self.norm = bias, batch_first, norm
        self.register_load_state_dict_pre_hook(speechbrain.rename_from)
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)

    def _run_layer(
        self, n: int, x: Tensor, states: list[State] | None, t_start: int, batch_sizes: list[int] | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, list[State]]:  # fmt: skip
        """Run both directions as one batch, in which those of a sequence are neighbours: the longest come first."""
        if not self.bidirectional:
            return super()._run_layer(n, x, states, t_start, batch_sizes, lengths)
        both = torch.stack([x, reverse(x, lengths)], dim=2).flatten(1, 2)  # (T, 2B, ...)
        given = states and tuple(torch.stack(values, dim=1).flatten(0, 1) for values in zip(*states, strict=True))
        sizes = batch_sizes and [2 * size for size in batch_sizes]
        y, last = self.layers[n](both, given, t_start, sizes)
        forward, backward = y.unflatten(1, (-1, 2)).unbind(2)
        ends = zip(*(value.unflatten(0, (-1, 2)).unbind(1) for value in last), strict=True)
        return torch.cat([forward, reverse(backward, lengths)], dim=2), list(ends)
