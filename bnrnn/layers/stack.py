"""Stacks of recurrent layers, with two directions and padded batches. `LSTM` replaces torch.nn.LSTM."""

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from bnrnn.errors import BnrnnError, check_number, check_size
from bnrnn.layers import nn_lstm
from bnrnn.layers.base import (
    RecurrentLayer,
    State,
    check_shape,
    check_state,
    check_values,
    checked_lengths,
    checked_reset,
)
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.steps import FirstStep
from bnrnn.layers.torch_forms import TorchNames
from bnrnn.scan.tracing import values_known
from bnrnn.scan.transfer import to_device


class Stack(nn.Module):
    """A stack of recurrent layers: `y, state = stack(x, state=None, t_start=None, lengths=None, reset=None)`.

    x is (T, B, I), or (T, B) integer ids, each of which stands for a one-hot vector of size I. y is (T, B, D H), where
    D is the number of directions, 2 if bidirectional. The state is a tuple of (num_layers D, B, H) tensors; None means
    zeros. Its order is that of torch.nn.LSTM: the forward and the backward direction of the lowest layer come first.

    Args:
        layer: builds one layer of one direction from (input_size, hidden_size, t_max=...).
        dropout: probability with which an output of a layer is set to 0 in training, for all layers but the last.
        t_max: passed to every layer; those with statistics per time step need it.

    Raises BnrnnError for sizes below 1 and for a dropout outside 0 ... 1.
    """

    directions_share = False  # whether both directions of a layer have the same weights
    checks_finite = True  # models turn it off for learned embeddings: a NaN there means divergence, not bad input

    def __init__(
        self,
        layer: Callable[..., RecurrentLayer],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        t_max: int | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)):
            check_size(name, size)
        check_number("dropout", dropout, low=0.0, high=1.0)
        if dropout and num_layers == 1:
            warnings.warn("dropout has no effect: it acts between layers, and num_layers is 1", stacklevel=3)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bidirectional, self.dropout, self.t_max = bidirectional, dropout, t_max
        self.num_directions = 2 if bidirectional else 1
        sizes = [input_size] + [self.num_directions * hidden_size] * (num_layers - 1)
        num_own = 1 if self.directions_share else self.num_directions
        layers = [layer(size, hidden_size, t_max=t_max) for size in sizes for _ in range(num_own)]
        self.state_names = layers[0].state_names
        self.layers = nn.ModuleList(layers)
        for single in layers:
            single.checks_finite = False  # the stack checks its own input; a later NaN means that training diverged
            single.finds_first_step = False
        self.first_step = FirstStep(self)

    def reset_parameters(self) -> None:
        """Initialize all layers again, with their norms."""
        for layer in self.layers:
            layer.reset_parameters()  # pyright: ignore[reportCallIssue]: a ModuleList forgets its type

    def __prepare_scriptable__(self) -> None:  # torch.jit.script calls it first
        raise BnrnnError(f"torch.jit.script cannot compile {type(self).__name__}: use torch.export or torch.jit.trace")

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in ("num_layers", "bidirectional", "dropout", "t_max")}
        return ", ".join([str(self.input_size), str(self.hidden_size), *(f"{k}={v}" for k, v in options.items() if v)])

    def forward(
        self,
        x: Float[Tensor, "T B I"] | Int[Tensor, "T B"],
        state: State | None = None,
        t_start: int | None = None,
        lengths: Tensor | list[int] | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Float[Tensor, "T B O"], State]:
        """Run x through all layers.

        Args:
            t_start: number of steps already processed, if a sequence is processed in pieces. A bidirectional stack
                needs the whole sequence at once. None means 0, and warns once if the state continues an earlier call
                and statistics differ by time step (bnrnn.layers.steps).
            lengths: number of steps of each sequence (B,) without padding, in any order; None means T for all. The
                values in the padding are ignored, and y is 0 there. The returned state of a sequence is the one after
                its own last step.
            reset: (T, B), bool or 0 and 1. Where it is 1, a new episode begins: before this step, the state of this
                sequence is zero in all layers. Statistics per time step remain those of the steps of the call. The
                layers run in pieces, which begin where any sequence is reset.

        Raises BnrnnError if the state, lengths or reset do not match x, for t_start or reset in a bidirectional stack,
        for reset with lengths, and for reset with statistics over the time of the batch.
        """
        check_shape(x, self.input_size, type(self).__name__)
        if t_start and self.bidirectional:
            raise BnrnnError(f"t_start={t_start}: a bidirectional stack needs the whole sequence at once")
        self._check_state(state, x.shape[1])
        if reset is not None:
            reset = self._checked_reset(reset, x, lengths)
        first = self.first_step.find(t_start, len(x), state)
        if reset is None:
            y, state = self._run_padded(x, state, first, lengths)
        else:
            y, state = self._run_with_resets(x, state, first, reset)
        self.first_step.remember(state, first + len(x))
        return y, state

    def _run_padded(
        self, x: Tensor, state: State | None, t_start: int, lengths: Tensor | list[int] | None
    ) -> tuple[Tensor, State]:
        """Run all layers over sequences in any order, with any values in the padding."""
        lengths = None if lengths is None else checked_lengths(lengths, *x.shape[:2])
        if lengths is None or lengths.min() == len(x):
            self._check_values(x)
            return self._run(x, state, t_start, None)
        padding = to_device(torch.arange(len(x), device=lengths.device)[:, None] >= lengths, x.device)  # (T, B)
        order = lengths.argsort(descending=True, stable=True)
        lengths = lengths[order]
        given, back = to_device(order, x.device), to_device(order.argsort(), x.device)
        # Clear the padding: the gradients of the weights would otherwise include 0 times a NaN there.
        x = x.masked_fill(padding if x.dim() == 2 else padding[..., None], 0)
        self._check_values(x)
        state = state and tuple(s.index_select(1, given) for s in state)
        y, state = self._run(x[: int(lengths[0])].index_select(1, given), state, t_start, lengths)
        y = F.pad(y.index_select(1, back), (0, 0, 0, 0, 0, len(x) - len(y)))
        return y.masked_fill(padding[..., None], 0), tuple(s.index_select(1, back) for s in state)

    def _run_with_resets(
        self, x: Tensor, state: State | None, t_start: int, reset: Bool[Tensor, "T B"]
    ) -> tuple[Tensor, State]:
        """Run all layers piece by piece. Where the values of `reset` are unknown, every step is a piece."""
        self._check_values(x)
        inner = (reset[1:].any(1).nonzero()[:, 0] + 1).tolist() if values_known() else range(1, len(x))
        ys = []
        for begin, end in pairwise([0, *inner, len(x)]):
            if state is not None:
                state = tuple(s.masked_fill(reset[begin][:, None], 0) for s in state)
            y, state = self._run(x[begin:end], state, t_start + begin, None)
            ys.append(y)
        assert state is not None
        return torch.cat(ys), state

    def _run(self, x: Tensor, state: State | None, t_start: int, lengths: Tensor | None) -> tuple[Tensor, State]:
        """Run all layers. lengths must begin with T and never increase. y is undefined in the padding."""
        if lengths is None or lengths[-1] == len(x):
            lengths = batch_sizes = None  # no padding: the result is the same, and faster
        else:
            batch_sizes = (lengths > torch.arange(len(x), device=lengths.device)[:, None]).sum(1).tolist()
            lengths = to_device(lengths, x.device)
        states, D = [], self.num_directions
        given = None if state is None else list(zip(*(s.unbind(0) for s in state), strict=True))
        for n in range(self.num_layers):
            x, last = self._run_layer(n, x, given and given[n * D : n * D + D], t_start, batch_sizes, lengths)
            states += last
            if self.dropout and n < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, tuple(torch.stack(values) for values in zip(*states, strict=True))

    def _run_layer(
        self, n: int, x: Tensor, states: list[State] | None, t_start: int, batch_sizes: list[int] | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, list[State]]:  # fmt: skip
        """Run all directions of layer n, from their states. Returns the outputs side by side, and the last states."""
        ys, ended = [], []
        for d in range(self.num_directions):
            layer, given = self.layers[n * self.num_directions + d], states and states[d]
            y, last = layer(reverse(x, lengths) if d else x, given, t_start, batch_sizes)
            ys.append(reverse(y, lengths) if d else y)
            ended.append(last)
        return torch.cat(ys, dim=2) if self.bidirectional else ys[0], ended

    def _checked_reset(self, reset: Any, x: Tensor, lengths: Any) -> Bool[Tensor, "T B"]:
        if self.bidirectional:
            raise BnrnnError("reset: a bidirectional stack needs the whole sequence at once, so leave reset out")
        if lengths is not None:
            raise BnrnnError("reset and lengths exclude each other: leave out lengths, and ignore y in the padding")
        if any(isinstance(m, SequenceBatchNorm) and m.over_time and m.uses_batch for m in self.modules()):
            raise BnrnnError("reset: statistics over time need the whole sequence at once, use those of a time step")
        return checked_reset(reset, *x.shape[:2]).to(x.device)

    def _check_values(self, x: Tensor) -> None:
        if self.checks_finite:
            check_values(x, self.input_size)

    def _check_state(self, state: State | None, *batch_size: int) -> None:
        if state is not None:
            check_state(state, self.state_names, (self.num_layers * self.num_directions, *batch_size, self.hidden_size))


def reverse(x: Shaped[Tensor, "T B *F"], lengths: Int[Tensor, " B"] | None = None) -> Shaped[Tensor, "T B *F"]:
    """Reverse every sequence in time. Padding stays at the end."""
    if lengths is None:
        return x.flip(0)
    t = torch.arange(len(x), device=x.device)[:, None]
    source = torch.where(t < lengths, lengths - 1 - t, t)  # (T, B)
    return x.gather(0, (source if x.dim() == 2 else source[..., None]).expand_as(x))


class LSTM(TorchNames, Stack):  # pyright: ignore[reportIncompatibleMethodOverride]: forward has torch's names
    """torch.nn.LSTM with optional normalization. Arguments, shapes and order of the states are those of nn.LSTM.

    `output, (h_n, c_n) = LSTM(input_size, hidden_size, ..., norm="batch", t_max=T)(input, hx=None)`.

    `load_state_dict` accepts the state_dict of a torch.nn.LSTM, also as part of a larger model, and adds its two
    biases. With norm=None the outputs are then the same. With a norm, the state_dict lacks gamma and the statistics:
    strict=True raises an error that names them; strict=False keeps their initial values. The outputs then differ from
    nn.LSTM's, so the model must be trained further.

    Args:
        bias: whether there is a bias; it is one vector, while nn.LSTM has two. norm="input_batch" requires it, because
            it is the shift of the normalization.
        batch_first: whether input and output are (B, T, I) and (B, T, D H). As in nn.LSTM, this does not apply to
            states.
        proj_size: not supported, must be 0.
        norm: None for no normalization, "batch" for BN-LSTM (bnrnn.layers.bn_lstm), "input_batch" for BN of the input
            product only (bnrnn.layers.input_bn_lstm), or "layer" for layer normalization (bnrnn.layers.ln_lstm).
        t_max: length of the longest training sequence: the number of steps with their own population statistics. Later
            steps use the last ones. Required with norm="batch", and with norm="input_batch" unless
            input_statistics="sequence".
        input_statistics: "frame" normalizes the input product over the batch at each time step, "sequence" over batch
            and time (Laurent et al. 2015, arXiv:1510.01378, eqs. 20-21). Padding never counts.
        gamma_init: initial gamma. None uses the one of the paper: 0.1 for "batch", 1 for "input_batch" and "layer".
        statistics: of the population, for evaluation. "exact": `estimate_population_statistics` computes them after
            training; "running": they are averaged during training, so that `eval()` works at any time.
        momentum: weight of the newest batch in running statistics, as in torch.nn.BatchNorm1d; otherwise ignored.
        eps: added to the variances of a norm.
        per_gate: whether norm="layer" normalizes each gate alone, and not all gates together.
        zoneout: (p_c, p_h), the probabilities of keeping the previous c and h of a unit; None means zeros.
        recurrent_dropout: probability of setting the candidate g of a unit to 0 at a time step.

    Raises BnrnnError for arguments that contradict each other.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str | None = None,
        t_max: int | None = None,
        input_statistics: str = "frame",
        gamma_init: float | None = None,
        statistics: str = "exact",
        momentum: float = 0.1,
        eps: float = 1e-5,
        per_gate: bool = False,
        zoneout: Sequence[float] | None = None,
        recurrent_dropout: float = 0.0,
    ) -> None:
        if proj_size:
            raise BnrnnError(f"proj_size={proj_size} is not supported: use 0 and apply a linear layer to the output")
        options = {"input_statistics": input_statistics, "statistics": statistics, "momentum": momentum, "eps": eps,
                   "gamma_init": gamma_init, "per_gate": per_gate}  # fmt: skip
        noise = {"zoneout": zoneout, "recurrent_dropout": recurrent_dropout}
        layer = nn_lstm.single_layer(norm, bias, t_max, options, noise)
        if t_max is None:
            t_max = 1  # there are no statistics per time step, so the value does not matter
        super().__init__(layer, input_size, hidden_size, num_layers, bidirectional, dropout, t_max)
        self.bias, self.batch_first, self.proj_size, self.norm = bias, batch_first, proj_size, norm
        self.register_load_state_dict_pre_hook(nn_lstm.rename_from)
        self.register_state_dict_post_hook(nn_lstm.rename_to)
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)
