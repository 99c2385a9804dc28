"""What stacks of layers have in common with the recurrent layers of torch.nn: forms of the input, and names."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bnrnn.errors import BnrnnError
from bnrnn.layers import nn_lstm
from bnrnn.layers.base import State, check_type, check_values


class TorchForms(nn.Module):
    """The part of a `Stack` that takes input as torch's layers do: batch first, one sequence, or a PackedSequence.

    A subclass names it before Stack, and sets `batch_first` and `norm`.
    """

    batch_first: bool
    norm: str | None
    input_size: int
    layers: nn.ModuleList
    state_names: tuple[str, ...]
    first_step: Any
    _check_state: Any
    _run: Any

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | State | None = None,
        t_start: int | None = None,
        lengths: Tensor | list[int] | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Any]:
        """Return the outputs and the last states.

        Args:
            input: (T, B, I), or (B, T, I) if batch_first, or (T, I) for a single sequence, or a PackedSequence.
            hx: initial state: h of a GRU, or (h, c) of an LSTM, each (num_layers D, B, H), or (num_layers D, H) for a
                single sequence; None means zeros. The last states have the same form.
            t_start, lengths: for tensors, see Stack.
            reset: see Stack; (B, T) if batch_first, and (T,) for a single sequence.

        Raises BnrnnError for wrong shapes, and in the cases that Stack and its layers list.
        """
        if len(self.state_names) > 1:
            return self._forward(input, hx, t_start, lengths, reset)  # pyright: ignore[reportArgumentType]
        if not (hx is None or isinstance(hx, Tensor)):
            raise BnrnnError(f"the state of a {type(self).__name__} is one tensor, got {type(hx).__name__}")
        y, (h,) = self._forward(input, None if hx is None else (hx,), t_start, lengths, reset)
        return y, h

    def _forward(
        self, input: Tensor | PackedSequence, hx: State | None, t_start: int | None,
        lengths: Tensor | list[int] | None, reset: Tensor | None,
    ) -> tuple[Tensor | PackedSequence, State]:  # fmt: skip
        values = input.data if isinstance(input, PackedSequence) else input
        check_type(values, "input")
        if not values.is_floating_point():
            raise BnrnnError(
                f"input must be floating point as torch's, got {values.dtype}: ids go through an nn.Embedding"
            )
        if isinstance(input, PackedSequence):
            if lengths is not None or t_start or reset is not None:
                raise BnrnnError(
                    "lengths, t_start and reset do not apply to a PackedSequence, which has its own lengths and begins "
                    "at step 0: pass a padded tensor"
                )
            return self._forward_packed(input, hx)
        if input.dim() not in (2, 3) or input.shape[-1] != self.input_size:
            batched = "(B, T, I)" if self.batch_first else "(T, B, I)"
            raise BnrnnError(
                f"{type(self).__name__} expects {batched} or (T, I) with I = {self.input_size}, got shape "
                f"{tuple(input.shape)}"
            )
        if input.dim() == 2:
            if hx is not None:
                self._check_state(hx)
                hx = tuple(s[:, None] for s in hx)
            reset = reset[:, None] if isinstance(reset, Tensor) and reset.dim() == 1 else reset
            y, state = super().forward(input[:, None], hx, t_start, lengths, reset)
            return y[:, 0], tuple(s[:, 0] for s in state)
        if self.batch_first:
            input = input.transpose(0, 1)
            reset = reset.t() if isinstance(reset, Tensor) and reset.dim() == 2 else reset
        y, state = super().forward(input, hx, t_start, lengths, reset)
        return (y.transpose(0, 1) if self.batch_first else y), state

    def _forward_packed(self, packed: PackedSequence, hx: State | None) -> tuple[PackedSequence, State]:
        data, batch_sizes, order, back = packed
        if data.dim() != 2 or data.shape[1] != self.input_size:
            raise BnrnnError(
                f"{type(self).__name__} expects packed frames (N, {self.input_size}), got shape {tuple(data.shape)}"
            )
        x, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))  # without its indices: longest first
        check_values(x if back is None else x.index_select(1, back), self.input_size)
        self._check_state(hx, x.shape[1])
        self.first_step.find(None, len(x), hx)
        state = hx if hx is None or order is None else tuple(s.index_select(1, order) for s in hx)
        y, state = self._run(x, state, 0, lengths)
        y = PackedSequence(pack_padded_sequence(y, lengths).data, batch_sizes, order, back)
        state = state if back is None else tuple(s.index_select(1, back) for s in state)
        self.first_step.remember(state, len(x))
        return y, state

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", norm={self.norm!r}" if self.norm else "")

    def flatten_parameters(self) -> None:
        """Do nothing. It exists because programs written for torch's layers call it."""


class TorchNames(TorchForms):
    """TorchForms that also has the parameters of torch's layer by their names, such as weight_hh_l0."""

    bias: bool
    has_both_biases = False  # as torch's layers; otherwise the only bias is the sum of theirs

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of each layer and direction, as nn.LSTM's `all_weights`."""
        return [list(of_layer.values()) for of_layer in nn_lstm.parameters(self)]

    def __getattr__(self, name: str) -> Any:
        """Also find parameters by torch's names, such as weight_hh_l0. The `bias_hh_l0` of an LSTM is 0."""
        if name.startswith(nn_lstm.NAMES):
            for of_layer in nn_lstm.parameters(self):
                if name in of_layer:
                    return of_layer[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(nn_lstm.NAMES):
            nn_lstm.refuse_to_set(self, name)
        super().__setattr__(name, value)
