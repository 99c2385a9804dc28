"""What a scan looks like to the Triton kernels, whatever the recurrence."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from bnrnn.scan.triton_shared.launches import INTERPRETED
from bnrnn.scan.triton_shared.tuning import Division, Size, tile_of

LOW = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Call(NamedTuple):
    """A kernel that a time step launches: its further arguments, and its constants."""

    kernel: Any
    arguments: tuple[int, ...]
    constants: Any


@dataclass(frozen=True)
class Form:
    """All on which the kernels depend, beside the division of their work. Each recurrence has a subclass."""

    name: ClassVar[str]
    entries: ClassVar[tuple[str, ...]]  # names in the table of the kernels
    parameters: ClassVar[tuple[str, ...]]
    states: ClassVar[tuple[str, ...]]
    statistics: ClassVar[Any]  # named tuple of all means and variances

    device: torch.device
    hidden_size: int
    num_gates: int
    num_layers: int
    tile: int  # rows of a tile
    given: tuple[str, ...]  # names of the parameters that are not None
    batch: bool  # whether to use batch statistics
    padded: bool
    keep: bool  # whether a backward pass follows
    eps: float
    low: torch.dtype  # precision of products
    tf32: bool

    def calls(self, direction: str, division: Division) -> list[Call]:
        """The kernels of a time step, one for each layer."""
        raise NotImplementedError

    def shapes(self, T: int, B: int) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors of a scan, by name."""
        raise NotImplementedError

    def constants(self, division: Division) -> dict[str, Any]:
        """The constants of blocks.py."""
        H, Q = self.hidden_size, self.num_gates
        return {"H": H, "Q": Q, "P": 4 if Q == 3 else Q, "G": Q * H, "J": division.units, "TILE": self.tile,
                "K": division.depth, "FUSED": division.fused, "BATCH": self.batch, "EPS": self.eps,
                "PADDED": self.padded, "KEEP": self.keep, "LOW": LOW[self.low],
                "PRECISION": "tf32" if self.tf32 else "ieee", "ROUND": self.rounds, "WIDEN": INTERPRETED}  # fmt: skip

    @property
    def rounds(self) -> bool:
        """Whether the factors of products are rounded to TF32, which Triton's interpreter does not have."""
        return self.tf32 and self.low == torch.float32 and not INTERPRETED

    def size(self, direction: str) -> Size:
        """What the best division of a step depends on."""
        precision = str(self.low).removeprefix("torch.")
        return Size(
            f"{self.name} {direction}",
            self.tile,
            4 if self.num_gates == 3 else self.num_gates,
            self.hidden_size,
            depth=self.hidden_size * (1 if direction == "forward" else self.num_gates),
            precision="tf32" if self.tf32 and precision == "float32" else precision,
        )


def options(
    x: Tensor, inputs: dict[str, Tensor | None], parameters: tuple[str, ...], population: Any,
    batch_sizes: list[int] | None, eps: float, product_dtype: torch.dtype | None,
) -> dict[str, Any]:  # fmt: skip
    """The fields of a Form, but its sizes, that follow from the arguments of a scan and from torch's settings."""
    return {
        "device": x.device,
        "tile": tile_of(x.shape[1]),
        "given": tuple(name for name in parameters if inputs[name] is not None),
        "batch": population is None,
        "padded": batch_sizes is not None,
        "keep": torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs.values()),
        "eps": eps,
        "low": product_dtype or torch.float32,
        # torch.set_float32_matmul_precision sets it. GPUs before the A100 have no TF32.
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32"
        and (x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= (8, 0)),
    }
