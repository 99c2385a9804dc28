"""Stored configurations are data: the folder of a run cannot call anything that conf/ does not name."""

import json
from pathlib import Path

import pytest
import torch

from bnrnn.errors import BnrnnError
from bnrnn.report.trained import load_trained
from bnrnn.system.files import checksum, write_json
from bnrnn.train import train
from bnrnn.training import checkpoint
from tests.helpers import composed

EVIL = "open('marked', 'w').close()"
ATTACKS: list[dict] = [
    {"_target_": "os.mkdir", "path": "marked"},
    {"_target_": "os.system", "command": "touch marked"},
    {"_target_": "builtins.open", "file": "marked", "mode": "w"},
    {"_target_": "builtins.exec", "_args_": [EVIL]},
    {"_target_": "builtins.eval", "_args_": [EVIL]},
    {"_target_": "shutil.copy", "src": "result.json", "dst": "marked"},
    {"_target_": "subprocess.run", "args": ["touch", "marked"]},
    {"_target_": "torch.hub.load", "repo_or_dir": ".", "source": "local", "model": "mark"},
    {"_target_": "torch.load", "f": "marked", "weights_only": False},
    {"_target_": "pathlib.Path.touch", "_args_": ["marked"]},
    {"_target_": "evil.mark"},
    {"_target_": "bnrnn.system.files.write_text", "path": "marked", "text": ""},
    {"_target_": "bnrnn.layers.lstm.LSTM", "_args_": [{"_target_": "os.mkdir", "path": "marked"}]},
    {"_target_": "bnrnn.layers.lstm.LSTM", "cell_bias": {"_target_": "os.mkdir", "path": "marked"}},
    {"_target_": "bnrnn.layers.lstm.LSTM", "cell_bias": "${oc.env:HOME}"},
    {"_target_": "bnrnn.layers.lstm.LSTM", "_recursive_": False},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    small = ("model=lstm", "model.hidden_size=4", "budget.updates=1", "budget.eval_batches=1", "log_every=1")
    train(composed(*small), folder, {"model": "lstm", "seed": "0"})
    return folder


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack['_target_']}-{len(attack)}")
@pytest.mark.parametrize("place", ["data", "model", "layer"])
def test_a_result_cannot_call_what_no_configuration_names(run, tmp_path, monkeypatch, place, attack):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hubconf.py").write_text(f"def mark():\n    {EVIL}\n")
    (tmp_path / "evil.py").write_text(f"def mark():\n    {EVIL}\n")
    content = json.loads((run / "result.json").read_text())
    if place == "layer":
        content["config"]["model"]["layer"] = attack | {"_partial_": True}
    else:
        content["config"][place] = attack
    content.pop("sha256")
    write_json(tmp_path / "result.json", content | {"sha256": checksum(content)})
    (tmp_path / "model.pt").write_bytes((run / "model.pt").read_bytes())
    with pytest.raises(BnrnnError, match=r"result.json (has|is not)") as caught:
        load_trained(tmp_path, "unused")
    assert not (tmp_path / "marked").exists() and "marked" not in str(caught.value).partition("result.json")[0]


def test_an_untouched_run_loads_and_weights_of_another_model_are_named(run, tmp_path):
    model, data = load_trained(run, "unused")
    assert not model.training and data.num_batches("test", 100) > 0
    (tmp_path / "result.json").write_bytes((run / "result.json").read_bytes())
    saved = torch.load(run / "model.pt", weights_only=True)
    saved["model"]["head.bias"] = torch.zeros(3)
    checkpoint.save(tmp_path / "model.pt", saved)
    with pytest.raises(BnrnnError, match=r"model.pt is not a model of the configuration in result.json"):
        load_trained(tmp_path, "unused")
