"""What of a run is compared with other runs, short enough to be part of the package.

setup.py runs this file while it builds the package, when nothing else can be imported. It therefore uses the standard
library alone.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAIN = ("ppl", "bpc", "error", "accuracy")  # as READ of bnrnn.metrics: the first of these is compared
ESSENTIALS = {"precision": "float32", "backend": "reference", "device": None, "torch": None}  # with their defaults
FILE_ORDER = "file"  # the order of evaluation of results that do not name one
POINTS = 40  # of a curve in the package
DIGITS = 6  # of a number in the package


@dataclass(frozen=True)
class Summary:
    """The numbers of a run, its curve of validation, and what may explain a difference.

    Args:
        config: the configuration that identifies the run.
        numbers: `test/<metric>` and `valid/<metric>` of the main metric, and `train/loss` at the end.
        curve: `valid/<metric>` by update. If that depends on the order of evaluation, the points in its last order.
        order: the order of sequences in evaluations.
        data: the digest of the data; None if the run is too old to have one.
        normalizes: whether the model has batch normalization, so that validation depends on the order of evaluation.
    """

    key: str
    overrides: dict[str, str]
    seed: str
    status: str
    updates: int
    config: dict[str, Any]
    metric: str
    numbers: dict[str, float]
    curve: dict[int, float]
    environment: dict[str, Any]
    order: str
    data: str | None
    normalizes: bool
    records_sha256: str

    def line(self) -> str:
        """The summary as a line of JSON, with fewer points and digits."""
        kept = list(self.curve)[:: -max(1, -(-len(self.curve) // POINTS))][::-1]  # the last is always kept
        short = asdict(self) | {
            "numbers": {name: rounded(value) for name, value in self.numbers.items()},
            "curve": {update: rounded(self.curve[update]) for update in kept},
        }
        return json.dumps(short, sort_keys=True, separators=(",", ":"))

    @classmethod
    def of_line(cls, line: str) -> "Summary":
        """The summary in a line that `line` wrote."""
        content = json.loads(line)
        return cls(**{**content, "curve": {int(update): value for update, value in content["curve"].items()}})


def rounded(value: float) -> float:
    """The number as it is in the package."""
    return float(f"{value:.{DIGITS}g}")


def summarize(result: dict[str, Any], records: list[dict[str, Any]], records_sha256: str) -> Summary:
    """The summary of a run from the content of its two files."""
    metrics, environment = result["metrics"], result["environment"]
    pieces = result.get("pieces") or [{"update": 0, **environment}]
    order, normalizes = order_of(environment), has_gamma(result["config"].get("model", {}))
    others = [n for n, piece in enumerate(pieces) if order_of(piece) != order]
    since = pieces[others[-1] + 1]["update"] if normalizes and others and others[-1] + 1 < len(pieces) else 0
    names = metrics or {name for record in records for name in record}  # a run without result has records alone
    metric = next((name for name in MAIN if f"valid/{name}" in names), MAIN[-1])
    name = f"valid/{metric}"
    numbers = {split: metrics[split] for split in (f"test/{metric}", name) if split in metrics}
    losses = averaged(records, "train/loss")
    return Summary(
        key=result["name"],
        overrides=result["overrides"],
        seed=str(result["overrides"].get("seed", result["config"]["seed"])),
        status=result["status"],
        updates=result["updates"],
        config=result["config"],
        metric=metric,
        numbers=numbers | ({"train/loss": list(losses.values())[-1]} if losses else {}),
        curve={int(r["update"]): r[name] for r in records if r.get(name) is not None and r["update"] > since},
        environment={name: environment.get(name, default) for name, default in ESSENTIALS.items()},
        order=order,
        data=pieces[-1].get("data"),
        normalizes=normalizes,
        records_sha256=records_sha256,
    )


def order_of(piece: dict[str, Any]) -> str:
    """The order of sequences in the evaluations of a piece of a run."""
    return piece.get("evaluation_order", FILE_ORDER)


def has_gamma(config: Any) -> bool:
    """Whether a model has batch normalization, as `Run.has_batch_norm`."""
    if not isinstance(config, dict) or str(config.get("_target_")).endswith(".LNLSTM"):  # its gains have no batch
        return False
    return any(has_gamma(value) or (key == "gamma_init" and value is not None) for key, value in config.items())


def averaged(records: list[dict[str, Any]], name: str) -> dict[int, float]:
    """A training metric by the update of each evaluation: its mean over the updates since the evaluation before."""
    series, total, seen, counted = {}, 0.0, 0, 0
    for record in records:
        update = int(record["update"])
        if name in record and record[name] is None:
            break  # null stands for a value that is not finite: the run has diverged
        if name in record:
            total, seen = total + record[name] * (update - seen), update
        elif seen > counted:
            series[update] = total / (seen - counted)
            total, counted = 0.0, seen
    return series


def summary_lines(results_dir: Path) -> Iterator[str]:
    """A line for every finished run below a folder, in the order of their paths."""
    for path in sorted(found_results(results_dir)):
        records = (path.parent / "metrics.jsonl").read_bytes()
        result, parsed = json.loads(path.read_text()), [json.loads(record) for record in records.splitlines()]
        yield summarize(result, parsed, hashlib.sha256(records).hexdigest()).line()


def found_results(folder: Path) -> Iterable[Path]:
    """The paths of all results below a folder. Folders of runs may be links."""
    walked = os.walk(folder, followlinks=True)
    return (Path(parent, "result.json") for parent, names, files in walked if "result.json" in (*names, *files))
