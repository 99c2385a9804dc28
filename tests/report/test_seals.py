"""Changing one digit of any file on which a page rests is noticed, whatever checksums are computed again."""

import re
import shutil

import pytest

from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.report.seals import check_seals, seal
from bnrnn.system.files import checksum, read_json, write_json

RESULTS = ROOT / "results"
RUN = "quickstart/paper/data=digits,model=lstm,seed=0"
FILES = [f"{RUN}/result.json", f"{RUN}/metrics.jsonl", "cooijmans2016/fig1a.json", "bench/cpu-quick.json",
         "programs/word_language_model.json", "layer/running.json", "choosing/choosing.json",
         "cooijmans2016/table1/models/pmnist-bn_lstm-seed0.safetensors"]  # fmt: skip


def test_the_stored_results_are_as_sealed():
    check_seals(RESULTS)


@pytest.fixture
def results(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(RESULTS / name, tmp_path / name)
    assert seal(tmp_path) == len(FILES)
    (tmp_path / "page.md").write_text("pages and figures are made again, so they are not sealed")
    (tmp_path / "quickstart/paper/wandb").mkdir()
    (tmp_path / "quickstart/paper/wandb/summary.json").write_text("{}")
    check_seals(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_one_digit_is_noticed_also_with_a_new_checksum_in_the_file(results, name):
    path = results / name
    content = path.read_bytes()
    place = re.search(rb"[.]\d*([1-8])", content).start(1)
    path.write_bytes(content[:place] + b"9" + content[place + 1 :])
    if path.suffix == ".json":
        changed = read_json(path, "")
        changed.pop("sha256", None)
        write_json(path, changed | {"sha256": checksum(changed)})
    with pytest.raises(BnrnnError, match=rf"changed: {re.escape(name)}\)"):
        check_seals(results)


def test_missing_and_unsealed_files_and_a_missing_list_are_named(results):
    (results / FILES[0]).unlink()
    (results / "quickstart/new.json").write_text("{}")
    with pytest.raises(BnrnnError, match=rf"missing: {re.escape(FILES[0])}; not sealed: quickstart/new.json"):
        check_seals(results)
    (results / "SEALS").unlink()
    with pytest.raises(BnrnnError, match="SEALS is not a list of checksums"):
        check_seals(results)
