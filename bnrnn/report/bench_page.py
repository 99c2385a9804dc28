"""Renders the page of a stored benchmark, which scripts/bench.py measured."""

import statistics
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from bnrnn.bench.timing import BN_LSTM, LENGTHS, NAIVE, NN_LSTM, PACKED, PADDED, TRAINING, ratios, verdict
from bnrnn.errors import BnrnnError
from bnrnn.report.markdown import NONE, markdown
from bnrnn.scan import ENGINES
from bnrnn.system.files import read_record


def ms(value: float) -> str:
    """Milliseconds with at least three digits."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def about(result: dict[str, Any]) -> str:
    """A paragraph that says what was measured, where and when."""
    shapes = "; ".join(f"{key}: {text}" for key, text in result["shapes"].items())
    where = f"{result['hardware']}, torch {result['environment']['torch']}, {result['precision']}"
    peak = "" if result["peak"] is None else f" Measured peak of one thread: {result['peak']:.0f} GFLOP/s."
    return (
        f"{where}, {result['date']}, commit {result['commit']}.{peak} All variants of a row take turns in one process. "
        f"{shapes}.\n"
    )


def ratio_cell(row: dict[str, Any], variant: str) -> str:
    """Median and quartiles of the ratio of a variant's time to the base's."""
    lower, median, upper = ratios(row, variant)
    text = f"{median:.2f} ({lower:.2f}–{upper:.2f})"
    return f"**{text}**" if variant in row["targets"] else text


def judged(row: dict[str, Any]) -> list[str]:
    """The targets of a row, and whether they are met."""
    if not row["targets"]:
        return [NONE, NONE]
    targets = (f"{target:.2f}" for target in row["targets"].values())
    return [", ".join(dict.fromkeys(targets)), ", ".join(verdict(row, variant) for variant in row["targets"])]


def others(row: dict[str, Any]) -> list[str]:
    """The variants that are compared with the base."""
    return [variant for variant in row["ms"] if variant != row["base"]]


def render_ratios(rows: list[dict[str, Any]]) -> str:
    """One table for each set of variants, with the time of the base and the ratios of the others to it."""
    tables = []
    for (base, *variants), group in groupby(rows, key=lambda row: [row["base"], *others(row)]):
        table = []
        for row in group:
            time = ms(statistics.median(row["ms"][base]))
            cells = [ratio_cell(row, variant) for variant in variants]
            table.append([row["name"], f"{row['threads']}", time, *cells, *judged(row)])
        tables.append(markdown(["", "threads", f"{base}, ms", *variants, "target", "met"], table))
    return "\n".join(tables)


def render_times(rows: list[dict[str, Any]], peak: float | None) -> str:
    """Medians and minima of all times and, if a row counts operations, the operations per second of the fastest."""
    table = []
    for row in rows:
        for variant, times in row["ms"].items():
            speed = share = NONE
            if row["gflop"]:
                gflops = 1000 * row["gflop"] / min(times)
                speed = f"{gflops:,.0f}"
                share = NONE if peak is None else f"{100 * gflops / (peak * row['threads']):.0f} %"
            figures = [ms(statistics.median(times)), ms(min(times)), speed, share, f"{len(times)}"]
            table.append([row["section"], row["name"], f"{row['threads']}", variant, *figures])
    header = ["", "", "threads", "", "median, ms", "minimum, ms", "GFLOP/s", "of the peak", "rounds"]
    return markdown(header, table)


def render_errors(errors: dict[str, dict[str, Any]]) -> str:
    """The relative error of each engine, by shape."""
    table = [[name, f"{row['T']}", *(f"{e:.1e}" for e in row["error"].values())] for name, row in errors.items()]
    return markdown(["shape", "T", *next(iter(errors.values()))["error"]], table)


def render_memory(rows: dict[str, dict[str, Any]]) -> str:
    """The memory of each variant over that of nn.LSTM, by shape."""
    table = []
    for name, row in rows.items():
        lstm = row["MiB"][NN_LSTM]
        cells = [NONE if v is None or not lstm else f"{v / lstm:.2f}" for k, v in row["MiB"].items() if k != NN_LSTM]
        table.append([name, f"{row['T']}", NONE if lstm is None else f"{lstm:,.0f}", *cells])
    variants = list(next(iter(rows.values()))["MiB"])
    return markdown(["shape", "T", f"{NN_LSTM}, MiB", *variants[1:]], table)


def sections(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows by section, in the order of measurement."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(row["section"], []).append(row)
    return found


def render_training(result: dict[str, Any]) -> str:
    """A paragraph that says what was measured, and the table of training steps."""
    if TRAINING not in sections(result):
        return about(result)
    title = f"Time over that of `{NN_LSTM}`, median and quartiles; in bold what has a target:"
    return f"{about(result)}\n{title}\n\n{render_ratios(sections(result)[TRAINING])}"


def render_brief(result: dict[str, Any]) -> str:
    """The result of the training steps in a few sentences, for README.md."""
    rows, fastest = _of_one_thread(result)
    lengths = sorted(int(row["name"].rpartition("T ")[2]) for row in rows)
    span = f"{lengths[0]} to {lengths[-1]}" if lengths[0] < lengths[-1] else f"{lengths[0]}"
    return (
        f"For {len(rows)} layer sizes from the papers' tasks, with sequences of {span} steps, a "
        f"training step of a batch-normalized LSTM takes {_range(rows, fastest)} times as long as one of `{NN_LSTM}`, "
        f"which does not normalize. A plain Python loop over the time steps takes {_range(rows, NAIVE)} times as long. "
        f"(Medians; engine `{fastest}` on {result['hardware']}; one thread, {result['precision']}, {result['date']}.)\n"
    )


def render_ratio(result: dict[str, Any]) -> str:
    """The time of a training step in one sentence, for the top of README.md."""
    span = _range(*_of_one_thread(result))
    return f"A training step of a BN-LSTM takes {span} times as long as one of `{NN_LSTM}`, on one core of a CPU."


def _of_one_thread(result: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The training steps with one thread, and the fastest engine that all of them have."""
    rows = [row for row in sections(result)[TRAINING] if row["threads"] == 1]
    return rows, [name for name in ENGINES if all(name in row["ms"] for row in rows)][-1]


def _range(rows: list[dict[str, Any]], variant: str) -> str:
    """The range of a variant's median ratios to the base."""
    medians = sorted(ratios(row, variant)[1] for row in rows)
    return f"{medians[0]:.2f} to {medians[-1]:.2f}"


def render_padded(result: dict[str, Any]) -> str:
    """Sequences of different lengths in a few sentences, for README.md."""
    rows = result["rows"]

    def times_over(variant: str, base: str) -> str:
        found = sorted(statistics.median(r["ms"][variant]) / statistics.median(r["ms"][base]) for r in rows)
        return f"{found[0]:.1f} to {found[-1]:.1f} times"

    return (
        f"On padded batches with `lengths`, a training step of a batch-normalized LSTM takes "
        f"{times_over(BN_LSTM, PADDED)} as long as one of `{NN_LSTM}` that ignores the lengths. "
        f"`{NN_LSTM}` on a `PackedSequence`, which respects them, takes "
        f"{times_over(PACKED, BN_LSTM)} as long as ours. ({len(rows)} sizes of up to "
        f"{max(int(row['name'].rpartition('T ')[2]) for row in rows)} steps, lengths {LENGTHS}; "
        f"{result['hardware']}, one thread, {result['date']}.)\n"
    )


def render(result: dict[str, Any]) -> str:
    """The page of a benchmark."""
    beside = {name: rows for name, rows in sections(result).items() if name != TRAINING}
    parts = {
        f"# Benchmark: {result['name']}": render_training(result),
        **{f"## {name}": render_ratios(rows) for name, rows in beside.items()},
        "## Relative error against float64, the worst over outputs and all gradients": result["errors"]
        and render_errors(result["errors"]),
        f"## Memory that a step adds at its peak, over what `{NN_LSTM}` adds": result["memory"]
        and render_memory(result["memory"]),
        "## All times": render_times(result["rows"], result["peak"]),
    }
    return "\n".join(f"{title}\n\n{text}" for title, text in parts.items() if text)


def render_file(path: Path, of: Callable[[dict[str, Any]], str] = render) -> str:
    """The page of a stored benchmark, or another rendering `of` it. Raises BnrnnError if it is not a benchmark."""
    try:
        return of(read_record(path, "run `make bench`"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BnrnnError(f"{path} is not a benchmark of this version ({error!r}): run `make bench`") from None
