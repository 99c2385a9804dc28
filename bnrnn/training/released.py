"""Released models: the selected weights of finished runs, small enough for the repository, as safetensors.

A file has no population statistics, because those of 784 time steps take 34 times as much space as the weights. They
are estimated again from the training images when the model is loaded, in the way in which the run estimated them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bnrnn.config import check_targets, with_present_paths
from bnrnn.data.base import SHUFFLED, SequenceData, evaluation_generator, sha256
from bnrnn.errors import BnrnnError
from bnrnn.layers.population import estimate_population_statistics
from bnrnn.system.files import atomic_write, make_folder, read_bytes, reading
from bnrnn.training.build import rebuilt
from bnrnn.training.checkpoint import MODEL, load
from bnrnn.training.results import FILE, MODELS, Result

FORMAT = "bnrnn released model 1"
ABOUT = ("overrides", "config", "metrics", "updates", "best_update", "commits", "data")  # entries of the result
STATISTICS = ("pop_mean", "pop_var")
REMEDY = "restore it with git"


def release(run_dir: Path, path: Path) -> None:
    """Write the selected model of a finished run. Raises BnrnnError if the folder has no result or no model."""
    from safetensors.torch import save

    saved = load(run_dir / MODEL)
    if saved is None or not (run_dir / FILE).exists():
        raise BnrnnError(f"{run_dir} is not the folder of a finished run with its model: train the run to its end")
    result = Result.read(run_dir / FILE)
    told = {name: json.dumps(getattr(result, name), sort_keys=True) for name in ABOUT}
    weights = {k: v.contiguous() for k, v in saved["model"].items() if k.rpartition(".")[2] not in STATISTICS}
    make_folder(path.parent)
    told |= {"format": FORMAT, "experiment": result.name, "sha256": sha256(_tensors(save(weights)))}
    with atomic_write(path) as file:
        file.write(_ordered(save(weights, told)))


def released_path(folder: Path, overrides: dict[str, str]) -> Path:
    """Where the released model of a run is stored, below the folder of its experiment."""
    name = "-".join(f"{'seed' if key == 'seed' else ''}{value}" for key, value in overrides.items())
    return folder / MODELS / f"{name.replace('/', '_')}.safetensors"


def about(path: Path) -> dict[str, Any]:
    """What a released model says about itself: `experiment` and the entries ABOUT. May raise BnrnnError."""
    return _read(path)[0]


def load_released(path: Path | str, data_dir: Path | str) -> tuple[nn.Module, SequenceData]:
    """A released model in evaluation mode, with its population statistics, and its data.

    Estimating the statistics takes one pass over the training set: a minute or two for MNIST on one core.

    Raises BnrnnError for a file that is damaged or no released model, and if the data is missing.
    """
    given, weights = _read(Path(path))
    model, data = _built(Path(path), given["config"], weights, str(data_dir))
    estimate(model, data, given["config"])
    return model, data


def estimate(model: nn.Module, data: SequenceData, config: dict[str, Any], num_batches: int | None = None) -> None:
    """Estimate the population statistics from the training set as the run did, or from its first batches only."""
    generator = evaluation_generator(SHUFFLED, "train", config["seed"])
    batches = data.batches("train", config["population_batch_size"], generator)
    most = config["budget"]["population_batches"] if num_batches is None else num_batches
    with torch.random.fork_rng([]):
        torch.manual_seed(config["seed"])  # of the noise on the initial state
        chosen = (batch.inputs for n, batch in enumerate(batches) if most is None or n < most)
        estimate_population_statistics(model, chosen)


def _built(
    path: Path, config: dict[str, Any], weights: dict[str, Tensor], data_dir: str
) -> tuple[nn.Module, SequenceData]:
    check_targets({name: config[name] for name in ("data", "model")}, path)
    data, model = rebuilt(config, data_dir)
    with reading(path, REMEDY, "a released model"):
        missing, unknown = model.load_state_dict(weights, strict=False)
        if unknown or any(name.rpartition(".")[2] not in STATISTICS for name in missing):
            raise ValueError(f"its weights do not fit the model: {', '.join([*unknown, *missing])}")
    return model.eval(), data


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors.torch import load as loaded

    what = "a released model"
    with reading(path, REMEDY, what):
        content = read_bytes(path, REMEDY, what)
        header = json.loads(content[8 : 8 + _header_size(content)])["__metadata__"]
        if header.get("format") != FORMAT:
            raise ValueError(f"its format is {header.get('format')!r}, expected {FORMAT!r}")
        if header["sha256"] != sha256(_tensors(content)):
            raise ValueError("its weights do not have their checksum")
        given = {"experiment": header["experiment"], **{name: json.loads(header[name]) for name in ABOUT}}
        given["config"] = with_present_paths(given["config"])
        return given, loaded(content)


def _ordered(content: bytes) -> bytes:
    """The same file with its header in alphabetical order: safetensors writes it in another order each time."""
    header = json.dumps(json.loads(content[8 : 8 + _header_size(content)]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of 8
    return len(header).to_bytes(8, "little") + header + _tensors(content)


def _header_size(content: bytes) -> int:
    """The length of the header in JSON, which begins at byte 8 of a safetensors file; the tensors follow."""
    return int.from_bytes(content[:8], "little")


def _tensors(content: bytes) -> bytes:
    return content[8 + _header_size(content) :]
