"""The recurrences of GRU and light GRU in the compiled kernel (cpu.cpp), for float32 on the CPU."""

import ctypes

from torch import Tensor

from bnrnn.scan.gru.fused import PARAMETERS, GRUSteps
from bnrnn.scan.native.build import address, library, sizes_of
from bnrnn.scan.native.threads import num_threads


class _Gru(ctypes.Structure):
    """`struct Gru` of cpu.cpp."""

    _fields_ = (
        [(name, ctypes.c_int32) for name in ("T", "B", "H", "Q", "relu", "keep", "threads")]
        + [("eps", ctypes.c_float), ("running", ctypes.POINTER(ctypes.c_int32))]
        + [(name, ctypes.c_void_p) for name in (
            "weight_hh", *PARAMETERS, "h_0", "x", "u", "rstd", "y", "dy", "dh", *(f"d{name}" for name in PARAMETERS),
            "dweight_hh",
        )]
    )  # fmt: skip


class CompiledGRU(GRUSteps):
    """Runs all steps of a sequence in one call of the compiled kernel."""

    def _arguments(self, **gradients: Tensor) -> _Gru:
        T, B, H = self.y.shape
        tensors = {"weight_hh": self.weight_hh, "h_0": self.h_0, "x": self.x, "u": self.u, "rstd": self.rstd,
                   "y": self.y, **self.parameters, **gradients}  # fmt: skip
        return _Gru(
            T=T, B=B, H=H, Q=self.x.shape[2] // H, relu=int(self.nonlinearity == "relu"), keep=int(self.keep),
            threads=num_threads(), eps=self.eps, running=sizes_of(self.batch_sizes),
            **{name: address(tensor) for name, tensor in tensors.items()},
        )  # fmt: skip

    def forward(self) -> None:
        library().bnrnn_gru_forward(ctypes.byref(self._arguments()))

    def backward(self, dy: Tensor, dh: Tensor, grads: dict[str, Tensor]) -> None:
        dweight = self.weight_hh.new_zeros(self.weight_hh.shape[::-1])  # the kernel adds to the transpose
        gradients = {f"d{name}": grad for name, grad in grads.items()}
        arguments = self._arguments(dy=dy, dh=dh, dweight_hh=dweight, **gradients)
        library().bnrnn_gru_backward(ctypes.byref(arguments))
        grads["weight_hh"] = dweight.t()
