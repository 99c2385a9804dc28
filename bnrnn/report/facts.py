"""The three sentences with numbers at the top of README.md."""

from itertools import pairwise
from pathlib import Path
from statistics import mean

from bnrnn.report.bench_page import render_ratio
from bnrnn.report.claims import load_claim
from bnrnn.report.full_length import render as render_counted
from bnrnn.report.main_figure import DATA, KEY, METRIC, of_full_length
from bnrnn.report.plots import named
from bnrnn.system.files import read_record


def render(results_dir: Path) -> str:
    """A list of three items: the curve, the published numbers, the speed."""
    speed = render_ratio(read_record(results_dir / "bench/cpu-quick.json", "make bench QUICK=1"))
    return f"- {curve(results_dir)}\n- {render_counted(results_dir)}\n- {speed}\n"


def curve(results_dir: Path) -> str:
    """Our validation accuracy and the paper's in the last window of updates that a run has passed, for each model.

    Windows in which the run was evaluated in another order of images than the paper's do not count.
    """
    curve, parts = load_claim(KEY)["curves"][0], []
    for run in of_full_length(results_dir):
        model, last = run.overrides["model"], max(run.series(METRIC), default=0)
        passed = [(a, b) for a, b in pairwise(curve["windows"]) if b <= last and a >= run.file_order_until]
        if passed:
            low, high = passed[-1]
            ours = run.mean_within(METRIC, low, high)
            paper = mean(y for update, y in curve["points"][model][DATA].items() if low < update <= high)
            assert ours is not None
            parts.append(
                f"our {named('model', model)} has {100 * ours:.1f} % (the paper: {100 * paper:.1f} %) from update "
                f"{low:,} to {high:,}"
            )
    return f"Validation accuracy on permuted MNIST, one run each: {'; '.join(parts)}."
