"""Renders what the Triton kernels gave in the emulator and on a GPU, which scripts/emulate.py has run."""

from typing import Any

from bnrnn.config import ROOT
from bnrnn.report.markdown import NONE, markdown

CLOCK = 1.7  # GHz, of an H100
FILE = ROOT / "results/bench/emulated.json"
EXECUTED = ROOT / "results/bench/executed.json"  # the same cases, on a GPU
PRECISIONS = ("float32", "tf32", "bfloat16")
INTRODUCTION = """
`make emulate` compiled the kernels for each GPU architecture and executed them instruction by instruction on a CPU,
with the arguments with which Triton would have launched them. Outputs, statistics and all gradients are compared with
the reference in float64: *error* is the largest relative error, and *tolerance* is three times what rounding explains.
Sizes are sequences x units. *Instructions* are those of warps, forward and backward. *Conflicts* counts pairs of
instructions whose accesses to memory nothing orders, and similar faults.
[engines.md](../../docs/engines.md#the-compiled-kernels-on-a-cpu) says what this cannot tell.
"""

OF_COSTS = """
Times are **estimates** for an H100, from counted instructions, barriers and bytes. At best, every scheduler issues an
instruction in each cycle, and memory delivers 64 bytes in each cycle to each multiprocessor meanwhile. At worst, each
instruction waits for the one before, and memory delivers 16 bytes in a cycle afterwards. Launching is not included.
"""

OF_EXECUTED = """
The cases of the [emulator](emulated.md), run on a GPU with `python -m scripts.emulate --on-gpu`. Each case ran three
times: the first run launches every step by itself, and the others capture and replay CUDA graphs. *Error* is the
largest relative error of the three, over outputs, statistics and all gradients, against the reference in float64.
*Tolerance* is three times what rounding explains. The last column has the largest error of the same case in the
emulator. The kernels of commit 763fa11 and later round the factors of TF32 products to the nearest number; earlier ones
had larger errors in TF32.
"""

NAMES = {"order": "barriers, fences and waits", "source": "lines of the kernels' source"}
OF_DAMAGE = """
The kernels were damaged on purpose, one instruction or line at a time, to see whether the emulator notices: by a
conflict, a fault, or an error that rounding does not explain. In *order*, every barrier, fence and wait of a compiled
forward and backward kernel is deleted, and moved past the nearest instruction with which that changes the order. In
*source*, a line of the kernels' source is changed so that they compute something else.
"""


def render(result: dict[str, Any]) -> str:
    """The page: a row for each case."""
    header = [
        "case",
        "architecture",
        "precision",
        "launch",
        "programs",
        "instructions",
        "error",
        "tolerance",
        "conflicts",
    ]
    rows = [
        [row["case"], f"sm_{row['architecture']}", row["precision"], row["launch"], str(row["programs"]),
         f"{row['instructions']:,}", f"{row['error']:.1e}", f"{row['tolerance']:.1e}", str(len(row["conflicts"]))]
        for row in result["rows"]
    ]  # fmt: skip
    conflicts = sorted({f"- {conflict}\n" for row in result["rows"] for conflict in row["conflicts"]})
    found = f"\n## Conflicts\n\n{''.join(conflicts)}" if conflicts else ""
    parts = [f"# Compiled Triton kernels, emulated\n{INTRODUCTION}",
             f"{markdown(header, rows)}\n{_made(result)}{found}",
             f"## Counts of one time step on sm_90\n{OF_COSTS}", render_costs(result)]  # fmt: skip
    if result.get("damage"):
        parts += [f"## Damage that was noticed\n{OF_DAMAGE}", render_damage(result["damage"])]
    return "\n".join(parts)


def render_executed(result: dict[str, Any], emulated: dict[str, Any]) -> str:
    """The page of what ran on a GPU: a row for each case, beside its error in the emulator."""
    rows = []
    for row in result["rows"]:
        same = [e["error"] for e in emulated["rows"] if all(e[k] == row[k] for k in ("case", "precision", "launch"))]
        error = row["problem"] or ("NaN" if row["error"] is None else f"{row['error']:.1e}")
        rows.append([row["case"], row["precision"], row["launch"], error, f"{row['tolerance']:.1e}",
                     f"{max(same):.1e}" if same else NONE])  # fmt: skip
    header = ["case", "precision", "launch", "error", "tolerance", "error, emulated"]
    return f"# Triton kernels on a GPU\n{OF_EXECUTED}\n{markdown(header, rows)}\n{_executed(result)}"


def render_executed_brief(result: dict[str, Any]) -> str:
    """A table of what ran on a GPU: a row for each recurrence."""
    groups = dict[str, list[dict[str, Any]]]()
    for row in result["rows"]:
        groups.setdefault(row["case"].partition(",")[0].split()[0], []).append(row)
    rows = []
    for name, found in sorted(groups.items()):
        errors = ([row["error"] for row in found if row["precision"] == p] for p in PRECISIONS)
        rows.append([name, str(len(found)), *map(_largest, errors)])
    return f"{markdown(['recurrence', 'cases', *(f'error, {p}' for p in PRECISIONS)], rows)}\n{_executed(result)}"


def _largest(errors: list[float | None]) -> str:
    """The largest of these errors, where None is that of a case that failed; a dash if there are none."""
    known = [error for error in errors if error is not None]
    return NONE if not errors else "failed" if len(known) < len(errors) else f"{max(known):.1e}"


def _executed(result: dict[str, Any]) -> str:
    passed, where = sum(row["passed"] for row in result["rows"]), result["environment"]
    return (
        f"{passed} of {len(result['rows'])} cases passed. {where['hardware']}, torch {where['torch']}, "
        f"Triton {result['triton']}, {result['date']}, commit {result['commit']}.\n"
    )


def render_damage(damage: dict[str, dict[str, Any]]) -> str:
    """How much of each kind of damage was noticed, and what was not, with the reason."""
    counts, missed = dict[tuple[str, str, str], list[bool]](), list[str]()
    for kind, made in damage.items():
        for row in made["rows"]:
            change = row["change"] if kind == "order" else "changed"
            counts.setdefault((kind, row["where"], change), []).append(bool(row["noticed"]))
            if not row["noticed"]:
                what = " ".join(row["what"].split())
                missed.append(f"- `{row['where']}`, {row['line']}, `{what}`, {change}: {row['reason']}\n")
    header = ["kind", "where", "change", "noticed", "of"]
    rows = [[*key, str(sum(found)), str(len(found))] for key, found in counts.items()]
    made = "; ".join(f"{kind}: Triton {of['triton']}, {of['date']}" for kind, of in damage.items())
    listed = "".join(missed) or "nothing\n"
    return f"{markdown(header, rows)}\n{made[0].upper()}{made[1:]}.\n\nNot noticed:\n\n{listed}"


def render_brief(result: dict[str, Any]) -> str:
    """A table of recurrences and architectures, and how much damage was noticed."""
    groups = dict[tuple[str, str], list[dict[str, Any]]]()
    for row in result["rows"]:
        name = row["case"].partition(",")[0].split()[0]
        groups.setdefault((name, f"sm_{row['architecture']}"), []).append(row)
    header = ["recurrence", "architecture", "cases", "instructions", *(f"error, {p}" for p in PRECISIONS), "conflicts"]
    rows = []
    for (name, architecture), found in sorted(groups.items()):
        errors = {p: [row["error"] for row in found if row["precision"] == p] for p in PRECISIONS}
        rows.append([name, architecture, str(len(found)), f"{sum(row['instructions'] for row in found):,}",
                     *(f"{max(e):.1e}" if e else "–" for e in errors.values()),
                     str(sum(len(row["conflicts"]) for row in found))])  # fmt: skip
    damage = [f"- Damage to {NAMES[kind]}: {_noticed(of['rows'])}.\n" for kind, of in result.get("damage", {}).items()]
    return f"{markdown(header, rows)}\n{_made(result)}" + ("\n" + "".join(damage) if damage else "")


def _noticed(rows: list[dict[str, Any]]) -> str:
    return f"{sum(bool(row['noticed']) for row in rows)} of {len(rows)} were noticed"


def render_costs(result: dict[str, Any]) -> str:
    """Counts of a step of real sizes, and a time that is estimated from them."""
    header = ["case", "precision", "launch", "kernel", "programs", "warps", "instructions of a warp", "barriers",
              "KiB of a program", "estimated us"]  # fmt: skip
    rows = []
    for cost in result["costs"]:
        low, high = estimate(cost)
        rows.append([cost["case"], cost["precision"], cost["launch"], cost["kernel"], str(cost["programs"]),
                     str(cost["warps"]), f"{cost['instructions']:,}", str(cost["barriers"]),
                     f"{cost['bytes'] / 1024:.0f}", f"{low:.1f} to {high:.1f}"])  # fmt: skip
    return markdown(header, rows)


def render_times(result: dict[str, Any]) -> str:
    """The estimated time of a step of each kernel, for a document."""
    rows = []
    for cost in result["costs"]:
        low, high = estimate(cost)
        rows.append([*(cost[key] for key in ("case", "precision", "launch", "kernel")), f"{low:.1f} to {high:.1f}"])
    return markdown(["case", "precision", "launch", "kernel", "estimated us"], rows)


def estimate(cost: dict[str, Any]) -> tuple[float, float]:
    """Microseconds of a step at best and at worst.

    At best each of the four schedulers of a multiprocessor issues an instruction in every cycle, a barrier takes 20
    cycles, and 64 bytes of memory arrive in every cycle meanwhile. At worst each instruction waits 8 cycles for the one
    before, a barrier takes 40 cycles, and then 16 bytes arrive in a cycle, and 5,000 cycles are waited for memory.
    """
    low = max(cost["instructions"] * max(1, cost["warps"] / 4) + 20 * cost["barriers"], cost["bytes"] / 64)
    high = 8 * cost["instructions"] * max(1, cost["warps"] / 32) + 40 * cost["barriers"] + 5000 + cost["bytes"] / 16
    return low / (1000 * CLOCK), high / (1000 * CLOCK)


def _made(result: dict[str, Any]) -> str:
    failed = sum(bool(row["conflicts"]) or row["error"] >= row["tolerance"] for row in result["rows"])
    passed = len(result["rows"]) - failed
    return f"{passed} of {len(result['rows'])} cases passed. Triton {result['triton']}, {result['date']}.\n"
