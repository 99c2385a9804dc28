"""Cooijmans et al. 2016, Fig. 1a: gradients through a batch-normalized tanh RNN, for ten initial gammas.

    python experiments/cooijmans2016/fig1a.py [--data-dir DIR] [--out-dir DIR] [--num-draws 10]

Measures, before training and in float64, the norm over units of the gradient of the loss with respect to h_t, averaged
over a batch of 100 training images in the authors' pixel order (D8), for several draws of weights and images.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from tqdm import tqdm

from bnrnn.config import compose_config
from bnrnn.errors import report_errors
from bnrnn.inputs import Batch
from bnrnn.report import style
from bnrnn.report.analyses import command_line, publish
from bnrnn.report.claims import analysis_of
from bnrnn.report.markdown import markdown
from bnrnn.report.site.curves import Line, Plot, shortened
from bnrnn.training.provenance import provenance

KEY = "cooijmans2016/fig1a"
VANISHING = 0.6  # for this gamma and larger ones, the caption counts the paper's points below our median


def gradient_norms(gamma: str, batch: Batch) -> list[float]:
    """The norm of dloss/dh_t, averaged over the batch, at every t, for a random network from torch's generator."""
    cfg = compose_config("model=bn_rnn", "data=pmnist", f"model.layer.gamma_init={gamma}")
    x = batch.inputs.double()
    model = instantiate(cfg.model, input_size=1, output_size=10, t_max=len(x)).double()
    state = (model.initial_state["h"][:, None].expand(-1, x.shape[1], -1),)  # (1, B, H)
    hs = []
    for t in range(len(x)):  # one step at a time, because every h_t is needed
        _, state = model.layer(x[t : t + 1], state, t_start=t)
        hs.append(state[0])
    loss = F.cross_entropy(model.head(hs[-1][0]), batch.targets[-1])
    return [float(f"{grad.norm(dim=2).mean():.4g}") for grad in torch.autograd.grad(loss, hs)]


def measure(data_dir: str, num_draws: int, gammas: list[str]) -> dict[str, Any]:
    data = instantiate(compose_config("data=pmnist", f"data_dir={data_dir}").data)
    norms = {gamma: [] for gamma in gammas}
    for draw, gamma in tqdm([(d, g) for d in range(num_draws) for g in gammas], unit=" networks", disable=None):
        torch.manual_seed(draw)
        batch = next(data.batches("train", 100, torch.Generator().manual_seed(draw)))
        norms[gamma].append(gradient_norms(gamma, batch))
    return {"name": KEY, **provenance(), "gradient_norms": norms}  # gamma -> draw -> t


def log10(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    """log10 of the norms (draws, T), by gamma."""
    return {g: torch.tensor(draws, dtype=torch.float64).log10() for g, draws in result["gradient_norms"].items()}


def stays_flat(result: dict[str, Any], gammas: list[str], step: int, above: float) -> list[bool]:
    """For each draw, whether log10 of the norm at this step is above a bound for all these gammas."""
    return torch.stack([log10(result)[gamma][:, step] > above for gamma in gammas]).all(0).tolist()


def vanishes(result: dict[str, Any], gammas: list[str], step: int, below: float) -> list[bool]:
    """For each draw, whether log10 of the norm at this step is below a bound for all these gammas."""
    return torch.stack([log10(result)[gamma][:, step] < below for gamma in gammas]).all(0).tolist()


def plot(result: dict[str, Any]) -> Plot:
    """The interactive plot: one line for each gamma and draw."""
    analysis, lines, points = analysis_of(KEY), [], []
    for gamma, norms in log10(result).items():
        for k, values in enumerate(norms.tolist()):
            shown = [shortened(value) for value in values]
            lines.append(Line(f"gamma {gamma}", {"time step": list(range(len(shown)))}, shown, member=str(k)))
        paper = analysis.numbers["log10"][gamma]
        points.append(Line(f"gamma {gamma}", {"time step": analysis.numbers["steps"][: len(paper)]}, paper))
    return Plot(["time step"], {"": "log10 of the gradient norm |dloss / dh_t|"}, lines, points, "draw")


def render(result: dict[str, Any]) -> str:
    analysis, rows, within, below, spans = analysis_of(KEY), [], [], [], [0.0]
    steps, missing = analysis.numbers["steps"], "< -25"
    num_draws = len(result["gradient_norms"]["0.1"])
    for gamma, norms in log10(result).items():
        paper = analysis.numbers["log10"][gamma]
        at = norms[:, steps]
        lowest, highest = at.min(0).values - 0.05, at.max(0).values + 0.05  # the paper's points are rounded to 0.1
        within += [bool(low <= v <= high) for v, low, high in zip(paper, lowest, highest, strict=False)]
        median = at.quantile(0.5, dim=0)
        if float(gamma) >= VANISHING:
            later = slice(1, len(paper))  # at the first step all draws agree
            below += (torch.tensor(paper[later]) < median[later]).tolist()
            spans += (at.max(0).values - at.min(0).values)[later].tolist()
        rows.append([gamma, "paper", *(f"{v:.1f}" for v in paper), *[missing] * (len(steps) - len(paper))])
        rows.append(["", "ours, median", *(f"{v:.1f}" for v in median)])
        rows.append(["", "lowest", *(f"{v:.1f}" for v in at.min(0).values)])
        rows.append(["", "highest", *(f"{v:.1f}" for v in at.max(0).values)])
    caption = (
        f"log10 of the gradient norm at step t, for {num_draws} draws of weights and images; the paper has one draw. "
        f"{sum(within)} of the paper's {len(within)} points lie within the range of our draws. This range is wide "
        f"where gradients vanish, up to {max(spans):.0f} orders of magnitude. For gammas from {VANISHING} on, "
        f"{sum(below)} of the paper's {len(below)} points after the first step lie below our median.\n"
    )
    table = markdown(["gamma", "", *(f"t={t}" for t in steps)], rows)
    return f"# {analysis.title}\n\n{caption}\n{table}\n![Fig. 1a](fig1a.png)\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot the median over draws as one line per gamma; circles are the paper's points."""
    analysis = analysis_of(KEY)
    fig, ax = plt.subplots(figsize=(8, 5))
    colors = plt.get_cmap("viridis")
    norms = log10(result)
    for k, (gamma, values) in enumerate(norms.items()):
        color = colors(k / len(norms))
        ax.plot(values.quantile(0.5, dim=0), color=color, label=f"gamma {gamma}")
        paper = analysis.numbers["log10"][gamma]
        ax.plot(analysis.numbers["steps"][: len(paper)], paper, "o", color=color, markerfacecolor="none", markersize=5)
    ax.plot([], [], "o", color="grey", markerfacecolor="none", label="paper, one draw")
    ax.set(xlabel="time step t", ylabel="log10 of |dloss / dh_t|", xlim=(0, 800), ylim=(-27, 1))
    ax.set_title(
        f"Gradients through a batch-normalized tanh RNN, median of {len(result['gradient_norms']['0.1'])} draws"
    )
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    style.save(fig, path)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--num-draws", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(args.data_dir, 1 if args.smoke else args.num_draws, list(analysis_of(KEY).numbers["log10"]))
    publish(KEY, result, args.out_dir, render, draw)


if __name__ == "__main__":
    report_errors(main)
