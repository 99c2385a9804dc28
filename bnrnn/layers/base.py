"""The base class of all recurrent layers: it checks the input, creates the initial state and bounds the memory use."""

import math
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bnrnn.errors import BnrnnError, check_size
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.steps import FirstStep
from bnrnn.scan import ENGINES
from bnrnn.scan.tracing import autocast_is_on, traced, values_known

# Without gradients, a long sequence is processed in pieces whose input product (T, B, G) has at most so many elements:
# 256 MiB of float32.
MAX_PRODUCT_SIZE = 2**26

State = tuple[Tensor, ...]


class RecurrentLayer(nn.Module):
    """One layer, one direction: `y, state = layer(x, state=None, t_start=None, batch_sizes=None)`.

    x is (T, B, I), or (T, B) integer ids, each of which stands for a one-hot vector of size I. y is (T, B, H). The
    state is a tuple of (B, H) tensors; None means zeros.

    To process a sequence in pieces, pass the returned state to the next call, and the number of steps already processed
    as t_start: it selects the population statistics. None means 0, and warns once if the state continues an earlier
    call and statistics differ by time step.

    Sequences of different lengths must be sorted by decreasing length and padded at the end. As in torch's
    PackedSequence, batch_sizes[t] is the number of sequences that have a step t; the others keep their state.
    bnrnn.LSTM accepts sequences in any order, and has several layers.

    Subclasses define `num_gates`, `state_names` and `scan`.
    """

    num_gates: int
    state_names: ClassVar[tuple[str, ...]]
    engines: tuple[str, ...] = ENGINES  # the engines that implement the layer's recurrence
    # A Stack turns these off for its layers: it checks its own input once, and always passes t_start.
    checks_finite = True
    finds_first_step = True

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        check_size("input_size", input_size)
        check_size("hidden_size", hidden_size)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.first_step: FirstStep | None = None  # made by the first call, when the norms exist
        self.weight_ih = nn.Parameter(torch.empty(self.num_gates * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(self.num_gates * hidden_size, hidden_size))

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"

    def __prepare_scriptable__(self) -> None:  # torch.jit.script calls it first
        raise BnrnnError(f"torch.jit.script cannot compile {type(self).__name__}: use torch.export or torch.jit.trace")

    def reset_parameters(self) -> None:
        """Draw the parameters uniformly from ±1/sqrt(H), as torch.nn.LSTM does, and reset the norms.

        Parameters whose names begin with gamma become 1, and those whose names begin with beta become 0.
        """
        bound = self.hidden_size**-0.5
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("gamma"):
                nn.init.ones_(parameter)
            elif name.startswith("beta"):
                nn.init.zeros_(parameter)
            else:
                nn.init.uniform_(parameter, -bound, bound)
        for module in self.children():
            if isinstance(module, SequenceBatchNorm):
                module.reset_parameters()

    def scan(self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None) -> tuple[Tensor, State]:
        """Run the recurrence over x (T, B, I) from the state; see bnrnn.scan."""
        raise NotImplementedError

    def forward(
        self,
        x: Float[Tensor, "T B I"] | Int[Tensor, "T B"],
        state: State | None = None,
        t_start: int | None = None,
        batch_sizes: list[int] | None = None,
    ) -> tuple[Float[Tensor, "T B H"], State]:
        """Run the layer over x.

        Raises BnrnnError for an empty sequence, a wrong input size, a state of other shapes, a negative t_start, wrong
        batch_sizes and, on a CPU, for a NaN or infinity in x and for an id outside 0 ... I - 1.
        """
        self._check(x, t_start or 0, batch_sizes)
        shape, given = (x.shape[1], self.hidden_size), state
        if state is None:
            dtype = torch.promote_types(x.dtype, self.weight_hh.dtype)  # under autocast, x may have a lower precision
            state = tuple(x.new_zeros(shape, dtype=dtype) for _ in self.state_names)
        else:
            check_state(state, self.state_names, shape)
        if not (self.finds_first_step and values_known()):
            return self._in_pieces(x, state, t_start or 0, batch_sizes)
        if self.first_step is None:
            self.first_step = FirstStep(self)
        first = self.first_step.find(t_start, len(x), given)
        y, state = self._in_pieces(x, state, first, batch_sizes)
        self.first_step.remember(state, first + len(x))
        return y, state

    def _in_pieces(
        self, x: Tensor, state: State, t_start: int, batch_sizes: list[int] | None
    ) -> tuple[Float[Tensor, "T B H"], State]:
        """Run the scan. Without gradients, a long sequence is processed in pieces."""
        if torch.is_grad_enabled() or traced() or len(x) * x.shape[1] * len(self.weight_ih) <= MAX_PRODUCT_SIZE:
            return self.scan(x, state, t_start, batch_sizes)
        norms = [module for module in self.children() if isinstance(module, SequenceBatchNorm)]
        whole = any(norm.over_time and norm.uses_batch for norm in norms)
        length = len(x) if whole else max(1, MAX_PRODUCT_SIZE // (x.shape[1] * len(self.weight_ih)))
        ys = []
        for piece in x.split(length):
            sizes, batch_sizes = (batch_sizes[: len(piece)], batch_sizes[len(piece) :]) if batch_sizes else (None, None)
            y, state = self.scan(piece, state, t_start, sizes)
            t_start += len(piece)
            ys.append(y)
        return (ys[0] if len(ys) == 1 else torch.cat(ys)), state

    def _check(self, x: Tensor, t_start: int, batch_sizes: list[int] | None) -> None:
        check_shape(x, self.input_size, type(self).__name__)
        if not traced():  # there it may be symbolic
            check_size("t_start", t_start, at_least=0)
        of_weights = self.weight_ih.dtype
        if x.is_floating_point() and x.dtype != of_weights and not autocast_is_on(x.device):
            raise BnrnnError(f"x is {x.dtype} and the weights are {of_weights}: convert one, x.to({of_weights})")
        if len(x) == 0:
            raise BnrnnError("the sequence has length 0: x must be (T, B, I) with T of at least 1")
        if batch_sizes is not None:
            downwards = [x.shape[1], *batch_sizes, 1]
            if len(batch_sizes) != len(x) or sorted(downwards, reverse=True) != downwards:
                raise BnrnnError(
                    f"batch_sizes must have the number of running sequences for each of the {len(x)} steps, between "
                    f"{x.shape[1]} and 1 and never increasing: got {batch_sizes}"
                )
        if self.checks_finite:
            check_values(x, self.input_size)


def check_type(x: Any, name: str = "x") -> None:
    """Raise BnrnnError unless x is a tensor of real numbers: floating point, or integers that are ids."""
    if not isinstance(x, Tensor):
        raise BnrnnError(f"{name} must be a torch.Tensor, got {type(x).__module__}.{type(x).__name__}")
    if x.is_complex() or x.dtype == torch.bool:
        raise BnrnnError(f"{name} must be floating point, or integers that are ids, got {x.dtype}")


def check_shape(x: Any, input_size: int, of: str) -> None:
    """Raise BnrnnError unless x is floating point and (T, B, I), or ids (T, B). `of` names the layer."""
    check_type(x)
    floating = x.is_floating_point()
    if x.dim() != (3 if floating else 2) or (floating and x.shape[2] != input_size):
        raise BnrnnError(
            f"{of} expects floating-point x of shape (T, B, {input_size}), or ids (T, B) as integers: got shape "
            f"{tuple(x.shape)} of {x.dtype}"
        )


def check_state(state: Any, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Raise BnrnnError unless the state is a tuple of tensors of this shape, one for each name."""
    found = type(state).__name__
    if isinstance(state, (tuple, list)):
        shapes = [tuple(s.shape) if isinstance(s, Tensor) else type(s).__name__ for s in state]
        if shapes == [shape] * len(names):
            return
        found = f"shapes {shapes}"
    raise BnrnnError(f"the state must be a tuple of {' and '.join(names)}, each of shape {shape}; got {found}")


def checked_lengths(lengths: Tensor | list[int], T: int, B: int) -> Int[Tensor, " B"]:
    """Move lengths to the CPU. Raise BnrnnError unless they are B integers between 1 and T."""
    expected = f"lengths must be {B} integers between 1 and {T}, one per sequence; got "
    try:
        found = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise BnrnnError(f"{expected}{lengths!r}") from error
    integers = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if not integers or found.shape != (B,) or B == 0 or found.min() < 1 or found.max() > T:
        raise BnrnnError(f"{expected}{found.tolist()} ({found.dtype})")
    return found.long()


def checked_reset(reset: Any, T: int, B: int) -> Bool[Tensor, "T B"]:
    """Convert reset to bool. Raise BnrnnError unless it is a tensor (T, B) of bool, or of 0 and 1."""
    found = f"{tuple(reset.shape)} of {reset.dtype}" if isinstance(reset, Tensor) else type(reset).__name__
    if not isinstance(reset, Tensor) or reset.shape != (T, B):
        raise BnrnnError(f"reset must be a tensor of shape {(T, B)}, of bool or of 0 and 1: got {found}")
    if reset.dtype != torch.bool and values_known() and not ((reset == 0) | (reset == 1)).all():
        raise BnrnnError(f"reset must be bool, or 0 and 1: got other values in {found}")
    return reset.bool()


def check_values(x: Float[Tensor, "T B I"] | Int[Tensor, "T B"], input_size: int) -> None:
    """Raise BnrnnError with the position of the first NaN or infinity, or of the first id outside 0 ... I - 1.

    The check is skipped where values are unknown, in programs that torch traces and within torch.func, and on a GPU,
    where the program would wait at every call until all earlier work is done.
    """
    if not values_known() or x.device.type != "cpu":
        return
    if not x.is_floating_point():
        wrong = (x < 0) | (x >= input_size)
        if wrong.any():
            t, b = wrong.nonzero()[0].tolist()
            raise BnrnnError(
                f"x must have ids from 0 to {input_size - 1}, got {x[t, b].item()} at time step {t} of sequence {b}"
            )
        return
    if not math.isfinite(x.sum().item()) and not x.isfinite().all():  # the sum alone may overflow
        t, b, _ = (~x.isfinite()).nonzero()[0].tolist()
        raise BnrnnError(f"x has a NaN or infinity, first at time step {t} of sequence {b} of the batch")
