"""How the work of a step is divided: by a rule, and on a GPU by a short measurement that is made once and stored."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import TritonError

from bnrnn.errors import BnrnnError
from bnrnn.scan.native.build import cache_folder
from bnrnn.system.files import write_json

LOG = logging.getLogger("bnrnn")
ROUNDS = 3  # of a measurement; the least time counts
WHOLE_SEQUENCE = ("lstm forward", "lstm backward")  # sizes that have a kernel for whole sequences
GAIN = 0.97  # a candidate replaces the rule's choice if it takes at most so much of its time


@dataclass(frozen=True)
class Division:
    """How a step is divided among programs and threads.

    Args:
        fused: whether the kernel computes the recurrent product itself; cuBLAS does otherwise.
        units: units of a program, J.
        depth: depth K of a tile of the product.
    """

    fused: bool
    units: int
    depth: int
    num_warps: int
    num_stages: int
    whole_sequence: bool = False  # one launch computes all steps

    def options(self) -> dict[str, Any]:
        """Options of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Size:
    """What the best division depends on, beside the device: a step of one recurrence in one direction.

    Args:
        name: of the recurrence and the direction.
        tile: rows of a tile.
        gates: number of gates of a tile, a power of two.
        depth: of the product.
        precision: of the product.
    """

    name: str
    tile: int
    gates: int
    units: int
    depth: int
    precision: str


def tile_of(B: int) -> int:
    """Rows of the tile for B sequences."""
    return max(16, 1 << (B - 1).bit_length())


def by_rule(size: Size) -> Division:
    """A division with which a tile fits into the registers, and its product into shared memory."""
    units, most = 8 if size.units >= 512 or size.tile >= 256 else 16, _most(size)
    num_warps = min(16, max(4, size.tile * size.gates * units // most))
    while size.tile * size.gates * units > most * num_warps and units > 1:
        units //= 2
    # cuBLAS reads the left factor less often than the programs would. The limit is estimated from bandwidths; on a GPU
    # both are measured.
    fused = units >= 8 and size.tile * size.depth <= 2**17
    deep = size.tile <= 128 and size.precision != "float32"  # float32 has no tensor cores: their code is unrolled
    return Division(fused, units, 64 if deep else 32, num_warps, num_stages=3 if size.tile <= 128 else 2)


def _most(size: Size) -> int:
    """Elements of a tile that a warp should have at most, so that they stay in registers."""
    return 32 * (32 if size.name.endswith("forward") else 16)


def candidates(size: Size, processors: int) -> Iterator[Division]:
    """Divisions to measure, the rule's first. `processors` is the number of multiprocessors of the device."""
    rule = by_rule(size)
    seen = {rule}
    yield rule
    fused = replace(rule, fused=True, units=max(8, rule.units))
    others = [fused, replace(rule, fused=False), replace(fused, units=24 - fused.units if fused.units <= 16 else 16),
              replace(fused, num_warps=2 * rule.num_warps)]  # fmt: skip
    if size.name in WHOLE_SEQUENCE and size.units <= 1024:
        others += [replace(v, whole_sequence=True) for v in (fused, others[2])]
    for other in others:
        resident = -(-size.units // other.units) <= processors
        # A kernel with far larger tiles would take minutes to compile, and its values would not stay in registers.
        fits = other.num_warps <= 16 and size.tile * size.gates * other.units <= 2 * _most(size) * other.num_warps
        if other not in seen and fits and (resident or not other.whole_sequence):
            seen.add(other)
            yield other


def division(size: Size, device: torch.device, measure: Callable[[Division], float]) -> Division:
    """The division of a step: by the rule on a CPU and within a caller's graph, else measured once and stored.

    Args:
        measure: runs steps with a division and returns their time; infinity if they err.
    """
    if device.type != "cuda" or os.environ.get("BNRNN_TUNE") == "0":
        return by_rule(size)
    if (size, device) not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return by_rule(size)
        properties = torch.cuda.get_device_properties(device)
        _chosen[size, device] = stored(size, properties.name, properties.multi_processor_count, measure)
    return _chosen[size, device]


def microseconds(run: Callable[[], None]) -> float:
    """The least time of a run on a GPU. The first two, which compile and capture, do not count."""
    times = []
    for _ in range(2 + ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return min(times[2:])


_chosen: dict[tuple[Size, torch.device], Division] = {}


def step_by_step(size: Size, device: torch.device, division: Division, error: Exception) -> Division:
    """The division for the rest of this process, after the launch of a whole sequence failed: one launch a step."""
    message = "%s cannot run (%s): other processes may use the GPU. Its steps are launched one by one, more slowly."
    LOG.warning(message, size.name, (str(error).splitlines() or [""])[0])
    _chosen[size, device] = replace(division, whole_sequence=False)
    return _chosen[size, device]


def stored(size: Size, name: str, processors: int, measure: Callable[[Division], float]) -> Division:
    """The fastest candidate for a device of this name: read from the folder of caches, or measured and written."""
    path, key = _path(name, processors), repr(size)
    known = _read(path)
    if key in known:
        return known[key]
    times = {candidate: _time(measure, candidate) for candidate in candidates(size, processors)}
    best, rule = min(times, key=times.__getitem__), next(iter(times))
    if times[best] > GAIN * times[rule]:
        best = rule
    LOG.info("%s: %s", key, ", ".join(f"{d} {time:.1f} us" for d, time in times.items()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        others = _read(path)  # again: another process may have added its own
        write_json(path, {name: asdict(division) for name, division in {**others, key: best}.items()})
    except (OSError, BnrnnError) as error:
        LOG.warning("%s cannot be written (%s): the GPU's kernels are measured again in each process.", path, error)
    return best


def _time(measure: Callable[[Division], float], candidate: Division) -> float:
    """The time of a candidate; infinity if it needs more registers, memory or multiprocessors than the device has."""
    try:
        return measure(candidate)
    except (TritonError, RuntimeError) as error:
        LOG.info("%s cannot run: %s", candidate, error)
        return math.inf


def _path(name: str, processors: int) -> Path:
    """The file of a device of this name. Under MPS, a process may have only a share of its multiprocessors."""
    versions = "\0".join([name, str(processors), torch.__version__, triton.__version__, _kernels()])
    return cache_folder() / f"divisions-{hashlib.sha256(versions.encode()).hexdigest()[:16]}.json"


@cache
def _kernels() -> str:
    """A hash of the kernels' source: other kernels are measured anew."""
    sources = sorted(Path(__file__).parents[1].rglob("*triton*/*.py")) + sorted(
        Path(__file__).parents[1].rglob("triton*.py")
    )
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _read(path: Path) -> dict[str, Division]:
    """The stored divisions; none if the file is missing or damaged."""
    try:
        return {key: Division(**value) for key, value in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
