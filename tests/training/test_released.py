"""Released models: they are small, load with the numbers of their run, and refuse what is damaged or foreign."""

import json
import os
from pathlib import Path

import pytest
import torch

from bnrnn.config import ROOT
from bnrnn.data.base import SHUFFLED, evaluation_generator
from bnrnn.errors import BnrnnError
from bnrnn.report import model_card
from bnrnn.scan import set_backend
from bnrnn.train import train
from bnrnn.training.released import _built, _read, about, estimate, load_released, release
from scripts.release import main
from tests.helpers import composed

RUN = ("model=bn_lstm", "model.hidden_size=16", "data.state_noise=0.1", "budget.updates=6", "budget.eval_every=3",
       "log_every=2", "population_batch_size=200")  # fmt: skip
MODELS = sorted((ROOT / "results").glob("*/*/models/*.safetensors"))
DATA = Path(os.environ.get("BNRNN_DATA", "data"))
SEEN, TESTED = 1, 500  # batches of the training set, and test images of the sample


def accuracy(model, data, config, most: int = 10_000) -> float:
    """As a run measures it: with its batches, in its order, and with its noise. `most` limits the number of images."""
    torch.manual_seed(config["seed"])
    right = []
    with torch.no_grad():
        for batch in data.batches("test", config["batch_size"], evaluation_generator(SHUFFLED, "test", config["seed"])):
            right.append((model(batch.inputs)[0].argmax(-1) == batch.targets).flatten())
            if sum(map(len, right)) >= most:
                break
    return torch.cat(right).float().mean().item()


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    train(composed(*RUN), folder / "run", {"model": "bn_lstm", "seed": "1"})
    release(folder / "run", folder / "models" / "model.safetensors")
    return folder


def test_a_released_model_predicts_as_the_model_of_its_run(released):
    saved = torch.load(released / "run/model.pt", weights_only=True)["model"]
    model, data = load_released(released / "models/model.safetensors", "unused")
    assert not model.training
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, saved[name], msg=lambda text, name=name: f"{name}: {text}")
    given = about(released / "models/model.safetensors")
    assert accuracy(model, data, given["config"]) == pytest.approx(given["metrics"]["test/accuracy"], abs=1e-6)


def test_statistics_are_estimated_from_as_many_batches_as_the_run_took_or_as_are_asked_for(released):
    path = released / "models/model.safetensors"
    given, weights = _read(path)
    for of_run, asked, expected in ((None, None, "all"), (3, None, 3), (3, 2, 2), (None, 1, 1)):
        model, data = _built(path, given["config"], weights, "unused")
        sizes = []
        model.register_forward_hook(lambda module, inputs, output, sizes=sizes: sizes.append(len(output[0])))
        budget = given["config"]["budget"] | {"population_batches": of_run}
        estimate(model, data, given["config"] | {"budget": budget}, asked)
        assert len(sizes) == (data.num_batches("train", 200) if expected == "all" else expected)


def test_the_same_run_gives_the_same_file(released, tmp_path):
    release(released / "run", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (released / "models/model.safetensors").read_bytes()


def test_it_has_no_population_statistics_and_tells_its_recipe_and_numbers(released):
    path = released / "models/model.safetensors"
    given, weights = _read(path)
    assert not any("pop_" in name for name in weights) and any("weight_hh" in name for name in weights)
    result = json.loads((released / "run/result.json").read_text())
    assert given["metrics"] == result["metrics"] and given["overrides"] == {"model": "bn_lstm", "seed": "1"}
    page = model_card.render(released / "models", released)
    assert f"{result['metrics']['test/accuracy']:.4f}" in page and "`model=bn_lstm`, `seed=1`" in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-7], "is not a released model"),
        (lambda b: b[:300] + b"\0" + b[301:], "is not a released model"),
        (lambda b: b"", "is not a released model"),
        (lambda b: b.replace(b"released model 1", b"released model 7"), "expected 'bnrnn released model 1'"),
        (lambda b: b.replace(b"bnrnn.layers.bn_lstm.BNLSTM", b"bnrnn.train.undocumented_xy"), "no file in .* names"),
        (
            lambda b: b.replace(b"bnrnn.layers.bn_lstm.BNLSTM", b"os.system0000000000000000000"[:27]),
            "no file in .* names",
        ),
        (lambda b: b[:-9] + b"\7" + b[-8:], "its weights do not have their checksum"),
        (lambda b: b.replace(b"head.weight", b"head.weighs"), "its weights do not fit the model: head.weighs"),
    ],
)
def test_a_damaged_or_foreign_file_is_named_and_calls_nothing(released, tmp_path, change, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(change((released / "models/model.safetensors").read_bytes()))
    with pytest.raises(BnrnnError, match=message) as caught:
        load_released(path, "unused")
    assert str(path) in str(caught.value)


def test_the_script_releases_what_has_finished(tmp_path, capsys):
    with pytest.raises(BnrnnError, match="has no finished run with its model: train quickstart first"):
        main(["quickstart", "--results", str(tmp_path)])
    folder = tmp_path / "quickstart/paper/data=digits,model=lstm,seed=0"
    train(composed("experiment=quickstart", "model=lstm", *RUN[1:2], *RUN[3:]), folder, {"model": "lstm", "seed": "0"})
    main(["quickstart", "--results", str(tmp_path)])
    (path,) = (tmp_path / "quickstart/models").iterdir()
    assert path.name == "digits-lstm-seed0.safetensors" and f"{path.stat().st_size:,} bytes" in capsys.readouterr().out


@pytest.mark.skipif(not MODELS, reason="no run of the paper's length has finished")
@pytest.mark.skipif(not (DATA / "mnist").exists(), reason="needs MNIST in BNRNN_DATA")
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_stored_model_has_the_accuracy_of_its_card_on_a_sample(path):
    """A sample of 500 images has an error of three standard deviations at most; so few statistics cost little."""
    set_backend("auto")
    given, weights = _read(path)
    model, data = _built(path, given["config"], weights, str(DATA))
    estimate(model, data, {**given["config"], "population_batch_size": 500}, SEEN)
    published = given["metrics"]["test/accuracy"]
    spread = (published * (1 - published) / TESTED) ** 0.5
    assert accuracy(model, data, given["config"], TESTED) == pytest.approx(published, abs=3 * spread + 0.01)
    assert path.stat().st_size < 1_000_000
