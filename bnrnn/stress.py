"""Kills real trainings at random moments and damages their files, and counts what comes of it.

python -m bnrnn.stress kills=1000 inputs=1000 seed=0

Each training runs in a forked process, so that no time is lost with importing torch; the first moment is its start. A
killed training is started again until it ends, and must then equal an undisturbed one, bit for bit.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bnrnn.config import compose_config
from bnrnn.data.captions import load_annotations, load_features
from bnrnn.data.flickr8k import load_captions
from bnrnn.data.kaldi_files import load_alignments
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.report.claims import read_claims
from bnrnn.train import train
from bnrnn.training.checkpoint import MODEL, load
from bnrnn.training.log import METRICS, read_jsonl
from bnrnn.training.results import FILE, Result

OPTIONS = ("model.hidden_size=16", "budget.updates=12", "budget.eval_every=4", "budget.eval_batches=1",
           "budget.population_batches=1", "log_every=1", "checkpoint_seconds=0", "data.state_noise=0.1",
           "wandb.mode=disabled")  # fmt: skip
SECONDS = 60.0  # an input that takes longer hangs
MEMORY = 8 << 30  # bytes of address space while a damaged input is read


def forked(action: Callable[[], object], seconds: float) -> int | None:
    """Run an action in a forked process. Returns its exit status, or None if it was killed after so many seconds."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            action()
            status = 0
        except BnrnnError as error:
            print(error, flush=True)
            status = 1
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def quiet(action: Callable[[], object], output: Path) -> Callable[[], object]:
    """The action with all that it prints written to a file."""

    def run() -> None:
        file = output.open("w")  # stays open: errors are printed after the action
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        action()

    return run


def outcome(run_dir: Path) -> tuple[object, ...]:
    """What must not depend on kills: metrics, records without times, weights, and the names of the files left."""
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in read_jsonl(run_dir / METRICS)]
    weights = (load(run_dir / MODEL) or {})["model"]
    files = sorted(path.name for path in run_dir.iterdir())
    return Result.read(run_dir / FILE).metrics, records, {k: v.numpy().tobytes() for k, v in weights.items()}, files


def kill_trainings(folder: Path, kills: int, rng: random.Random) -> Counter[str]:
    """Kill trainings until there were so many kills. Counts `equal` and `different` trainings, and `kills`."""
    cfg, counts = compose_config(*OPTIONS), Counter[str]()
    started = time.monotonic()
    status = forked(quiet(lambda: train(cfg, folder / "whole"), folder / "output"), 600.0)
    duration = time.monotonic() - started
    if status != 0:
        raise BnrnnError(f"an undisturbed training failed: {(folder / 'output').read_text()}")
    expected = outcome(folder / "whole")
    run_dir = folder / "killed"

    def attempt(limit: float) -> int | None:
        return forked(quiet(lambda: train(cfg, run_dir), folder / "output"), limit)

    while counts["kills"] < kills:
        shutil.rmtree(run_dir, ignore_errors=True)
        status = None
        while status is None:
            limit = rng.uniform(0, duration) if counts["kills"] < kills else 600.0
            status = attempt(limit)
            counts["kills"] += status is None
        status = attempt(600.0)  # removes a checkpoint left behind
        same = status == 0 and outcome(run_dir) == expected
        counts["equal" if same else "different"] += 1
        if not same:
            print((folder / "output").read_text(), flush=True)
    return counts


def inputs(folder: Path) -> dict[Path, Callable[[Path], object]]:
    """One good file of each kind, with its reader."""
    cfg = compose_config(*OPTIONS)
    train(cfg, folder / "run")
    np.savez(folder / "features.npz", file_name=np.array(["a", "b"]), features=np.ones((2, 3), np.float32))
    (folder / "captions.txt").write_text("image,caption\na,a dog\nb,two cats\n")
    (folder / "captions.json").write_text(
        '{"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 1, "caption": "a dog"}]}'
    )
    (folder / "claims.yaml").write_text("paper: A paper\nclaims:\n  C1: {says: a, where: b, tests: [{rule: c}]}\n")
    (folder / "kaldi").mkdir()
    (folder / "kaldi/ali.ark").write_bytes(b"a \0B\4\2\0\0\0\4\5\0\0\0\4\6\0\0\0b \0B\4\1\0\0\0\4\7\0\0\0")
    return {
        folder / "run" / MODEL: load, folder / "run" / FILE: Result.read, folder / "run" / METRICS: read_jsonl,
        folder / "features.npz": load_features, folder / "captions.txt": load_captions,
        folder / "captions.json": load_annotations, folder / "claims.yaml": read_claims.__wrapped__,
        folder / "kaldi/ali.ark": lambda path: load_alignments(path.parent),
    }  # fmt: skip


def damage(path: Path, good: bytes, rng: random.Random) -> str:
    """Put a damaged file, or something else, in the place of a good one. Returns the name of the damage."""
    position = rng.randrange(len(good))
    contents = {
        "truncated": good[:position],
        "flipped": good[:position] + bytes([good[position] ^ 1 << rng.randrange(8)]) + good[position + 1 :],
        "empty": b"", "other type": rng.choice([b"\x1f\x8b\x08\0", b"PK\3\4", b"[1, 2]", b"null", b"<html>"]),
        "not UTF-8": good[:position] + b"\xff\xfe" + good[position:], "folder": None, "link": None,
    }  # fmt: skip
    name = rng.choice(sorted(contents))
    path.unlink()
    if name == "folder":
        path.mkdir()
    elif name == "link":
        path.symlink_to("nowhere")
    else:
        path.write_bytes(contents[name] or b"")
    return name


def damage_inputs(folder: Path, count: int, rng: random.Random) -> Counter[str]:
    """Damage inputs. Counts `named`, `unnamed`, `accepted`, `traceback` and `hang`, and reports what is not `named`."""
    import resource

    readers, counts, output = inputs(folder), Counter[str](), folder / "output"
    good = {path: path.read_bytes() for path in readers}
    for _ in range(count):
        path = rng.choice(list(readers))
        kind = damage(path, good[path], rng)

        def read(path: Path = path) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            readers[path](path)

        before = path.read_bytes() if path.is_file() else None
        status = forked(quiet(read, output), SECONDS)
        text = output.read_text()
        found = {None: "hang", 0: "accepted", 1: "named" if str(path) in text else "unnamed"}.get(status, "traceback")
        if before is not None and path.read_bytes() != before:
            found = "altered"
        counts[found] += 1
        if found != "named":
            counts[f"{found}: {path.name}, {kind}"] += 1
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(good[path])
    return counts


def main() -> None:
    given = {key: value for key, _, value in (argument.partition("=") for argument in sys.argv[1:])}
    if not given.keys() <= {"kills", "inputs", "seed"} or not all(value.isdigit() for value in given.values()):
        raise BnrnnError("usage: python -m bnrnn.stress kills=1000 inputs=1000 seed=0")
    torch.set_num_threads(1)
    rng = random.Random(int(given.get("seed", 0)))
    with tempfile.TemporaryDirectory() as folder:
        damaged = damage_inputs(Path(folder), int(given.get("inputs", 1000)), rng)
        killed = kill_trainings(Path(folder), int(given.get("kills", 1000)), rng)
    for name, number in sorted({**damaged, **killed}.items()):
        print(f"{number:6} {name}")
    bad = [n for n in ("unnamed", "traceback", "hang", "altered") if damaged[n]]
    if bad or killed["different"]:
        raise BnrnnError(f"the stress test failed: {', '.join([*bad, *['different'] * (killed['different'] > 0)])}")


if __name__ == "__main__":
    report_errors(main)
