"""Zhang et al. 2017, Fig. 3: images with the captions of the three models and one that a person wrote.

    python experiments/zhang2017/fig3.py [--data-dir DIR] [--out-dir DIR]

Reads the finished runs of the captioners on Flickr8k in --out-dir, with the lowest seed, and the images in
<data-dir>/flickr8k/*.tar. Captions come from greedy search with population statistics.
"""

import os
from html import escape
from pathlib import Path
from typing import Any

import torch

from bnrnn.config import label, sweep
from bnrnn.data.flickr8k import load_captions, thumbnails
from bnrnn.errors import report_errors
from bnrnn.models.decoding import decode
from bnrnn.report import plots, style
from bnrnn.report.analyses import command_line, publish
from bnrnn.report.claims import analysis_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.markdown import markdown
from bnrnn.report.trained import load_trained, trained_runs
from bnrnn.training.provenance import provenance

KEY = "zhang2017/fig3"


def measure(data_dir: str, results_dir: Path) -> dict[str, Any]:
    analysis = analysis_of(KEY)
    runs = trained_runs(analysis.models, Evidence(results_dir))
    seed = min(run.seed for run in runs)
    by_setting = {run.overrides["setting"]: run for run in runs if run.seed == seed}
    images: list[dict[str, Any]] = []
    for setting in (s for s in sweep(analysis.models)["setting"] if s in by_setting):
        model, data = load_trained(by_setting[setting].folder, data_dir)
        chosen = data.images["test"][: analysis.numbers["count"]]
        images = images or [{"name": image.name, "captions": {}} for image in chosen]
        found = decode(model, data.features_of("test")[: analysis.numbers["count"]])
        for image, caption in zip(images, found, strict=True):
            image["captions"][setting] = data.spell(caption.ids)
    about = {"updates": runs[0].result.updates, "data": runs[0].result.data, "seed": seed}
    return {"name": KEY, **provenance(), **about, "images": images}


def render(result: dict[str, Any]) -> str:
    rows = [[image["name"], *map(escape, image["captions"].values())] for image in result["images"]]
    header = ["image", *(label("setting", setting) for setting in result["images"][0]["captions"])]
    caption = (
        f"The first test images, seed {result['seed']}, after up to {result['updates']:,} updates. {result['data']}.\n"
    )
    about = (
        "The photographs, and the captions that people wrote, are not part of this repository. "
        "`make reproduce-zhang2017-fig3` draws them beside these captions where the dataset is.\n"
    )
    return f"# {analysis_of(KEY).title}\n\n{caption}\n{markdown(header, rows)}\n{about}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the images with their captions. The dataset may not be passed on: without it, nothing is drawn."""
    folder = Path(os.environ.get("BNRNN_DATA", "data"), "flickr8k")
    if not any(folder.glob("*.tar")):
        return
    names = [image["name"] for image in result["images"]]
    written = load_captions(next(folder.glob("captions*.txt")))
    images = [image | {"reference": written[image["name"]][0]} for image in result["images"]]
    style.save(plots.gallery(images, thumbnails(names, folder)), path)


def main() -> None:
    args = command_line(__doc__).parse_args()
    os.environ["BNRNN_DATA"] = args.data_dir
    torch.set_num_threads(1)
    publish(KEY, measure(args.data_dir, args.out_dir), args.out_dir, render, draw)


if __name__ == "__main__":
    report_errors(main)
