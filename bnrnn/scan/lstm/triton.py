"""The recurrence on a GPU: one fused Triton kernel per time step and direction, or one for the whole sequence.

The kernel of a step also computes the recurrent product, or cuBLAS does, where that is faster (see tuning.py).
Signature and equations are those of fused.py. Products use TF32 if torch allows it
(torch.set_float32_matmul_precision), or bfloat16 or float16 if requested; all other values are float32.

triton_kernels.py lists the arrays.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bnrnn.scan.lstm import reference
from bnrnn.scan.lstm.fused import PARAMETERS
from bnrnn.scan.lstm.reference import Statistics
from bnrnn.scan.lstm.triton_kernels import ENTRIES, Constants, backward_steps, forward_steps
from bnrnn.scan.triton_shared import driver, form
from bnrnn.scan.triton_shared.driver import TritonSteps
from bnrnn.scan.triton_shared.form import Call, Form
from bnrnn.scan.triton_shared.launches import ready
from bnrnn.scan.triton_shared.tuning import Division


@dataclass(frozen=True)
class LSTMForm(Form):
    """The form of an LSTM's scan."""

    name, entries, parameters, states, statistics = "lstm", ENTRIES, PARAMETERS, ("h", "c"), Statistics

    ended_count: bool

    def calls(self, direction: str, division: Division) -> list[Call]:
        constants = Constants(
            **self.constants(division), WHOLE=division.whole_sequence, IH="gamma_ih" in self.given,
            HH="gamma_hh" in self.given, CELL="gamma_c" in self.given, SHIFTED="bias" in self.given,
            CELL_SHIFTED="beta_c" in self.given, ALL_COUNT=self.ended_count or not self.padded,
        )  # fmt: skip
        return [Call(forward_steps if direction == "forward" else backward_steps, (), constants)]

    def shapes(self, T: int, B: int) -> dict[str, tuple[int, ...]]:
        return reference.shapes(T, B, self.hidden_size)


class TritonLSTM(TritonSteps):
    """The arrays of an LSTM's scan, by the names of triton_kernels.ENTRIES."""

    written = {"forward": ("h", "c"), "backward": ("dc", "u")}  # noqa: RUF012

    @classmethod
    def make(
        cls, form: LSTMForm, inputs: dict[str, Any], population: Statistics | None, batch_sizes: list[int] | None,
        overwrite: bool,
    ) -> "TritonLSTM":  # fmt: skip
        """With `overwrite`, the memory of x_proj is used for its normalized values and for its gradient."""
        (T, B, _), H = inputs["x_proj"].shape, form.hidden_size
        arrays = driver.common_arrays(form, inputs, population, batch_sizes, form.shapes(T, B))
        x = arrays["x"]
        arrays |= {"h": x.new_empty(T + 1, B, H), "c": x.new_empty(T + 1 if form.keep else 2, B, H)}
        arrays["h"][0], arrays["c"][0] = inputs["h"], inputs["c"]
        arrays["weight"] = ready(inputs["weight_hh"].detach())
        if form.keep:
            arrays |= {"u": torch.empty_like(x), "normal_x": x}
            if overwrite or x.data_ptr() != inputs["x_proj"].data_ptr():
                arrays["dx"] = x
            elif "gamma_ih" in form.given:
                arrays["normal_x"] = arrays["dx"] = torch.empty_like(x)
        return cls(form, arrays)

    def first_factor(self) -> Tensor:
        return self.arrays["h"][0]

    def results(self) -> tuple[Tensor, Tensor]:
        a = self.arrays
        T = len(a["x"])
        return a["h"][1:].detach(), a["c"][T if self.form.keep else T % 2].clone()

    def gradients(self, dy: Tensor, dc: Tensor) -> dict[str, Tensor | None]:
        of, a = self.form, self.arrays
        given = {"dy": ready(dy), "dc": dc.clone(memory_format=torch.contiguous_format)}
        if of.padded:
            given["dh"] = torch.zeros_like(given["dc"])
        of_parameters = self.backward(**given)
        du = a["u"]
        dh = (du[0].to(of.low) @ a["weight"].to(of.low)).float()
        if of.padded:  # sequences without a single step
            dh += a["dh"] * (torch.arange(len(dh), device=du.device)[:, None] >= a["running"][0])
        left, right = du.flatten(0, 1).to(of.low), a["h"][:-1].flatten(0, 1).to(of.low)
        dweight = (left.t() @ right).float()
        return {"x_proj": a["dx"], "h": dh, "c": a["dc"], "weight_hh": dweight, **of_parameters}


def triton_scan(
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    *,
    eps: float = 1e-5,
    population: Statistics | None = None,
    batch_sizes: list[int] | None = None,
    ended_count: bool = False,
    product_dtype: torch.dtype | None = None,
    overwrite: bool = False,
    **parameters: Tensor | None,
) -> reference.Result:
    """`lstm_scan` of reference.py in float32.

    With `overwrite`, the memory of x_proj is used for its normalized values and for its gradient.
    """
    inputs = {"x_proj": x_proj, "h": h, "c": c, "weight_hh": weight_hh}
    inputs |= {name: parameters.get(name) for name in PARAMETERS}
    of = LSTMForm(
        hidden_size=h.shape[1],
        num_gates=4,
        num_layers=1,
        ended_count=ended_count,
        **form.options(x_proj, inputs, PARAMETERS, population, batch_sizes, eps, product_dtype),
    )
    y, c, used = driver.scan(TritonLSTM, of, inputs, population, batch_sizes, overwrite)
    return y, (y[-1].clone(), c), used
