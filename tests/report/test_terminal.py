import json

import pytest

from bnrnn.errors import BnrnnError
from bnrnn.report.evidence import Evidence
from bnrnn.report.terminal import default_metric, plot, read_curves


def put(folder, values: dict[int, float]) -> None:
    folder.mkdir(parents=True)
    lines = [json.dumps({"update": u, "valid/bpc": v}) for u, v in values.items()]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))


def test_seeds_are_averaged_and_the_differing_overrides_name_the_curves(tmp_path):
    put(tmp_path / "a/table/paper/data=text8,model=lstm,log_every=1,seed=0", {10: 3.0, 20: 2.0})
    put(tmp_path / "a/table/paper/data=text8,model=lstm,log_every=1,seed=1", {10: 4.0})  # still being trained
    put(tmp_path / "a/table/paper/data=text8,model=captioner/rhn,log_every=1,seed=0", {10: 1.0, 20: 0.5})
    put(tmp_path / "a/table/cpu/data=text8,model=lstm,log_every=1,seed=0", {10: 2.0})
    panels = read_curves("a/table", Evidence(tmp_path), "valid/bpc")
    assert {name: set(curves) for name, curves in panels.items()} == {
        "paper, data=text8": {"model=lstm", "model=captioner/rhn"}, "cpu, data=text8": {"model=lstm"}
    }  # fmt: skip
    text = plot(panels["paper, data=text8"], "valid/bpc", "paper", colored=False)
    assert "a model=captioner/rhn (n=1): 0.5 at update 20" in text
    assert "b model=lstm (n=2): 3.5 at update 10" in text
    drawn = [line for line in text.splitlines() if "│" in line or "┤" in line]
    assert [sum(line.count(letter) for line in drawn) for letter in "ab"] == [2, 1]
    assert "\x1b" not in text and "\x1b" in plot(panels["paper, data=text8"], "valid/bpc", "paper", colored=True)


def test_a_metric_that_no_run_has_is_named_with_those_that_there_are(tmp_path):
    put(tmp_path / "a/table/paper/model=lstm,seed=0", {10: 3.0})
    with pytest.raises(BnrnnError, match=r"no curve of valid/ppl: its metrics are valid/bpc"):
        read_curves("a/table", Evidence(tmp_path), "valid/ppl")
    assert default_metric("cooijmans2016/table2") == "valid/bpc" and default_metric("quickstart") == "valid/accuracy"
