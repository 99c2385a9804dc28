"""The recurrence of recurrent highway networks in the compiled kernel (cpu.cpp), for float32 on the CPU."""

import ctypes

from torch import Tensor

from bnrnn.scan.native.build import address, library, sizes_of
from bnrnn.scan.native.linear import outer
from bnrnn.scan.native.threads import num_threads
from bnrnn.scan.rhn.fused import PARAMETERS, RHNSteps
from bnrnn.scan.rhn.reference import RHNStatistics


class _Rhn(ctypes.Structure):
    """`struct Rhn` of cpu.cpp."""

    _fields_ = (
        [(name, ctypes.c_int32) for name in ("T", "B", "H", "Q", "D", "K", "batch", "threads")]
        + [("eps", ctypes.c_float), ("running", ctypes.POINTER(ctypes.c_int32))]
        + [(name, ctypes.c_void_p) for name in (
            "weight", *PARAMETERS, "s_0", *RHNStatistics._fields, "x", "a", "states", "normal", "dy", "ds",
            *(f"d{name}" for name in PARAMETERS),
        )]
    )  # fmt: skip


class CompiledRHN(RHNSteps):
    """Runs all steps of a sequence in one call of the compiled kernel."""

    def _arguments(self, **gradients: Tensor) -> _Rhn:
        T, D, B, H = self.states.shape
        K = 0 if self.normal is None else self.normal.shape[1]
        tensors = {"weight": self.weight, "s_0": self.s_0, "x": self.x, "a": self.a, "states": self.states,
                   "normal": self.normal, **self.parameters, **self.statistics._asdict(), **gradients}  # fmt: skip
        return _Rhn(
            T=T, B=B, H=H, Q=self.a.shape[3] // H, D=D, K=K, batch=int(self.batch), threads=num_threads(),
            eps=self.eps, running=sizes_of(self.batch_sizes), **{k: address(tensor) for k, tensor in tensors.items()},
        )  # fmt: skip

    def forward(self) -> None:
        library().bnrnn_rhn_forward(ctypes.byref(self._arguments()))

    def backward(self, dy: Tensor, ds: Tensor, grads: dict[str, Tensor]) -> None:
        gradients = {f"d{name}": grad for name, grad in grads.items()}
        library().bnrnn_rhn_backward(ctypes.byref(self._arguments(dy=dy, ds=ds, **gradients)))

    def outer(self, da: Tensor, v: Tensor) -> Tensor:
        return outer(da.contiguous(), v.contiguous())
