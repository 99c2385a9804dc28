"""The benchmark: what it times is the same computation, and what it prints follows from what it measured."""

import json
import os
import subprocess
import sys

import pytest
import torch

from bnrnn import bench, bench_reader, bench_rhn, bench_speech
from bnrnn.bench import NAIVE, NN_LSTM, NaiveLSTM, Plan, Shape, judge, judge_times
from bnrnn.bench_page import render
from bnrnn.bench_rhn import NaiveBNRHN
from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_rhn import BNRHN
from bnrnn.layers.stack import LSTM
from bnrnn.scan import backend, set_backend
from scripts.bench import main
from tests.helpers import assert_near

CPU = torch.device("cpu")
TINY = {
    "S1": Shape("pixels", T=4, quick_T=3, B=4, I=1, H=5, targets={"cpu": 1e6}),
    "S2": Shape("characters", T=4, quick_T=3, B=4, I=6, H=5, one_hot=True, input_gradient=True),
}
PLAN = Plan("tiny", full_length=True, memory=False, threads=(1,), error_T=2, seconds=0.0)


@pytest.fixture(autouse=True)
def _engines(monkeypatch):
    # Without Triton's kernels, which tests run in Python: nothing to time.
    monkeypatch.setattr(bench, "BACKENDS", ("auto", "reference", "fused", "cpu"))
    for name in ("T", "B", "S", "V"):
        monkeypatch.setattr(bench_reader, name, 4)
    for name in ("T", "B", "H", "D"):
        monkeypatch.setattr(bench_rhn, name, 3)
    for name in ("T", "B", "F", "H"):
        monkeypatch.setattr(bench_speech, name, 5)
    yield
    set_backend("auto")


def test_the_naive_loop_is_the_highway_layer():
    layer = BNRHN(3, 5, 4, depth=2)
    naive, x = NaiveBNRHN(layer), torch.randn(4, 6, 3)
    assert_near("y", layer(x)[0], naive(x)[0])


@pytest.mark.parametrize("norm", ["batch", "input_batch"])
def test_the_naive_loop_is_the_layer(norm):
    lstm = LSTM(3, 5, 2, norm=norm, t_max=6).double()
    naive = NaiveLSTM(lstm).double()
    x = torch.randn(6, 4, 3, dtype=torch.float64, requires_grad=True)
    h, c = torch.randn(2, 2, 4, 5, dtype=torch.float64).unbind(0)
    wanted = [*lstm.named_parameters(), ("x", x), ("h", h.requires_grad_()), ("c", c.requires_grad_())]
    gradients = torch.randn(6, 4, 5, dtype=torch.float64), h.detach(), c.detach()

    def run(of):
        y, state = of(x, (h, c))
        return y, *state, *torch.autograd.grad((y, *state), [leaf for _, leaf in wanted], gradients)

    for name, a, b in zip(["y", "h_n", "c_n", *(name for name, _ in wanted)], run(lstm), run(naive), strict=True):
        assert_near(name, a, b)
    assert len(naive.running) == (6 if norm == "batch" else 2)
    for mean, var in naive.running.values():  # statistics of every step were kept
        assert (mean != 0).all() and (var != 1).all()


def test_every_engine_that_can_run_is_found_and_is_exact():
    found = bench.engines(CPU)
    assert {"reference", "fused"} <= set(found) and "auto" not in found
    for shape in TINY.values():
        errors = bench.relative_errors([NAIVE, *found], shape, shape.T, CPU)
        assert list(errors) == [NAIVE, *found]
        assert all(0 < error < 1e-5 for error in errors.values())


def test_an_engine_that_cannot_run_is_left_out_and_said(monkeypatch, capsys):
    def refuse(device, dtype):
        raise BnrnnError("no compiler")

    monkeypatch.setattr(bench, "backend", refuse)
    assert bench.engines(CPU) == []
    assert "without fused: no compiler" in capsys.readouterr().err


def test_all_variants_take_turns():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = bench.time_in_turn(runs, CPU, PLAN)
    assert order == ["a", "b"] * 4  # a warm-up and the least number of rounds
    assert [len(t) for t in times.values()] == [3, 3]


TIMES = {
    NN_LSTM: [100.0, 101.0, 300.0],
    NAIVE: [220.0, 202.0, 190.0],
    "fused": [120.0, 131.3, 140.0],
    "cpu": [111.1] * 3,
}


def test_ratios_are_of_medians_and_the_fastest_engine_is_judged():
    row = judge_times(TIMES, target=1.12)
    assert row["median_ms"][NN_LSTM] == 101 and row["min_ms"][NAIVE] == 190
    assert row["ratio"] == pytest.approx({NN_LSTM: 1, NAIVE: 2, "fused": 1.3, "cpu": 1.1})
    assert (row["best"], row["met"]) == ("cpu", True)
    assert row["naive_over_best"] == pytest.approx(202 / 111.1)
    assert judge_times(TIMES, target=1.09)["met"] is False
    assert judge_times(TIMES, target=None)["met"] is None


def stored(**changed):
    row = {"shape": "S1", "T": 196, "threads": 1, "error_T": 50, "error": {NAIVE: 1e-6, "fused": 2e-6, "cpu": 3.21e-6}}
    growth = {NN_LSTM: 200.0, NAIVE: None, "fused": 170.0, "cpu": 160.0}
    return {
        "name": "cpu-full",
        "commit": "0123456789ab",
        "date": "2025-01-31",
        "environment": {"torch": "2.13.0"},
        "hardware": "a processor",
        "precision": "float32",
        "shapes": {"S1": "sequential MNIST (B 64, I 1, H 100)"},
        "rows": [{**row, **judge_times(TIMES, 1.12)}, {**row, "threads": 2, **judge_times(TIMES, None)}],
        "memory": [{"shape": "S1", "T": 784, "MiB": growth, **judge(growth, "cpu", 0.75)}],
        "replicas": {"shape": "S1", "T": 196, "R": 16, "engine": "cpu", "over_one": 4.0, "calls_over_together": 3.5},
    } | changed


def test_the_page_says_what_was_measured():
    page = render(stored())
    for line in (
        "| shape | T timed | threads | nn.LSTM, ms | naive loop | `fused` | `cpu` | naive / best | target | met |",
        "| S1 | 196 | 1 | 101 | 2.00 | 1.30 | **1.10** | 1.82 | 1.12 | yes |",
        "| S1 | 196 | 2 | 101 | 2.00 | 1.30 | **1.10** | 1.82 | – | – |",
        "| S1 | 196 | 1 | 101 (100) | 202 (190) | 131 (120) | 111 (111) | 3 |",
        "| S1 | 50 | 1.0e-06 | 2.0e-06 | 3.2e-06 |",
        "| S1 | 784 | 200 | – | 0.85 | **0.80** | 0.75 | no |",
    ):
        assert line in page.splitlines()
    assert "a processor, torch 2.13.0, float32, 2025-01-31, commit 0123456789ab" in page
    assert "4.00 times the time of one" in page
    assert "Memory" not in render(stored(memory=[])) and "readers" not in page
    median = {"lstm": 100.0, "lstm, both directions": 200.0, "bn_e_star": 131.0, "bn_e_star_star, masked": 240.0}
    page = render(stored(readers={"T": 40, "B": 40, "target": 1.3, "ms": {}, "median_ms": median}))
    rhn = {"T": 20, "B": 64, "H": 512, "D": 3, "ms": {}, "median_ms": {NAIVE: 300.0, "fused": 250.0, "cpu": 200.0}}
    assert "| 300 | 250 | 200 | 1.50 | 1.35 | yes |" in render(stored(rhn={**rhn, "target": 1.35}))
    assert "| bn_e_star | 131 | 1.31 | lstm | 1.31 | no |" in page
    speech = {NN_LSTM: 100.0, "lstm": 96.0, "input_bn_lstm_sequence": 108.0}
    page_of_speech = render(stored(speech={"T": 60, "B": 24, "target": 1.1, "ms": {}, "median_ms": speech}))
    assert "| lstm | 96.0 | 0.96 | 1.00 | – |" in page_of_speech
    assert "| input_bn_lstm_sequence | 108 | 1.08 | 1.12 | no |" in page_of_speech
    assert "| bn_e_star_star, masked | 240 | 2.40 | lstm, both directions | 1.20 | yes |" in page


def test_a_measurement_is_stored_and_rendered_again(tmp_path, capsys):
    main(["--device", "cpu", "--out-dir", str(tmp_path)], TINY, PLAN)
    printed = capsys.readouterr()
    path = tmp_path / "cpu-tiny.json"
    result = json.loads(path.read_text())
    assert [(row["shape"], row["T"], row["error_T"]) for row in result["rows"]] == [("S1", 4, 2), ("S2", 4, 2)]
    assert result["rows"][0]["met"] is True and result["rows"][1]["target"] is None
    assert set(result["rows"][0]["ms"]) == {NN_LSTM, NAIVE, *bench.engines(CPU)}
    assert result["rhn"]["T"] == 3 and list(result["rhn"]["ms"]) == [NAIVE, "reference", "fused", "cpu"]
    assert set(result["speech"]["ms"]) == {NN_LSTM, "lstm", "input_bn_lstm_sequence"}
    assert result["readers"]["T"] == 4 and set(result["readers"]["ms"]) == set(bench_reader.READERS)
    assert result["replicas"]["R"] == 16 and set(result["replicas"]["ms"]) == {"R=1", "R=16", "16 calls"}
    assert result["commit"] and result["environment"]["torch"] == torch.__version__
    assert "error against float64" in printed.err
    assert backend(CPU, torch.float64) == "reference"  # auto's choice

    main(["--render", str(path)])
    assert capsys.readouterr().out == printed.out


@pytest.mark.skipif(not bench.CLEAR_REFS.exists(), reason="needs Linux to tell the peak of one step")
def test_memory_of_a_step_is_measured_in_a_process_of_its_own():
    shape = Shape("", T=64, quick_T=64, B=64, I=8, H=128)
    mib = bench.in_fresh_process(bench.memory_growth, "reference", shape, shape.T, CPU, "float32")
    gates = shape.T * shape.B * 4 * shape.H * 4 / 2**20  # 8 MiB; the reference keeps several of that size
    assert 2 * gates < mib < 20 * gates


def test_a_process_that_dies_gives_no_figure():
    assert bench.in_fresh_process(os._exit, 1) is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--shapes S1,S9", "S9 is unknown, use S1, S2, S3, S4, S4i, S5"),
        ("--render none.json", "none.json is no benchmark"),
        ("--render README.md", "README.md is no benchmark"),
        ("--device tpu", "device=tpu is unknown"),
        ("--device cpu --precision tf32", "precision=tf32 needs a GPU"),
    ],
)
def test_bad_input_is_refused(args, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(BnrnnError, match=message):
        main(args.split())


def test_a_file_of_something_else_is_refused(tmp_path):
    for content in ({}, [], {"rows": []}, stored(rows=[{}])):
        (tmp_path / "some.json").write_text(json.dumps(content))
        with pytest.raises(BnrnnError, match="is no benchmark"):
            main(["--render", str(tmp_path / "some.json")])


def test_the_command_reports_bad_input_in_one_message():
    command = [sys.executable, "scripts/bench.py", "--quick", "--shapes", "S9"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.startswith("error: shapes=S9") and "Traceback" not in run.stderr
