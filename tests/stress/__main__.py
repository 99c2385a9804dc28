"""Kills real trainings at random moments, damages inputs of every kind, and counts what comes of it.

python -m tests.stress kills=1000 inputs=1000 seed=0
"""

import random
import sys
import tempfile
import threading
from pathlib import Path

import torch
from tqdm import tqdm

from bnrnn.errors import BnrnnError, report_errors
from tests.stress.damage import damage_inputs
from tests.stress.kills import kill_trainings

LEAST_NAMED = 0.97  # of the damaged inputs; the rest is accepted for a reason
MANY = 300  # of fewer inputs, the share says little


def main() -> None:
    given = {key: value for key, _, value in (argument.partition("=") for argument in sys.argv[1:])}
    if not given.keys() <= {"kills", "inputs", "seed"} or not all(value.isdigit() for value in given.values()):
        raise BnrnnError("usage: python -m tests.stress kills=1000 inputs=1000 seed=0")
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread, which could hold a lock while this process forks
    tqdm.set_lock(threading.RLock())  # not the one that processes share: a killed one would hold it for ever
    rng = random.Random(int(given.get("seed", 0)))
    with tempfile.TemporaryDirectory() as folder:
        count = int(given.get("inputs", 1000))
        damaged, by_kind = damage_inputs(Path(folder), count, rng)
        killed = kill_trainings(Path(folder), int(given.get("kills", 1000)), rng)
    for (name, found), number in sorted(by_kind.items()):
        print(f"{number:6} {name}: {found}")
    for name, number in (*sorted(damaged.items()), *sorted(killed.items())):
        print(f"{number:6} {name}")
    allowed = {"named", "accepted, reads the same", "accepted, differs"}
    too_few = count >= MANY and damaged["named"] < LEAST_NAMED * count
    if damaged.keys() - allowed or too_few or killed["different"]:
        raise BnrnnError("the stress test failed: see the numbers above")


if __name__ == "__main__":
    report_errors(main)
