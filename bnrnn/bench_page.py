"""The page of a stored benchmark: markdown from what scripts/bench.py measured."""

import json
from pathlib import Path
from typing import Any

from bnrnn.bench import NAIVE, NN_LSTM
from bnrnn.errors import BnrnnError
from bnrnn.report.markdown import NONE, markdown


def ms(value: float) -> str:
    """At least three digits."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def judged(row: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The ratios to nn.LSTM, in bold the one that the target is for; the target, and whether it is met."""
    cells = {v: NONE if ratio is None else f"{ratio:.2f}" for v, ratio in row["ratio"].items() if v != NN_LSTM}
    cells[row["best"]] = f"**{cells[row['best']]}**"
    target = NONE if row["target"] is None else f"{row['target']:.2f}"
    return list(cells.values()), [target, {True: "yes", False: "no", None: NONE}[row["met"]]]


def about(result: dict[str, Any]) -> str:
    """What was measured, where and when."""
    shapes = "; ".join(f"{key}: {text}" for key, text in result["shapes"].items())
    where = f"{result['hardware']}, torch {result['environment']['torch']}, {result['precision']}"
    return (
        f"{where}, {result['date']}, commit {result['commit']}. A step is forward and backward of the layers; all "
        f"variants in turn in one process. {shapes}.\n"
    )


def render_ratios(rows: list[dict[str, Any]]) -> str:
    table = []
    for row in rows:
        to_lstm, verdict = judged(row)
        key = [row["shape"], f"{row['T']}", f"{row['threads']}", ms(row["median_ms"][NN_LSTM])]
        table.append([*key, *to_lstm, f"{row['naive_over_best']:.2f}", *verdict])
    variants = [f"`{name}`" for name in list(rows[0]["ratio"])[2:]]
    header = ["shape", "T timed", "threads", f"{NN_LSTM}, ms", "naive loop", *variants, "naive / best", "target", "met"]
    title = "Time over that of `nn.LSTM`; in bold the fastest engine, which the target is for:"
    return f"{title}\n\n{markdown(header, table)}"


def render_times(rows: list[dict[str, Any]]) -> str:
    variants, table = list(rows[0]["ratio"]), []
    for row in rows:
        cells = [f"{ms(row['median_ms'][v])} ({ms(row['min_ms'][v])})" for v in variants]
        table.append([row["shape"], f"{row['T']}", f"{row['threads']}", *cells, f"{len(row['ms'][NN_LSTM])}"])
    return markdown(["shape", "T", "threads", *variants, "rounds"], table)


def render_errors(rows: list[dict[str, Any]]) -> str:
    table = [
        [row["shape"], f"{row['error_T']}", *(f"{error:.1e}" for error in row["error"].values())]
        for row in rows
        if row["threads"] == 1
    ]
    return markdown(["shape", "T", *list(rows[0]["ratio"])[1:]], table)


def render_memory(rows: list[dict[str, Any]]) -> str:
    table = []
    for row in rows:
        lstm, (to_lstm, verdict) = row["MiB"][NN_LSTM], judged(row)
        table.append([row["shape"], f"{row['T']}", NONE if lstm is None else f"{lstm:,.0f}", *to_lstm, *verdict])
    return markdown(["shape", "T", f"{NN_LSTM}, MiB", *list(rows[0]["ratio"])[1:], "target", "met"], table)


def render_replicas(found: dict[str, Any]) -> str:
    return (
        f"{found['R']} replicas in one recurrence ({found['shape']}, T {found['T']}, `{found['engine']}`): "
        f"{found['over_one']:.2f} times the time of one; one after the other they take "
        f"{found['calls_over_together']:.2f} times the time of all together.\n"
    )


def render_readers(found: dict[str, Any]) -> str:
    median = found["median_ms"]
    ones = {"bn_e_star": "lstm", "bn_e_star_star": "lstm, both directions"}
    table = []
    for name, time in median.items():
        one = ones.get(name.removesuffix(", masked"))
        ratio = time / median[one] if one else None
        verdict = [NONE] * 3 if ratio is None else [one, f"{ratio:.2f}", "yes" if ratio <= found["target"] else "no"]
        table.append([name, ms(time), f"{time / median['lstm']:.2f}", *verdict])
    header = ["reader", "ms", "over lstm", "as many directions", "over that", f"at most {found['target']}"]
    about = f"Questions about passages of up to {found['T']} steps, B {found['B']}, 240 units, forward and backward."
    return f"{about}\n\n{markdown(header, table)}"


def render_speech(found: dict[str, Any]) -> str:
    median = found["median_ms"]
    table = []
    for name, time in median.items():
        over = [time / median[other] for other in (NN_LSTM, "lstm")]
        met = "yes" if max(over) <= found["target"] else "no"
        table.append([name, ms(time), *(f"{ratio:.2f}" for ratio in over), met if "bn" in name else NONE])
    header = ["five layers, both directions", "ms", f"over {NN_LSTM}", "over lstm", f"at most {found['target']}"]
    about = f"Packed sequences of up to {found['T']} steps, B {found['B']}, 250 units, forward and backward."
    return f"{about}\n\n{markdown(header, table)}"


def render_rhn(found: dict[str, Any]) -> str:
    median = found["median_ms"]
    best = min(name for name in median if median[name] == min(median.values()))
    faster = median[NAIVE] / median[best]
    verdict = NONE if found["target"] is None else "yes" if faster >= found["target"] else "no"
    table = [[*(ms(time) for time in median.values()), f"{faster:.2f}", f"{found['target'] or NONE}", verdict]]
    size = f"T {found['T']}, B {found['B']}, I and H {found['H']}, depth {found['D']}"
    header = [*(f"{name}, ms" for name in median), "naive / best", "at least", "met"]
    return f"A step of BN-RHN ({size}):\n\n{markdown(header, table)}"


def render_short(result: dict[str, Any]) -> str:
    """The ratios alone, as README shows them."""
    return f"{about(result)}\n{render_ratios(result['rows'])}"


def render(result: dict[str, Any]) -> str:
    """The page of a measurement."""
    parts = {
        f"# Benchmark: {result['name']}": render_short(result),
        "## Milliseconds a step, median (minimum)": render_times(result["rows"]),
        "## Relative error against float64, the worst over outputs and all gradients": render_errors(result["rows"]),
        "## Memory that a step adds at its peak, over what `nn.LSTM` adds": result["memory"]
        and render_memory(result["memory"]),
        "## Replicas": render_replicas(result["replicas"]),
        "## Recurrent highway networks": "rhn" in result and render_rhn(result["rhn"]),
        "## Attentive readers": "readers" in result and render_readers(result["readers"]),
        "## Speech": "speech" in result and render_speech(result["speech"]),
    }
    return "\n".join(f"{title}\n\n{text}" for title, text in parts.items() if text)


def render_file(path: Path, short: bool = False) -> str:
    """The page of a stored measurement. Raises BnrnnError for a file that is none."""
    try:
        return (render_short if short else render)(json.loads(path.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BnrnnError(f"{path} is no benchmark that this version wrote ({error!r}): run `make bench`") from None
