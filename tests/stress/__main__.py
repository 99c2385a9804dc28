"""Kills real trainings at random moments, damages inputs of every kind, and counts what comes of it.

python -m tests.stress kills=1000 inputs=1000 seed=0
"""

import random
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

from bnrnn.commands.arguments import Kind, read_arguments
from bnrnn.errors import BnrnnError, report_errors
from tests.stress.damage import damage_inputs
from tests.stress.kills import kill_trainings

KINDS = dict.fromkeys(("kills", "inputs", "seed"), Kind(int, lambda v: v >= 0, "a whole number, such as kills=1000"))


def main() -> None:
    given = {"kills": 1000, "inputs": 1000, "seed": 0} | read_arguments(sys.argv[1:], KINDS, "the stress test")
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread, which could hold a lock while this process forks
    tqdm.set_lock(threading.RLock())  # not the one that processes share: a killed one would hold it for ever
    with tempfile.TemporaryDirectory() as folder:
        damaged, failures = damage_inputs(Path(folder), given["inputs"], given["seed"])
        killed = kill_trainings(Path(folder), given["kills"], random.Random(given["seed"]))
    total = Counter[str]()
    for (name, outcome), number in sorted(damaged.items()):
        total[outcome] += number
        print(f"{number:6} {name}: {outcome}")
    for name, number in (*sorted(total.items()), *sorted(killed.items())):
        print(f"{number:6} {name}")
    if failures or killed["different"]:
        raise BnrnnError("\n".join(["the stress test failed: see the numbers above", *failures]))


if __name__ == "__main__":
    report_errors(main)
