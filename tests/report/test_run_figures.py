"""The figures that wandb shows of a run: every recorded value is in one of them."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from bnrnn.report import plots, run_figures, style
from bnrnn.report.claims import analysis_of
from tests.toy_captions import ToyCaptions


def test_training_and_validation_share_a_panel_and_gradient_norms_are_logarithmic():
    records = [
        {"update": 2, "seconds": 1.0, "train/loss": 2.0, "train/grad_norm": 1.0, "train/grad_norm_max": 9.0},
        {"update": 3, "seconds": 2.0, "valid/loss": 1.5, "valid/accuracy": 0.5},
        {"update": 4, "seconds": 3.0, "train/loss": None, "train/grad_norm": 2.0, "train/grad_norm_max": 3.0},
    ]
    panels = run_figures.curves(records).axes
    found = [{line.get_label(): list(line.get_xydata().tolist()) for line in ax.get_lines()} for ax in panels]
    assert found == [
        {"train/grad_norm": [[2, 1.0], [4, 2.0]], "train/grad_norm_max": [[2, 9.0], [4, 3.0]]},
        {"train/loss": [[2, 2.0]], "valid/loss": [[3, 1.5]]},
        {"valid/accuracy": [[3, 0.5]]},
    ]
    assert [ax.get_yscale() for ax in panels] == ["log", "linear", "linear"]


@pytest.mark.parametrize("count", [0, 2])
def test_captions_are_shown_beside_the_images_or_alone(monkeypatch, count):
    data = ToyCaptions()
    monkeypatch.setattr(run_figures, "COUNT", 2)
    pixels = [[[[0.0, 0.5, 1.0]]]] * count
    monkeypatch.setattr(data, "thumbnails", lambda split, asked: pixels[:asked] if split == "test" else None)
    fig = run_figures.captions(data, {"": ["one", "two"], "_beam3": ["three", "four"]})
    texts = [text.get_text().splitlines() for ax in fig.axes for text in ax.texts]
    people = [f"a person: {image.captions[0]}" for image in data.images["test"][:2]]
    assert texts == [["greedy: one", "beam3: three", people[0]], ["greedy: two", "beam3: four", people[1]]]
    assert sum(len(ax.images) for ax in fig.axes) == count


def test_photographs_and_captions_by_people_are_drawn_where_the_dataset_is_and_stored_nowhere(tmp_path, monkeypatch):
    fig3 = analysis_of("zhang2017/fig3").module()
    image = {"name": "1.jpg", "captions": {"lstm_captioner": "a <unk> runs"}}
    result = {"seed": "0", "updates": 10, "data": "Flickr8k", "images": [image]}
    assert "| 1.jpg | a &lt;unk&gt; runs |" in fig3.render(result) and "![" not in fig3.render(result)
    monkeypatch.setenv("BNRNN_DATA", str(tmp_path))
    fig3.draw(result, tmp_path / "fig3.png")
    assert not (tmp_path / "fig3.png").exists()

    folder = tmp_path / "flickr8k"
    folder.mkdir()
    (folder / "captions.txt").write_text("image,caption\n1.jpg,A dog .\n1.jpg,An animal .\n")
    content = io.BytesIO()
    Image.fromarray(np.full((20, 30, 3), 9, np.uint8)).save(content, "JPEG")
    with tarfile.open(folder / "images.tar", "w") as archive:
        member = tarfile.TarInfo("images/1.jpg")
        member.size = len(content.getvalue())
        archive.addfile(member, io.BytesIO(content.getvalue()))
    drawn = []
    monkeypatch.setattr(plots, "gallery", lambda images, pixels: drawn.append((images, pixels)))
    monkeypatch.setattr(style, "save", lambda figure, path: path.touch())
    fig3.draw(result, tmp_path / "fig3.png")
    ((images, (pixels,)),) = drawn
    assert images == [image | {"reference": "A dog ."}] and pixels.mean() == pytest.approx(9, abs=2)
