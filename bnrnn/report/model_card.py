"""The card of released models: data, recipe, numbers, checksum, and how to load them."""

from pathlib import Path
from typing import Any

from bnrnn.data.base import sha256
from bnrnn.report.markdown import NONE, markdown
from bnrnn.training.released import about

LOAD = """```python
from bnrnn.training.released import load_released

path = "{path}"
model, data = load_released(path, "data")  # data/mnist/ has the files of `make data`
batch = next(data.batches("test", 100))
print((model(batch.inputs)[0].argmax(-1) == batch.targets).float().mean())
```
"""


def render(folder: Path, results_dir: Path) -> str:
    """The page models/README.md of an experiment.

    Args:
        folder: has the released models, `*.safetensors`.
        results_dir: the folder of all results, relative to whose parent the paths on the page are.
    """
    paths = sorted(folder.glob("*.safetensors"))
    given = [about(path) for path in paths]
    key = given[0]["experiment"]
    rows = [_row(path, entry) for path, entry in zip(paths, given, strict=True)]
    header = ["file", "run", "updates", "selected at", "valid, batch", "test, population", "KiB", "SHA-256"]
    return "\n".join([
        f"# Trained models of {key}\n",
        f"The models that validation selected in the finished runs of `conf/experiment/{key}.yaml`. Their data is "
        f"{given[0]['data']}; [the page of the experiment](../../{key.rpartition('/')[2]}.md) has the runs, and each "
        "file has its whole configuration, its metrics and the commits that trained it.\n",
        markdown(header, rows),
        LOAD.format(path=paths[0].relative_to(results_dir.parent)),
        "The files have the weights without the population statistics of batch normalization, which would take 34 "
        "times as much space. Loading a model estimates them from the training images, as the run did: this takes a "
        "minute or two on one core.\n",
    ])  # fmt: skip


def _row(path: Path, entry: dict[str, Any]) -> list[str]:
    metrics, content = entry["metrics"], path.read_bytes()
    run = ", ".join(f"`{key}={value}`" for key, value in entry["overrides"].items())
    metric = "accuracy" if "test/accuracy" in metrics else "loss"
    numbers = [f"{metrics[name]:.4f}" if name in metrics else NONE for name in (f"valid/{metric}", f"test/{metric}")]
    size = f"{len(content) / 1024:.0f}"
    return [f"`{path.name}`", run, f"{entry['updates']:,}", f"{entry['best_update']:,}", *numbers, size,
            f"`{sha256(content)[:16]}`"]  # fmt: skip
