"""Every program in examples/ runs, with installed packages alone, and prints the figures that it promises."""

import ast
import re
import runpy
import sys

import pytest

from bnrnn.config import ROOT

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


@pytest.mark.parametrize("layer", ["bnrnn", "torch"])
def test_a_word_model_with_running_statistics_is_evaluated_after_every_epoch(figures, layer):
    first, second, milliseconds = figures("word_model.py", "--words", "15000", "--epochs", "2", "--layer", layer)
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


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_uses_what_pip_install_gives(path):
    source = path.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name for name in others if name.partition(".")[0] not in ("torch", "ignite")} == {"bnrnn"}
    assert len(source.splitlines()) < 100
