"""How the work of a step is divided: the rule, and measurements, here by a clock that is made up."""

import errno
import json
import math
from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from bnrnn.scan.lstm.triton import LSTMForm, TritonLSTM
from bnrnn.scan.rhn.triton import RHNForm, TritonRHN
from bnrnn.scan.triton_shared import driver, launches, tuning
from bnrnn.scan.triton_shared.tuning import Division, Size
from bnrnn.system.files import writing

H200 = "NVIDIA H200", 132


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "_chosen", {})


def size(B=64, H=100, direction="forward", name="lstm", precision="tf32") -> Size:
    depth = H * (1 if direction == "forward" else 4)
    return Size(f"{name} {direction}", tuning.tile_of(B), 4, H, depth, precision)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("B", [1, 16, 64, 100, 200, 500, 1000, 5000])
@pytest.mark.parametrize("H", [1, 100, 512, 2000])
def test_the_rule_gives_a_thread_a_few_elements_of_each_tile(direction, B, H):
    of = size(B, H, direction)
    rule = tuning.by_rule(of)
    elements = of.tile * 4 * rule.units / (32 * rule.num_warps)
    assert elements <= (32 if direction == "forward" else 16) or rule.units == 1
    assert of.tile >= B and of.tile & (of.tile - 1) == 0 and rule.units & (rule.units - 1) == 0
    assert not rule.fused or rule.units >= 8


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_candidate_has_so_large_tiles_that_it_takes_minutes_to_compile(direction):
    """Population statistics of MNIST are estimated in batches of 5,000: each such candidate took over a minute."""
    of, small = size(5000, 100, direction), size(64, 100, direction)
    rule, *others = tuning.candidates(of, 132)
    assert (rule.units, rule.fused) == (1, False) and not others
    assert {(d.fused, d.whole_sequence) for d in tuning.candidates(small, 132)} == {
        (True, False), (False, False), (True, True)}  # fmt: skip


def test_the_rule_at_the_shapes_of_the_papers():
    found = {name: tuning.by_rule(size(B, H, d)) for name, B, H, d in (
        ("S1", 64, 100, "forward"), ("S2", 64, 1000, "forward"), ("S2 back", 64, 1000, "backward"),
        ("S3", 128, 2000, "forward"))}  # fmt: skip
    assert {name: (d.units, d.fused) for name, d in found.items()} == {
        "S1": (16, True), "S2": (8, True), "S2 back": (8, False), "S3": (8, False)}  # fmt: skip


def test_the_fastest_candidate_is_stored_and_not_measured_again(tmp_path):
    measured = []

    def measure(division: Division) -> float:
        measured.append(division)
        return 3.0 if not division.fused else math.inf if division.whole_sequence else 5.0

    first = tuning.stored(size(), *H200, measure)
    assert first == replace(tuning.by_rule(size()), fused=False)
    assert len(measured) == len(set(measured)) > 3 and measured[0] == tuning.by_rule(size())
    count = len(measured)
    assert tuning.stored(size(), *H200, measure) == first and len(measured) == count
    other = tuning.stored(size(H=200), *H200, lambda division: 1.0)
    assert other == tuning.by_rule(size(H=200))
    (path,) = (tmp_path / "bnrnn").iterdir()
    assert len(json.loads(path.read_text())) == 2
    tuning.stored(size(), "NVIDIA A100", 108, measure)
    assert len(measured) == 2 * count and len(list((tmp_path / "bnrnn").iterdir())) == 2
    tuning.stored(size(), H200[0], 66, measure)  # a process that has half of the GPU under MPS
    assert len(measured) == 3 * count


@pytest.mark.parametrize("error", [RuntimeError("too many blocks"), OutOfResources(300000, 232448, "shared memory")])
def test_a_candidate_that_does_not_fit_is_not_chosen(error):
    def measure(division: Division) -> float:
        if division.num_warps > 4 or division.whole_sequence:
            raise error
        return 1.0 if division.units == 8 else 2.0

    found = tuning.stored(size(), *H200, measure)
    assert (found.units, found.num_warps, found.whole_sequence) == (8, 4, False)


def test_a_small_gain_does_not_replace_the_rule():
    rule = tuning.by_rule(size())
    assert tuning.stored(size(), *H200, lambda division: 1.0 if division == rule else 0.98) == rule


@pytest.mark.parametrize("content", ["", "{", "[]", '{"other": 1}'])
def test_a_damaged_file_is_measured_again(content):
    path = tuning._path(*H200)
    path.parent.mkdir()
    path.write_text(content)
    assert tuning.stored(size(), *H200, lambda division: 1.0) == tuning.by_rule(size())
    assert repr(size()) in json.loads(path.read_text())


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path, caplog):
    (tmp_path / "bnrnn").write_text("")
    assert tuning.stored(size(), *H200, lambda division: 1.0) == tuning.by_rule(size())
    assert "are measured again" in caplog.text


def test_a_file_that_cannot_be_written_costs_only_time(monkeypatch, caplog):
    def full(path, content):
        with writing(path):
            raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(tuning, "write_json", full)
    assert tuning.stored(size(), *H200, lambda division: 1.0) == tuning.by_rule(size())
    assert "are measured again" in caplog.text


def test_kernels_of_whole_sequences_have_no_more_programs_than_the_device_runs_at_once():
    for of in (size(), size(H=1000), size(H=2000), size(name="rhn")):
        for candidate in tuning.candidates(of, 132):
            assert not candidate.whole_sequence or -(-of.units // candidate.units) <= 132
    assert any(candidate.whole_sequence for candidate in tuning.candidates(size(), 132))
    assert not any(candidate.whole_sequence for candidate in tuning.candidates(size(), 6)), "7 programs of 16 units"


def test_on_a_cpu_the_rule_decides(monkeypatch):
    assert tuning.division(size(), torch.device("cpu"), pytest.fail) == tuning.by_rule(size())
    monkeypatch.setenv("BNRNN_TUNE", "0")
    assert tuning.division(size(), torch.device("cuda"), pytest.fail) == tuning.by_rule(size())


def lstm_form() -> LSTMForm:
    return LSTMForm(
        device=torch.device("cpu"), hidden_size=3, num_gates=4, num_layers=1, tile=16, given=("bias", "gamma_hh"),
        batch=True, padded=False, keep=True, eps=1e-5, low=torch.float32, tf32=False, ended_count=False,
    )  # fmt: skip


class Silent:
    """A kernel that computes nothing."""

    def __getitem__(self, grid):
        return lambda *_, **__: None


def test_a_kernel_of_whole_sequences_that_errs_is_never_chosen(monkeypatch):
    of = lstm_form()
    division = replace(tuning.by_rule(of.size("forward")), whole_sequence=True)
    monkeypatch.setattr(tuning, "microseconds", lambda run: 2.0)
    for direction in ("forward", "backward"):
        assert driver.measure(TritonLSTM, of, 2, 4, direction, division) == 1.0  # two steps
    calls = LSTMForm.calls

    def silent(of, direction, division):
        return [call._replace(kernel=Silent()) if division.whole_sequence else call
                for call in calls(of, direction, division)]  # fmt: skip

    monkeypatch.setattr(LSTMForm, "calls", silent)
    launches._known.clear()
    for direction in ("forward", "backward"):
        assert driver.measure(TritonLSTM, of, 2, 4, direction, division) == math.inf


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batch", [False, True])
def test_the_division_of_every_recurrence_can_be_measured(batch, padded, monkeypatch):
    monkeypatch.setattr(tuning, "microseconds", lambda run: run() or 12.0)
    fields = vars(replace(lstm_form(), batch=batch, padded=padded))
    highway = {k: v for k, v in fields.items() if k != "ended_count"} | {"num_gates": 2, "num_layers": 3}
    of_rhn = RHNForm(**highway | {"given": ("bias", "gamma_s", "gamma_z"), "num_entered": 2})
    for kind, of, expected in ((TritonLSTM, LSTMForm(**fields), 6.0), (TritonRHN, of_rhn, 2.0)):  # of two steps
        for direction in ("forward", "backward"):
            for fused in (False, True):
                division = replace(tuning.by_rule(of.size(direction)), fused=fused)
                assert driver.measure(kind, of, 2, 4, direction, division) == expected
