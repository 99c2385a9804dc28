"""CUDA graphs, which launch many kernels at once, and the engine `fused` as such graphs."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bnrnn.errors import first_line
from bnrnn.scan.arguments import form_of

NEAR = 0.05  # a graph may round in another way than single launches, but one that reads other memory errs by more
SMALL = 1e-2  # the error of a tensor is relative to its norm, and to at least this part of the largest norm
MAX_FORMS = 16  # so many are remembered; the one that was not used for longest is forgotten first


def captured(run: Callable[[], None]) -> Any:
    """A CUDA graph of what `run` launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def possible(device: torch.device) -> bool:
    """Whether launches on a device can be captured now: not if they become part of a graph that the caller captures."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class Captured:
    """`Steps` of the engine `fused`, with one CUDA graph for the forward pass and one for the backward pass.

    A graph works on memory of its own. The values of a scan are therefore copied there and back, which takes far less
    time than to launch some thirty kernels for each step. Only what the steps write is copied back: a weight may belong
    to several scans, and autograd would take the copy for a change of it. The first replay of a graph is compared with
    what the steps compute. On a CPU the steps run as they are, and so do those of padded batches, which rarely have the
    same form twice.

    Args:
        engine: the class of the steps.
        values: their values by name.
    """

    def __init__(self, engine: Callable[..., Any], **values: Any) -> None:
        self.steps = engine(**values)
        can = possible(self.steps.x.device) and self.steps.batch_sizes is None
        self.graphs = _graphs(self.steps) if can else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.steps, name)

    def fields(self) -> dict[str, Any]:
        return self.steps.fields()

    def results(self) -> tuple[Tensor, Tensor]:
        return self.steps.results()

    def forward(self) -> None:
        run = None if self.graphs is None else self.graphs.run("forward", self.steps)
        if self.graphs is None or run is None:
            return self.steps.forward()
        names = (*self.steps.written, "statistics") if self.steps.batch else self.steps.written
        if not run.is_proved:
            self.steps.forward()
            return self.graphs.prove("forward", _tensors(self.graphs.steps, names), _tensors(self.steps, names))
        _copy(_tensors(self.steps, names), _tensors(self.graphs.steps, names))

    def gradients(self, *given: Tensor) -> dict[str, Tensor | None]:
        run = None if self.graphs is None else self.graphs.run("gradients", self.steps, *given)
        if self.graphs is None or run is None:
            return self.steps.gradients(*given)
        if not run.is_proved:
            gradients = self.steps.gradients(*given)
            self.graphs.prove("gradients", _only_tensors(run.result), _only_tensors(gradients))
            return gradients
        return tree_map_only(Tensor, torch.clone, run.result)


class _Graphs:
    """The graphs of all scans of one form, and the memory that they use."""

    def __init__(self) -> None:
        self.runs, self.passes = Counter[str](), dict[str, _Pass | None]()
        self.steps: Any = None  # of the same kind as those of the scans; made when they are first needed

    def run(self, name: str, steps: Any, *given: Tensor) -> "_Pass | None":
        """Run one method of `steps` as a graph. Returns None if the method must be called instead.

        It must be called at first, since torch's libraries prepare themselves in ways that cannot be captured.
        """
        self.runs[name] += 1
        if self.runs[name] == 1:
            return None
        if name not in self.passes:
            self.passes[name] = self._capture(name, steps, given)
        found = self.passes[name]
        if found is not None:
            _copy([*_tensors(self.steps), *found.given], [*_tensors(steps), *given])
            found.graph.replay()
        return found

    def _capture(self, name: str, steps: Any, given: tuple[Tensor, ...]) -> "_Pass | None":
        try:
            if self.steps is None:
                self.steps = type(steps)(
                    **{field: tree_map_only(Tensor, torch.clone, v) for field, v in vars(steps).items()}
                )
            return _Pass(getattr(self.steps, name), given)
        except RuntimeError as error:  # such as a lack of memory
            _say_why_not(first_line(error))
            return None

    def prove(self, name: str, found: list[Tensor], expected: list[Tensor]) -> None:
        """Compare what a graph has computed at its first replay. If it is something else, the method runs instead."""
        run = self.passes[name]
        if run is not None and _agree(found, expected):
            run.is_proved = True
        else:
            _say_why_not("its replay computes something else")
            self.passes[name] = None


class _Pass:
    """A captured method, the memory of its arguments, and that of its result."""

    def __init__(self, method: Callable[..., Any], given: tuple[Tensor, ...]) -> None:
        self.method, self.result, self.is_proved = method, None, False
        self.given = [value.clone(memory_format=torch.contiguous_format) for value in given]
        self.graph = captured(self._call)

    def _call(self) -> None:
        self.result = self.method(*self.given)


_known: OrderedDict[Hashable, _Graphs] = OrderedDict()


def _graphs(steps: Any) -> _Graphs:
    """The graphs of scans that have the form of `steps`, on the current stream."""
    device = steps.x.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = type(steps), stream, *map(form_of, tree_leaves(vars(steps)))
    graphs = _known[key] = _known.pop(key, None) or _Graphs()
    while len(_known) > MAX_FORMS:
        _known.popitem(last=False)
    return graphs


def _tensors(steps: Any, names: Iterable[str] | None = None) -> list[Tensor]:
    """The tensors of the steps: all, or those in the fields of these names."""
    return _only_tensors([getattr(steps, name) for name in names or vars(steps)])


def _only_tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether tensors are the same up to rounding. If NaN or infinity is expected, they count as the same."""
    norms = torch.stack([value.norm().double() for value in expected])
    errors = torch.stack([(a - b).norm().double() for a, b in zip(found, expected, strict=True)])
    near = errors <= NEAR * norms.clamp_min(SMALL * norms.max())
    return bool((near.all() | ~norms.isfinite().all()).item())


def _say_why_not(problem: str) -> None:
    message = "The engine `fused` cannot be captured as a CUDA graph (%s). It runs step by step, more slowly."
    logging.getLogger("bnrnn").warning(message, problem)


def _copy(to: list[Tensor], given: list[Tensor]) -> None:
    torch._foreach_copy_(to, given)  # pyright: ignore[reportPrivateImportUsage]
