"""What a scan looks like to the Triton kernels, whatever the recurrence."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from bnrnn.scan.transfer import to_device
from bnrnn.scan.triton_shared.launches import INTERPRETED
from bnrnn.scan.triton_shared.tuning import Size, tile_of

LOW = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Form:
    """All on which the kernels depend, beside the division of their work. Recurrences add to it."""

    device: torch.device
    hidden_size: int
    tile: int  # rows of a tile
    given: tuple[str, ...]  # names of the parameters that are not None
    batch: bool  # whether to use batch statistics
    padded: bool
    keep: bool  # whether a backward pass follows
    eps: float
    low: torch.dtype  # precision of products
    tf32: bool

    def constants(self) -> dict[str, Any]:
        """Compile-time constants of all kernels."""
        return {"H": self.hidden_size, "TILE": self.tile, "BATCH": self.batch, "PADDED": self.padded,
                "LOW": LOW[self.low], "WIDEN": INTERPRETED, "PRECISION": "tf32" if self.tf32 else "ieee"}  # fmt: skip

    def size(self, name: str, num_replicas: int, num_gates: int, direction: str) -> Size:
        """What the best division of a step depends on."""
        precision = str(self.low).removeprefix("torch.")
        return Size(
            f"{name} {direction}",
            num_replicas,
            self.tile,
            4 if num_gates == 3 else num_gates,
            self.hidden_size,
            depth=self.hidden_size * (1 if direction == "forward" else num_gates),
            precision="tf32" if self.tf32 and precision == "float32" else precision,
        )


def options(
    x: Tensor, inputs: tuple[Tensor | None, ...], given: dict[str, Tensor | None], population: Any,
    batch_sizes: list[int] | None, eps: float, product_dtype: torch.dtype | None,
) -> dict[str, Any]:  # fmt: skip
    """The fields of a Form, but its hidden_size, that follow from the arguments of a scan and from torch's settings."""
    return {
        "device": x.device,
        "tile": tile_of(x.shape[-2]),
        "given": tuple(name for name, p in given.items() if p is not None),
        "batch": population is None,
        "padded": batch_sizes is not None,
        "keep": torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs),
        "eps": eps,
        "low": product_dtype or torch.float32,
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",  # torch.set_float32_matmul_precision sets it
    }


def sizes(batch_sizes: list[int], device: torch.device) -> Tensor:
    """batch_sizes, followed by 0, as kernels read them."""
    return to_device(torch.tensor([*batch_sizes, 0], dtype=torch.int32), device)
