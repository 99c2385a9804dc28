"""What the analyses in `experiments/<paper>/` share: their command line, and how they publish a result."""

import os
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bnrnn.files import write_record, write_text


def command_line(doc: str | None) -> ArgumentParser:
    """The options of every analysis, described by the first line of its docstring."""
    parser = ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--data-dir", default=os.environ.get("BNRNN_DATA", "data"))
    parser.add_argument("--out-dir", type=Path, default=Path("outputs"))
    parser.add_argument("--smoke", action="store_true", help="measure as little as possible, to see that it runs")
    return parser


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
