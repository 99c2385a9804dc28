"""Finds the finished runs of an experiment whose models are there, and loads these models."""

from pathlib import Path
from typing import Any

from bnrnn.config import check_targets
from bnrnn.errors import BnrnnError
from bnrnn.report.claim_types import cell_of
from bnrnn.report.evidence import Evidence, in_figures
from bnrnn.report.run import Run
from bnrnn.system.files import reading
from bnrnn.training.build import rebuilt
from bnrnn.training.checkpoint import MODEL, load
from bnrnn.training.results import FILE, Result


def load_trained(folder: Path, data_dir: str) -> tuple[Any, Any]:
    """The selected model of a finished run, ready for evaluation with its population statistics, and its data.

    Raises BnrnnError for a folder without a result or without a model, for weights of another model, and for a
    configuration that names what no file in conf/ names.
    """
    for name in (FILE, MODEL):
        if not (folder / name).exists():
            raise BnrnnError(
                f"{folder / name} is missing: expected the folder of a finished run with its model. Models are not "
                "part of the repository: remove the folder and train the run again, or use another run"
            )
    saved = load(folder / MODEL)
    assert saved is not None
    config = Result.read(folder / FILE).config
    check_targets({name: config[name] for name in ("data", "model")}, folder / FILE)
    with reading(folder / MODEL, "train the run again", f"a model of the configuration in {FILE}"):
        return built(config, saved["model"], data_dir)


def built(config: dict[str, Any], weights: dict[str, Any], data_dir: str) -> tuple[Any, Any]:
    """The model of a configuration with these weights, in evaluation mode, and its data."""
    data, model = rebuilt(config, data_dir)
    model.load_state_dict(weights)
    return model.eval(), data


def trained_runs(key: str, evidence: Evidence, **where: str) -> list[Run]:
    """The finished runs of an experiment that have their models: those of the greatest length that all cells have.

    Cells without a model are left out.

    Args:
        where: values of the grid. Only cells that have them count.

    Raises BnrnnError if there is no such run, or no common length.
    """
    found, folder = in_figures(key, evidence.runs(key)), evidence.folder
    runs = [run for run in found if (run.folder / MODEL).exists() and where.items() <= run.overrides.items()]
    if not runs:
        raise BnrnnError(f"{folder / key} has no finished run with its model: train {key} first, into {folder}")
    lengths: dict[str, set[int]] = {}
    for run in runs:
        lengths.setdefault(" ".join(cell_of(run.overrides).values()), set()).add(run.result.updates)
    common = set.intersection(*lengths.values())
    if not common:
        listed = "; ".join(f"{cell}: {sorted(found)}" for cell, found in lengths.items())
        raise BnrnnError(
            f"{folder / key} has no models of equal length (updates of {listed}): train all of {key} with one "
            f"budget, into {folder}"
        )
    return [run for run in runs if run.result.updates == max(common)]
