"""Every program in examples/ runs, with installed packages alone, and prints the figures that it promises."""

import ast
import importlib
import io
import json
import re
import runpy
import sys
import tarfile
import wave

import pytest
import torch

from bnrnn.config import ROOT
from bnrnn.report import choosing_page
from bnrnn.report.site import notebook
from scripts import notebook as notebooks

EXAMPLES = ROOT / "examples"


@pytest.fixture
def figures(monkeypatch, capsys):
    """Runs a program with options and returns the numbers after the colons of what it prints, line by line."""

    def run(name: str, *options: str) -> list[float]:
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return [float(n) for n in re.findall(r"^[\w ]+: (\d\S*)", capsys.readouterr().out, re.MULTILINE)]

    return run


def test_a_character_model_learns_more_than_how_frequent_characters_are(figures):
    untrained, trained = figures("character_model.py", "--updates", "30")
    assert untrained > 6
    assert trained < 3.8  # 4.7 bits without any context


@pytest.mark.parametrize("norm", ["batch", "layer", "torch"])
def test_a_word_model_is_evaluated_after_every_epoch(figures, norm):
    first, second, milliseconds = figures("word_model.py", "--words", "15000", "--epochs", "2", "--norm", norm)
    assert second < first < 1333  # the number of types
    assert second < 400
    assert milliseconds > 0


def test_packed_waves_are_classified_the_same_as_single_ones(figures):
    accuracy, difference = figures("packed_sequences.py", "--updates", "40")
    assert accuracy > 0.5  # guessing: 0.25
    assert difference < 1e-5


def test_a_stream_in_pieces_is_predicted_as_well_as_the_whole_signal(figures):
    error, of_last_value, difference = figures("streaming.py", "--updates", "30")
    assert error < 0.5 * of_last_value
    assert difference < 1e-5


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # imported by ignite
def test_a_model_that_ignite_trains_is_evaluated_with_population_statistics(figures):
    (accuracy,) = figures("ignite_training.py", "--epochs", "1")
    assert accuracy > 0.6  # guessing: 0.25


def without(result, key):
    """The runs of a result in any order, without one of their numbers."""
    return sorted(str({name: value for name, value in run.items() if name != key}) for run in result["runs"])


def write_phones(folder):
    """Four speakers with noise in which people would have marked phones."""
    folder.mkdir()
    with tarfile.open(folder / "timit_sample.tar.gz", "w:gz") as tar:
        for speaker in range(4):
            sound, marks = (
                io.BytesIO(),
                "0 1600 h#\n"
                + "".join(
                    f"{n} {n + 160 * (1 + n // 1600)} {'aa' if n % 3200 else 'iy'}\n" for n in range(1600, 16000, 1600)
                ),
            )
            with wave.open(sound, "wb") as file:
                file.setparams((1, 2, 16000, 0, "NONE", ""))
                file.writeframes(torch.randint(-999, 999, (18000,), dtype=torch.int16).numpy().tobytes())
            for name, content in ((f"{speaker}/si1.wav", sound.getvalue()), (f"{speaker}/si1.phn", marks.encode())):
                info = tarfile.TarInfo(f"timit/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def test_the_comparison_of_norms_measures_every_case_with_both_kinds_of_statistics(tmp_path, monkeypatch, figures):
    write_phones(tmp_path / "speech")
    (tmp_path / "ptb").mkdir()
    text = "the quick brown fox jumps over a lazy dog while seven other animals sleep " * 40
    (tmp_path / "ptb/ptb.train.txt").write_text(text)
    for split in ("train", "valid"):
        (tmp_path / f"ptb/ptb.char.{split}.txt").write_text(" ".join(text.replace(" ", "_")))
    monkeypatch.setenv("BNRNN_DATA", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    tasks = importlib.import_module("choosing_tasks")
    monkeypatch.setattr(tasks, "T_MAX", {"phones": 40, "characters": 5, "words": 16})
    monkeypatch.setattr(tasks, "LARGE", 8)
    path = tmp_path / "choosing.json"
    figures("choosing.py", "--out", str(path), "--seeds", "1", "--updates", "2")
    result = json.loads(path.read_text())
    assert len(result["runs"]) == 7 * 6
    for run in result["runs"]:
        scores = [value for name, value in run.items() if name in ("none", "running", "exact", "beyond t_max")]
        assert len(scores) == (1 if run["norm"] in ("none", "layer") else 3 if run["task"] == "characters" else 2)
        assert all(0 <= value < 10 for value in scores)
    interrupted = result | {"runs": [run for run in result["runs"] if run["norm"] != "layer"]}
    interrupted["runs"][0]["seconds"] = 123.0
    path.write_text(json.dumps(interrupted))
    figures("choosing.py", "--out", str(path), "--seeds", "1", "--updates", "2")
    assert [file.name for file in tmp_path.glob("choosing.*")] == ["choosing.json"]
    resumed = json.loads(path.read_text())
    assert resumed["runs"][0]["seconds"] == 123.0  # kept
    assert without(resumed, "seconds") == without(result, "seconds")
    for name in choosing_page.TABLES:
        assert len(choosing_page.render(result, name).splitlines()) >= 7
    choosing_page.draw(result, tmp_path / "choosing.png")
    assert (tmp_path / "choosing.png").exists()


def test_a_table_of_norms_has_the_mean_and_the_deviation_of_the_seeds():
    of = {"task": "phones", "case": "as described"}
    runs = [{**of, "norm": "none", "none": 0.5}, {**of, "norm": "none", "none": 0.7}]
    runs += [{**of, "norm": "batch", "running": 0.1, "exact": value} for value in (0.2, 0.4)]
    lines = choosing_page.render({"runs": runs}, "choosing/padding").splitlines()
    assert lines[2:] == ["| `none` | 0.600 ± 0.141 | – |", "| `batch` | 0.300 ± 0.141 | – |"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what scikit-learn imports
def test_the_notebook_runs_and_prints_what_is_stored():
    cells = [c for c in json.loads((EXAMPLES / "gamma.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    outputs = notebooks.run(cells)
    assert [len(found) for found in outputs] == [len(cell["outputs"]) for cell in cells]
    saturation, now = ("".join(of["text"]) for of in (cells[1]["outputs"][0], outputs[1][0]))
    assert now == saturation
    gradients = re.findall(r"gradient is (\S+) times", "".join(outputs[2][0]["text"]))
    assert 0.1 < float(gradients[0]) < 10
    assert float(gradients[-1]) < 1e-20  # gamma 1
    accuracies = [float(n) for n in re.findall(r"accuracy (\S+),", "".join(outputs[4][0]["text"]))]
    assert accuracies[0] > accuracies[-1]


def test_a_page_of_the_site_has_everything_of_a_notebook(tmp_path):
    notebook.write(EXAMPLES / "gamma.ipynb", tmp_path / "gamma.md")
    page = (tmp_path / "gamma.md").read_text()
    assert page.startswith("# How gamma works")
    assert page.count("```python") == 5 and page.count("```text") == 5
    assert [(tmp_path / name).exists() for name in re.findall(r"!\[Figure \d\]\((\S+)\)", page)] == [True] * 3


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_uses_what_pip_install_gives(path):
    source = path.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name for name in others if name.partition(".")[0] not in ("torch", "ignite", "choosing_tasks")} == {"bnrnn"}
    assert len(source.splitlines()) < (200 if path.stem == "choosing_tasks" else 100)
