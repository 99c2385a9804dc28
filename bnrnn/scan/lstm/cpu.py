"""The recurrence of the LSTM in the compiled kernels (cpu.cpp, layer_norm.cpp), for float32 on the CPU."""

import ctypes
from collections import OrderedDict

from torch import Tensor

from bnrnn.scan.lstm.fused import PARAMETERS, LSTMSteps
from bnrnn.scan.lstm.reference import Statistics, groups_of
from bnrnn.scan.native.build import address, library, pointer, sizes_of
from bnrnn.scan.native.threads import num_threads

MAX_PACKED = 16  # maximum number of packed weights that are kept


class _Lstm(ctypes.Structure):
    """`struct Lstm` of step.h."""

    _fields_ = (
        [(name, ctypes.c_int32) for name in ("T", "B", "H", "batch", "threads", "groups", "noisy")]
        + [(name, ctypes.c_float) for name in ("eps", "zoneout_c", "zoneout_h", "dropout")]
        + [("key", ctypes.c_void_p)]
        + [(name, ctypes.POINTER(ctypes.c_int32)) for name in ("running", "counted")]
        + [(name, ctypes.c_void_p) for name in (
            "weight_hh", *PARAMETERS, "h_0", "c_0", *Statistics._fields, "feature", "weight_ih", "packed", "x", "u",
            "c", "y", "dy", "dh", "dc", *(f"d{name}" for name in PARAMETERS), "dweight_ih", "dweight_hh",
        )]
    )  # fmt: skip


class CompiledLSTM(LSTMSteps):
    """Runs all steps of a sequence in one call of the compiled kernel."""

    def _arguments(self, **others: Tensor) -> _Lstm:
        T, B, H = self.c.shape
        tensors = {"weight_hh": self.weight_hh, "h_0": self.h_0, "c_0": self.c_0, "u": self.u, "c": self.c,
                   "y": self.y, **self.parameters, **self.statistics._asdict(), **others}  # fmt: skip
        x = {"x": self.x} if self.weight_ih is None else {"feature": self.x, "weight_ih": self.weight_ih}
        sizes, levels = sizes_of(self.batch_sizes), {}
        if self.noise is not None:
            levels = self.noise._asdict() | {"key": address(self.noise.key), "noisy": 1}
        return _Lstm(
            T=T, B=B, H=H, batch=int(self.batch and self.over == "batch"), threads=num_threads(), eps=self.eps,
            groups=0 if self.over == "batch" else groups_of(self.over), **levels,
            running=sizes, counted=None if self.ended_count else sizes,
            **{name: address(tensor) for name, tensor in {**x, **tensors}.items()},
        )  # fmt: skip

    @property
    def kernel(self) -> str:
        """The name of the kernel: lstm, or lstm_layer for layer normalization."""
        return "lstm" if self.over == "batch" else "lstm_layer"

    def _run(self, direction: str, **others: Tensor) -> None:
        getattr(library(), f"bnrnn_{self.kernel}_{direction}")(ctypes.byref(self._arguments(**others)))

    def forward(self) -> None:
        pack = _packed if self.u is None else _pack
        self._run("forward", packed=pack(self.weight_hh, self.kernel))

    def backward(self, dy: Tensor, dh: Tensor, dc: Tensor, grads: dict[str, Tensor]) -> None:
        grads["weight_hh"] = self.weight_hh.new_zeros(self.weight_hh.shape[::-1])  # the kernel adds to the transpose
        gradients = {f"d{name}": grad for name, grad in grads.items()}
        self._run("backward", dy=dy, dh=dh, dc=dc, **gradients)
        grads["weight_hh"] = grads["weight_hh"].t()


def _pack(weight_hh: Tensor, kernel: str) -> Tensor:
    """Copy W_hh into the order in which the forward kernel of this name reads it."""
    H = weight_hh.shape[1]
    packed = weight_hh.new_empty(library().bnrnn_lstm_packed_size(H))
    library().bnrnn_lstm_pack(H, pointer(weight_hh), pointer(packed), int(kernel == "lstm"), num_threads())
    return packed


_kept: OrderedDict[tuple[int, int, int, str], Tensor] = OrderedDict()


def _packed(weight_hh: Tensor, kernel: str) -> Tensor:
    """The packed W_hh, kept for evaluation, where the same weights are used again and again.

    Its values, in a fingerprint of 64 bits, are the only identity of a weight: versions miss changes of `weight.data`,
    and addresses are used again. The fingerprint takes about a tenth of the time of packing.
    """
    H = weight_hh.shape[1]
    fingerprint = library().bnrnn_fingerprint(pointer(weight_hh), ctypes.c_int64(weight_hh.numel()))
    key = library()._handle, H, fingerprint, kernel
    packed = _kept.pop(key, None)
    _kept[key] = packed = _pack(weight_hh, kernel) if packed is None else packed
    while len(_kept) > MAX_PACKED:
        _kept.popitem(last=False)
    return packed
