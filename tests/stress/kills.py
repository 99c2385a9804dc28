"""Kills real trainings at random moments. Each must end as an undisturbed one, bit for bit."""

import random
import shutil
import time
from collections import Counter
from pathlib import Path

from hydra.utils import instantiate

from bnrnn.config import compose_config
from bnrnn.errors import BnrnnError
from bnrnn.train import train
from bnrnn.training.build import build
from bnrnn.training.checkpoint import CHECKPOINT, MODEL, load
from bnrnn.training.results import FILE, Result
from tests.stress.processes import run
from tests.test_train import without_time

OPTIONS = ("model.hidden_size=16", "budget.updates=12", "budget.eval_every=4", "budget.eval_batches=1",
           "budget.population_batches=1", "log_every=1", "checkpoint_seconds=0", "data.state_noise=0.1",
           "wandb.mode=disabled", "device=cpu")  # fmt: skip
HANGS = 600.0  # seconds


def outcome(run_dir: Path) -> tuple[object, ...]:
    """What must not depend on kills: metrics, records without times, weights, and the names of the files left."""
    weights = (load(run_dir / MODEL) or {})["model"]
    files = sorted(path.name for path in run_dir.iterdir())
    stored = {name: value.numpy().tobytes() for name, value in weights.items()}
    return Result.read(run_dir / FILE).metrics, without_time(run_dir), stored, files


def moment(run_dir: Path) -> str:
    """What a killed training was doing, as its files say."""
    if any(run_dir.glob("*.partial")):
        return "while it wrote a file"
    if (run_dir / FILE).exists():
        return "after the result, before the end"
    return "later" if (run_dir / CHECKPOINT).exists() else "before the first checkpoint"


def kill_trainings(folder: Path, kills: int, rng: random.Random) -> Counter[str]:
    """Kill trainings until there were so many kills. Counts `equal` and `different` trainings, and kills by moment.

    Each training is started again and killed again, until it ends before its moment comes. Then it is started once
    more, as a finished one, which removes what a kill may have left.
    """
    cfg, counts, output = compose_config(*OPTIONS), Counter[str](), folder / "output"
    _, _, _, model = build(cfg)  # imports in this process, from which the trainings are forked, what they need
    instantiate(cfg.optim)(model.parameters()).step()  # the first step of an optimizer imports torch's compiler

    def attempt(run_dir: Path, limit: float) -> int | None:
        return run(lambda: train(cfg, run_dir), output, limit)

    begun = time.monotonic()
    if attempt(folder / "whole", HANGS) != 0:
        raise BnrnnError(f"an undisturbed training failed: {output.read_text()}")
    duration = time.monotonic() - begun
    expected, run_dir = outcome(folder / "whole"), folder / "killed"
    while counts["kills"] < kills:
        shutil.rmtree(run_dir, ignore_errors=True)
        status = None
        while status is None:
            status = attempt(run_dir, rng.uniform(0, duration) if counts["kills"] < kills else HANGS)
            if status is None:
                counts["kills"] += 1
                counts[f"killed {moment(run_dir)}"] += 1
        same = status == 0 and attempt(run_dir, HANGS) == 0 and outcome(run_dir) == expected
        counts["equal" if same else "different"] += 1
        if not same:
            print(output.read_text(), flush=True)
    return counts
