"""Runs the Triton kernels of a scan: divides their work, launches them, and measures them on random data."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor
from triton.runtime.errors import TritonError

from bnrnn.scan import autograd
from bnrnn.scan.transfer import to_device
from bnrnn.scan.triton_shared import tuning
from bnrnn.scan.triton_shared.form import Form
from bnrnn.scan.triton_shared.launches import INTERPRETED, Launches, launches, ready
from bnrnn.scan.triton_shared.tuning import Division


@dataclass
class TritonSteps:
    """All time steps of a scan: its form, and its arrays by the names of the table's entries.

    Each recurrence has a subclass. bnrnn.scan.autograd says what the methods do that are not described here.
    """

    written: ClassVar[dict[str, tuple[str, ...]]]  # arrays by which a kernel of whole sequences is checked

    form: Any
    arrays: dict[str, Tensor]

    @classmethod
    def make(
        cls,
        form: Any,
        inputs: dict[str, Tensor | None],
        population: Any,
        batch_sizes: list[int] | None,
        overwrite: bool,
    ) -> "TritonSteps":
        """The steps of a scan with these arguments, and memory for what it computes."""
        raise NotImplementedError

    def first_factor(self) -> Tensor:
        """The left factor of the first product of the forward pass."""
        raise NotImplementedError

    def results(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def gradients(self, dy: Tensor, dlast: Tensor, /) -> dict[str, Tensor | None]:
        raise NotImplementedError

    def fields(self) -> dict[str, Any]:
        return vars(self)

    def forward(self) -> None:
        self.run("forward")

    def backward(self, **given: Tensor) -> dict[str, Tensor]:
        """Run the steps backward, given arrays of gradients. Returns the gradients of the parameters by name."""
        a = self.arrays
        gradients = {name: torch.zeros_like(a[name]) for name in self.form.given}
        if "dx" not in a:
            a["dx"] = torch.empty_like(a["x"])
        a |= given | {f"d{name}": value for name, value in gradients.items()}
        self.run("backward")
        return gradients

    def run(self, direction: str) -> None:
        """Launch all steps in this direction, in the fastest way that is known."""
        T, B, _ = self.arrays["x"].shape
        size, device = self.form.size(direction), self.form.device
        division = tuning.division(size, device, partial(measure, type(self), self.form, T, B, direction))
        try:
            self.launch(direction, division)
        except (TritonError, RuntimeError) as error:
            if not division.whole_sequence:
                raise
            self.launch(direction, tuning.step_by_step(size, device, division, error))

    def launch(self, direction: str, division: Division) -> None:
        """Launch all steps in this direction, divided in this way."""
        of, a = self.form, self.arrays
        T, B, _ = a["x"].shape
        forward = direction == "forward"
        key = (of, direction, division, None if division.fused else B)
        of_form = launches(key, of.device, partial(_launches, of, B, direction, division))
        weight = a["weight"].to(of.low)
        if division.whole_sequence:  # which is fused
            of_form.fixed["arrived"].zero_()
        if division.fused:
            weight = weight if forward else weight.transpose(-2, -1).contiguous()
            weight = nearest_tf32(weight) if of.rounds else weight
        else:
            of_form.fixed["weight"].copy_(weight)
            if forward:
                of_form.fixed["state"].copy_(self.first_factor())
            else:
                of_form.fixed["state"].zero_()  # after the last step
        clock = 0 if forward else T - 1
        of_form.run(T, {**a, "weight": weight, "clock": clock, "steps": T, "batch_size": B})


def nearest_tf32(x: Tensor) -> Tensor:
    """The nearest numbers that TF32 has, in float32; of two, the larger one in magnitude. NaN stays NaN."""
    rounded = (x.view(torch.int32) + (1 << 12)) & -(1 << 13)
    return rounded.view(torch.float32).where(~x.isnan(), x)


def _launches(of: Form, B: int, direction: str, division: Division) -> Launches:
    """The launches of one direction. Those with cuBLAS have fixed buffers for its factors and its result."""
    D, H, G = of.num_layers, of.hidden_size, of.num_gates * of.hidden_size
    forward = direction == "forward"
    calls = of.calls(direction, division)
    grid, options, fixed = (triton.cdiv(H, division.units),), division.options(), dict[str, Tensor]()
    if division.whole_sequence:
        fixed["arrived"] = torch.zeros(1, dtype=torch.int32, device=of.device)
        # The driver refuses a cooperative launch whose programs cannot all be resident.
        options |= {} if INTERPRETED else {"launch_cooperative_grid": True}
    elif not division.fused:
        shapes = {"weight": (D, G, H), "state": (B, H if forward else G), "product": (B, G if forward else H)}
        fixed = {name: torch.empty(shape, dtype=of.low, device=of.device) for name, shape in shapes.items()}

    def step(table: Tensor, offset: int) -> None:
        for d in range(D) if forward else reversed(range(D)):
            if not division.fused:
                weight = fixed["weight"][d].t() if forward else fixed["weight"][(d + 1) % D]
                torch.mm(fixed["state"], weight, out=fixed["product"])
            kernel, arguments, constants = calls[d]
            kernel[grid](table, offset, *arguments, constants, **options)

    name = f"{of.name} {direction}"
    return Launches(name, of.device, of.entries, step, 1 if forward else -1, fixed, division.whole_sequence)


def scan(
    kind: type[TritonSteps], of: Form, inputs: dict[str, Tensor | None], population: Any, batch_sizes: list[int] | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Any]:  # fmt: skip
    """Run a scan with these tensors by name. Returns y, the last state, and the statistics that were used."""
    with torch.no_grad():
        steps = kind.make(of, inputs, population, batch_sizes, overwrite)
    y, last = autograd.run(kind, steps, inputs)
    return y, last, of.statistics(*(steps.arrays.get(name) for name in of.statistics._fields))


def common_arrays(
    of: Form, inputs: dict[str, Tensor | None], population: Any, batch_sizes: list[int] | None,
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, Tensor]:  # fmt: skip
    """The input product, the parameters, the sizes and the statistics: the population's, or memory for the batch's."""
    arrays = {name: ready(value.detach()) for name in of.parameters if (value := inputs[name]) is not None}
    arrays["x"] = x = ready(inputs["x_proj"].detach())  # pyright: ignore[reportOptionalMemberAccess]
    for name, value in (population or of.statistics())._asdict().items():
        if inputs[f"gamma_{name.partition('_')[2]}"] is not None:
            arrays[name] = x.new_empty(shapes[name]) if value is None else ready(value.detach())
    if batch_sizes is not None:  # followed by 0, as the kernels read them
        arrays["running"] = to_device(torch.tensor([*batch_sizes, 0], dtype=torch.int32), x.device)
    return arrays


def measure(kind: type[TritonSteps], of: Form, T: int, B: int, direction: str, division: Division) -> float:
    """Microseconds of a kernel of a step with this division, on random data.

    Infinity for a kernel of whole sequences that does not give what single steps give.
    """
    T = min(T, 32)
    steps = _on_random_data(kind, of, T, B)
    if division.whole_sequence:
        expected = _on_random_data(kind, of, T, B)
        expected.launch(direction, replace(division, whole_sequence=False))
        steps.launch(direction, division)
        pairs = [(steps.arrays[name], expected.arrays[name]) for name in kind.written[direction]]
        if not all(torch.allclose(found, ref, 1e-3, 1e-4) for found, ref in pairs):
            return math.inf
    return tuning.microseconds(partial(steps.launch, direction, division)) / (T * of.num_layers)


def _on_random_data(kind: type[TritonSteps], of: Form, T: int, B: int) -> TritonSteps:
    """Steps with random numbers in all arrays, the same at every call, ready for a pass in either direction."""
    generator = torch.Generator(of.device).manual_seed(0)  # not the one that a training draws from

    def draw(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, device=of.device, generator=generator)

    shapes = of.shapes(T, B)
    absent = {*of.parameters} - {*of.given}
    inputs = {name: None if name in absent else draw(*shape) for name, shape in shapes.items()}
    population = None if of.batch else of.statistics(*(inputs[name] for name in of.statistics._fields))
    steps = kind.make(of, inputs, population, [B] * T if of.padded else None, overwrite=True)
    for name, value in steps.arrays.items():
        if value.is_floating_point():
            value.copy_(draw(*value.shape).abs() if name.startswith("var") else draw(*value.shape))
    steps.arrays |= {f"d{name}": torch.zeros_like(steps.arrays[name]) for name in of.given}
    steps.arrays |= {f"d{name}": draw(B, of.hidden_size) for name in of.states} | {"dy": draw(T, B, of.hidden_size)}
    steps.arrays.setdefault("dx", draw(*shapes["x_proj"]))
    return steps
