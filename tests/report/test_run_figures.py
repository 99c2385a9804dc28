"""The figures that wandb shows of a run: every recorded value is in one of them."""

import pytest

from bnrnn.report import run_figures
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
