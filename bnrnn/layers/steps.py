"""At which time step a call begins, if a layer with statistics per step gets a state but no `t_start`."""

import sys
import warnings
from collections import deque
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.scan.tracing import values_known


class FirstStep:
    """Finds the first time step of each call of a layer, and warns once if the layer cannot know it.

    A call with a state and without `t_start` begins at step 0. That is right for a decoder that begins with the state
    of an encoder, and for windows of a text if training has seen such windows. It is wrong for pieces of one sequence.
    A call continues a piece if its state, detached or not, is one that the layer returned less than t_max steps after
    the beginning, or that it returned later and training has never seen this. A state may also be a reordered copy:
    two calls of a single step in a row are taken for pieces too.
    """

    def __init__(self, module: nn.Module) -> None:
        norms = [norm for norm in module.modules() if isinstance(norm, SequenceBatchNorm) and norm.t_max > 1]
        self.norm = norms[0] if norms else None  # None: all steps have the same statistics
        # The storages of states that were returned, with the number of steps before. A weak reference frees the memory
        # of a state and keeps its address from being used again.
        self.returned: deque[tuple[StorageWeakRef, int]] = deque(maxlen=16)
        self.was_single = self.has_seen_windows = self.has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"returned": deque(maxlen=16)}  # a copy has returned nothing yet

    def find(self, t_start: int | None, num_steps: int, state: tuple[Tensor, ...] | None) -> int:
        """The first step of a call."""
        if self.norm is None or not values_known():
            return t_start or 0
        single = t_start is None and state is not None and num_steps == 1
        if t_start is None and state is not None:
            steps_before = self._steps_before(state)
            is_window = steps_before is not None and steps_before >= self.norm.t_max
            learns = self.norm.training or self.norm.collecting
            self.has_seen_windows |= is_window and learns
            is_piece = self.was_single and single if steps_before is None else not (is_window and self.has_seen_windows)
            counts = self.norm.collecting or (self.norm.training and self.norm.running)
            if is_piece and (counts or not self.norm.uses_batch):
                self._warn("counted as" if counts else "normalized with those of")
        self.was_single = single
        return t_start or 0

    def remember(self, state: tuple[Tensor, ...], steps_before: int) -> None:
        """Remember the state that a call returns after so many steps."""
        if self.norm is not None and values_known():
            self.returned.extend((StorageWeakRef(value.untyped_storage()), steps_before) for value in state)

    def _steps_before(self, state: tuple[Tensor, ...]) -> int | None:
        """After how many steps this layer returned the state, or None if the state is another one."""
        addresses = {value.untyped_storage()._cdata for value in state}
        return next((steps for ref, steps in reversed(self.returned) if ref.cdata in addresses), None)

    def _warn(self, what: str) -> None:
        if self.has_warned:
            return
        self.has_warned = True
        level, frame = 1, sys._getframe()
        while frame.f_back and frame.f_globals.get("__name__", "").startswith(("bnrnn.", "torch.", "jaxtyping.")):
            level, frame = level + 1, frame.f_back
        warnings.warn(
            f"this call continues an earlier one without t_start, so that its statistics are {what} steps 0 and later: "
            "pass t_start, the number of steps before the call; or t_start=0, if this is a window of a text and "
            "training used such windows",
            stacklevel=level,
        )
