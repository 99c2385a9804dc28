"""The inputs that the stress test damages: tiny files of every kind that this package reads, with their readers."""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from bnrnn import config
from bnrnn.config import CONF, compose_config
from bnrnn.data.base import SequenceData
from bnrnn.errors import BnrnnError
from bnrnn.report import evidence, trained
from bnrnn.report.claim_tests import claims_of
from bnrnn.report.claims import read_paper
from bnrnn.system.locks import LOCK
from bnrnn.train import train
from bnrnn.training import options, pieces
from bnrnn.training.checkpoint import CHECKPOINT, MODEL
from bnrnn.training.results import FILE, METRICS
from tests.stress.corpora import CORPORA
from tests.stress.kills import HANGS, OPTIONS
from tests.stress.processes import run
from tests.test_train import interrupt_at

# Why damage of some kinds may be accepted, though the content that is read differs.
REASONS = {
    "claims": "another valid text or number: `make check` and git show it",
    "options": "another valid option: it is recorded in result.json",
}
CLAIMS = """paper: A paper
table1:
  {title: Table 1, rows: model, cols: data, published: [
    {what: accuracy, metric: test/accuracy, digits: 2, tolerance: 0.5, cells: {lstm: {pmnist: 98.9}}}]}
claims:
  C1: {says: a is better than b, where: Table 1, tests: [{scope: paper, rule: diverges, experiment: table1,
    where: {data: pmnist}, of: {model: lstm}, than: {model: bn_lstm}}]}
"""


@dataclass
class Input:
    """A kind of input: a folder with good files, which of them may be damaged, and how the folder is read.

    A message may have one of `names` instead of the path: an option is known by its key, whatever file it comes from.
    """

    name: str
    folder: Path
    read: Callable[[], Any]
    files: list[Path]
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.good = contents(self.folder)

    def restore(self) -> None:
        """Make the folder good again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for path, content in self.good.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def contents(folder: Path) -> dict[Path, bytes]:
    """All files in a folder except locks, which a reader may write."""
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != LOCK}


def fingerprint(value: Any) -> str:
    """A hash of what was read, to see whether damage has changed it."""
    if isinstance(value, SequenceData):
        return pieces.digest(value, 2)
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.nn.Module):
        return _plain(value.state_dict())
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (tuple, list)) else value


def make_inputs(folder: Path) -> list[Input]:
    """Good files of all kinds, each kind in a folder of its own."""
    found = []
    for n, (name, make) in enumerate(CORPORA.items()):
        data = folder / f"corpus{n}"
        read = make(data)
        found.append(Input(name, data, lambda read=read, data=data: read(data), list(contents(data))))
    claims = folder / "claims/cooijmans2016/claims.yaml"  # of a paper that has the recipes
    claims.parent.mkdir(parents=True)
    claims.write_text(CLAIMS)
    found.append(Input("claims", claims.parent, lambda: claims_of(read_paper.__wrapped__(claims)), [claims]))
    return [*found, *_runs(folder / "runs"), _options(folder / "conf")]


def _runs(folder: Path) -> list[Input]:
    """A finished run, as the pages and programs with its model read it, and one that is to be resumed."""
    cfg, output = compose_config(*OPTIONS), folder / "output"
    finished, begun = folder / cfg.name / "paper/seed=0", folder / "begun"
    folder.mkdir()
    if run(lambda: train(cfg, finished, {"seed": "0"}), output, HANGS) != 0:
        raise BnrnnError(f"a training failed: {output.read_text()}")
    run(lambda: interrupt_at(6, cfg, begun), output, HANGS)
    return [
        Input("result and metrics, for pages", finished,
              lambda: evidence.read_run(cfg.name, finished / FILE, folder).result,
              [finished / FILE, finished / METRICS]),
        Input("trained model", finished, lambda: trained.load_trained(finished, "")[0],
              [finished / FILE, finished / MODEL]),
        Input("checkpoint and metrics, resumed", begun, lambda: train(cfg, begun).metrics,
              [begun / CHECKPOINT, begun / METRICS]),
    ]  # fmt: skip


def _options(folder: Path) -> Input:
    """The configuration files of a training of the quickstart."""
    shutil.copytree(CONF, folder)
    names = ("train", "model/bn_lstm", "data/digits", "optim/rmsprop", "init/cooijmans",
             "experiment/quickstart", "budget/paper")  # fmt: skip

    def read() -> Any:
        for module in (config, options):
            vars(module)["CONF"] = folder
        with config.checking_files():
            cfg = compose_config("experiment=quickstart")
            options.check_options(cfg)
        return OmegaConf.to_container(cfg)

    keys = [*options.keys_of(compose_config("experiment=quickstart")), "hydra.mode", "hydra.sweeper.params"]
    return Input("options", folder, read, [folder / f"{name}.yaml" for name in names], names=keys)
