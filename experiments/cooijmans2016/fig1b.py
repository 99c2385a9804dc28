"""Cooijmans et al. 2016, Fig. 1b: the derivative of tanh against the standard deviation of its Gaussian input.

    python experiments/cooijmans2016/fig1b.py [--out-dir DIR]

1000 standard deviations from 0 to 1, 1000 samples each: mean of 1 - tanh² and its quartiles. No training, no data.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch

from bnrnn import plots
from bnrnn.errors import report_errors
from bnrnn.evidence import load_claim
from bnrnn.results import provenance
from bnrnn.tables import markdown, publish

KEY = "cooijmans2016/fig1b"


def measure(num: int = 1000) -> dict[str, Any]:
    torch.manual_seed(0)
    sigma = torch.linspace(0, 1, num, dtype=torch.float64)
    derivative = 1 - (sigma * torch.randn(num, num, dtype=torch.float64)).tanh().square()  # (samples, sigma)
    low, high = derivative.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64), dim=0)
    columns = {"sigma": sigma, "mean": derivative.mean(0), "quartile_25": low, "quartile_75": high}
    return {"name": KEY, **provenance(), **{name: values.tolist() for name, values in columns.items()}}


def at(result: dict[str, Any], column: str, sigma: float) -> float:
    """The column averaged over the 21 standard deviations around `sigma` (fewer at the ends)."""
    center = round(sigma * (len(result["sigma"]) - 1))
    values = result[column][max(0, center - 10) : center + 11]
    return sum(values) / len(values)


def render(result: dict[str, Any]) -> str:
    claim = load_claim(KEY)
    rows = []
    for column, points in claim["points"].items():
        for sigma, exact in points.items():
            ours = at(result, column, sigma)
            rows.append([column, f"{sigma}", f"{exact:.3f}", f"{ours:.3f}", f"{ours - exact:+.3f}"])
    table = markdown(["1 - tanh²", "standard deviation", "exact", "sampled", "difference"], rows)
    return f"# {claim['title']}\n\n{table}\n![Fig. 1b](fig1b.png)\n"


def draw(result: dict[str, Any], path: Path) -> None:
    plots.draw_tanh_derivative(result, load_claim(KEY)["points"], path)


def main() -> None:
    parser = ArgumentParser(description="Fig. 1b of Cooijmans et al. 2016")
    parser.add_argument("--out-dir", type=Path, default=Path("outputs"))
    args = parser.parse_args()
    publish(KEY, measure(), args.out_dir, render, draw)


if __name__ == "__main__":
    report_errors(main)
