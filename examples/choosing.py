"""Which norm for which task: three small tasks on real data, each trained with six kinds of normalization.

    BNRNN_DATA=... python examples/choosing.py --out results/choosing/choosing.json [--jobs 2]

- phones: name the phone of a stretch of speech of 1 to 40 frames (TIMIT sample), in padded batches.
- characters: predict the next character of Penn Treebank in windows of 50, with the state carried over.
- words: read a word of Penn Treebank letter by letter, and write it backwards; encoder and decoder are padded.

All norms have the same settings, chosen before they were compared. Batch norms keep running statistics; each model
is evaluated with these, and then again with exact ones. 20 minutes on one core; the same command resumes.
"""

import json
import time
from argparse import ArgumentParser
from datetime import date
from itertools import islice, product
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
import torch.nn.functional as F
from choosing_tasks import LARGE, MIXED, NOTHING, NUM_UNITS, PLAIN, RESET, SMALL, T_MAX, TASKS, Characters, Task
from torch import nn

import bnrnn

LR, CLIP, UPDATES, BATCH_SIZE, FEW = 0.002, 1.0, 1000, 32, 4
NORMS = {
    "none": {},
    "batch": {"norm": "batch"},
    "batch, sequence": {"norm": "batch", "input_statistics": "sequence"},
    "input_batch": {"norm": "input_batch"},
    "input_batch, sequence": {"norm": "input_batch", "input_statistics": "sequence"},
    "layer": {"norm": "layer"},
}
CASES = [("phones", PLAIN), ("phones", SMALL), ("phones", MIXED), ("characters", PLAIN), ("characters", SMALL),
         ("characters", RESET), ("words", PLAIN)]  # fmt: skip


def train(model: Task, size: int, updates: int) -> None:
    optimizer, done = torch.optim.Adam(model.parameters(), lr=LR), 0
    while done < updates:
        for *inputs, targets in islice(model.batches("train", size), updates - done):
            loss = F.cross_entropy(model(*inputs).flatten(0, -2), targets.flatten(), ignore_index=NOTHING)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            done += 1


def run(task: str, case: str, norm: str, seed: int, updates: int) -> dict:
    """Train and evaluate one model."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    has_statistics = "batch" in norm  # without, there is one score
    options = NORMS[norm] | ({"statistics": "running"} if has_statistics else {})
    model, begun, scores = TASKS[task](options, case), time.process_time(), {}
    train(model, FEW if case == SMALL else BATCH_SIZE, updates)
    seconds = round(time.process_time() - begun, 1)
    with torch.no_grad():
        model.eval()
        scores["running" if has_statistics else "none"] = model.score()
        if has_statistics:
            batches = list(islice(model.batches("train", LARGE), 40))
            bnrnn.estimate_population_statistics(model, batches, lambda batch: batch[:-1])
            scores["exact"] = model.score()
            if isinstance(model, Characters):
                scores["beyond t_max"] = model.score(counted=True)
    print(task, case, norm, seed, scores, f"{seconds} s", flush=True)
    of = {"task": task, "case": case, "norm": norm, "seed": seed}
    return of | {"updates": updates, "seconds": seconds, "date": f"{date.today()}"} | scores


def main() -> None:
    parser = ArgumentParser(description="Which norm for which task")
    parser.add_argument("--out", type=Path, default=Path("outputs/choosing.json"))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=UPDATES, help="fewer, to try it")
    args = parser.parse_args()
    settings = {"units": NUM_UNITS, "lr": LR, "clip": CLIP, "batch_size": BATCH_SIZE, "updates": args.updates}
    about = {"settings": settings, "t_max": T_MAX, "versions": {"bnrnn": bnrnn.__version__, "torch": torch.__version__}}
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    runs = kept["runs"] if kept == about | {"runs": kept.get("runs")} else []
    done = {(run["task"], run["case"], run["norm"], run["seed"]) for run in runs}
    left = [(*case, *of) for case, *of in product(CASES, NORMS, range(args.seeds)) if (*case, *of) not in done]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with get_context("spawn").Pool(args.jobs) if args.jobs > 1 else ThreadPool(1) as pool:
        for found in [pool.apply_async(run, (*case, args.updates)) for case in left]:
            runs.append(found.get())
            (new := args.out.with_suffix(".new")).write_text(json.dumps(about | {"runs": runs}, indent=1) + "\n")
            new.replace(args.out)  # an interrupted program leaves the earlier file


if __name__ == "__main__":
    main()
