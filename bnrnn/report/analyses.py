"""What the analyses in `experiments/<paper>/` share: their command line, and how they publish a result."""

import os
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bnrnn.system.files import read_record, write_record, write_text
from bnrnn.training.provenance import CPU, provenance


def command_line(doc: str | None) -> ArgumentParser:
    """The options of every analysis, described by the first line of its docstring."""
    parser = ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--data-dir", default=os.environ.get("BNRNN_DATA", "data"))
    parser.add_argument("--out-dir", type=Path, default=Path("outputs"))
    parser.add_argument("--smoke", action="store_true", help="measure as little as possible, to see that it runs")
    return parser


def measured_before(key: str, results_dir: Path, **same: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The stored result of an analysis with the values in `same`, or {} if there is none, and all others.

    An analysis of trained models adds to the first, and keeps the others as `others` (such as results of another length
    of training), so that measurements survive their models, which are not committed. Delete the file to begin anew.
    Raises BnrnnError for a damaged file.
    """
    path = results_dir / f"{key}.json"
    stored = results_of(read_record(path, "delete it and run the analysis again")) if path.exists() else []
    before = next((r for r in stored if all(r.get(name) == value for name, value in same.items())), {})
    return before, [result for result in stored if result is not before]


def results_of(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """The results in the file of an analysis: the one that its page shows, and the `others`."""
    return [{name: value for name, value in stored.items() if name != "others"}, *stored.get("others", [])]


def others_in_words(result: dict[str, Any]) -> str:
    """A sentence about results of other lengths that are stored beside this one; empty if there are none."""
    lengths = ", ".join(f"{other['updates']:,}" for other in result.get("others", []))
    return f"The `.json` file beside this page also has what was measured after {lengths} updates.\n" if lengths else ""


def provenance_with(before: dict[str, Any], device: torch.device = CPU) -> dict[str, Any]:
    """The provenance of a result that keeps what was measured before, with the commits of all measurements."""
    here = provenance(device)
    return {**here, "commits": sorted({here["commit"], *commits_of(before)})} if before else here


def commits_of(result: dict[str, Any]) -> list[str]:
    """The commits that measured a stored result."""
    return result.get("commits", [result["commit"]] if result else [])


def publish(
    key: str,
    result: dict[str, Any],
    out_dir: Path,
    render: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any], Path], None],
) -> None:
    """Store the result of an analysis with its page and its figure, and print the page."""
    write_record(out_dir / f"{key}.json", result)
    write_text(out_dir / f"{key}.md", render(result))
    draw(result, out_dir / f"{key}.png")
    print(render(result))
