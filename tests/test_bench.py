"""The benchmark: all variants compute the same, and the page follows from the measurements."""

import ctypes
import json
import os
import runpy
import sys
from dataclasses import replace

import pytest
import torch

from bnrnn.bench import gru, inference, layer_norm, layers, padded, peers, readers, rhn, speech, timing
from bnrnn.bench.gru import NaiveLiGRU
from bnrnn.bench.layers import NaiveLSTM, Shape
from bnrnn.bench.rhn import NaiveBNRHN
from bnrnn.bench.timing import LAYER_NORM, NAIVE, NN_LSTM, NO_NORM, ZONEOUT, Plan, ratios, verdict
from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_rhn import BNRHN
from bnrnn.layers.ligru import LiGRU
from bnrnn.layers.ln_lstm import LNLSTM
from bnrnn.layers.stack import LSTM
from bnrnn.report.bench_page import render, render_brief, render_file, render_padded
from bnrnn.scan import backend, set_backend
from bnrnn.scan.native import build
from scripts import bench
from scripts.bench import main
from tests.helpers import assert_near

CPU = torch.device("cpu")
TINY = {
    "S1": Shape("pixels", T=4, quick_T=3, B=4, I=1, H=5, target=1e6, layer_target=1e6),
    "S2": Shape("characters", T=4, quick_T=3, B=4, I=6, H=5, one_hot=True, input_gradient=True),
}
PADDED_PLAN = Plan("padded", full_length=True, memory=False, threads=(1,), error_T=0, seconds=0.0)
PLAN = Plan("tiny", full_length=True, memory=False, threads=(1,), error_T=2, seconds=0.0)


@pytest.fixture(autouse=True)
def _engines(monkeypatch):
    # Without Triton's kernels, which tests run in Python: nothing to time.
    monkeypatch.setattr(timing, "BACKENDS", ("auto", "reference", "fused", "cpu"))
    for name in ("T", "B", "S", "V"):
        monkeypatch.setattr(readers, name, 4)
    for name in ("T", "B", "H", "D"):
        monkeypatch.setattr(rhn, name, 3)
    for name in ("T", "B", "F", "H"):
        monkeypatch.setattr(speech, name, 5)
    monkeypatch.setattr(gru, "T", 3)
    monkeypatch.setattr(gru, "SHAPES", dict.fromkeys(gru.NAMES, TINY["S2"]))
    monkeypatch.setattr(inference, "SHAPES", {"S1": TINY["S1"], "S2": TINY["S2"], "S4": TINY["S2"]})
    timing.engines.cache_clear()
    yield
    timing.engines.cache_clear()
    set_backend("auto")


def test_the_naive_loop_is_the_highway_layer():
    layer = BNRHN(3, 5, 4, depth=2)
    naive, x = NaiveBNRHN(layer), torch.randn(4, 6, 3)
    assert_near("y", layer(x)[0], naive(x)[0])


def test_the_naive_loop_is_the_light_gru():
    layer, x = LiGRU(3, 5), torch.randn(4, 6, 3)
    for ref, out in zip(layer(x)[0], NaiveLiGRU(layer)(x)[0], strict=True):
        assert_near("y", ref, out)


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


@pytest.mark.skipif(build.compiler() is None, reason="needs a compiler")
def test_the_peak_is_that_of_sums_that_a_compiler_cannot_merge():
    function = build.library().bnrnn_peak
    function.restype = ctypes.c_float
    totals = [sum(0.5 * (3 + i) + 1 for i in range(vectors)) for vectors in (12, 24)]  # 12 sums in 16 registers
    assert function(1) in totals


def test_every_engine_that_can_run_is_found_and_is_exact():
    found = timing.engines(CPU)
    assert {"reference", "fused"} <= set(found) and "auto" not in found
    for shape in TINY.values():
        errors = layers.relative_errors([NAIVE, *found], shape, shape.T, CPU)
        assert list(errors) == [NAIVE, *found]
        assert all(0 < error < 1e-5 for error in errors.values())


def test_a_plan_that_is_not_thorough_leaves_out_what_has_no_kernels_on_a_gpu():
    thorough, quick = (
        next(layers.training_cases({"S1": TINY["S1"]}, CPU, replace(PLAN, thorough=t))).variants for t in (True, False)
    )
    assert set(thorough) - set(quick) == {"reference", LAYER_NORM, ZONEOUT}
    assert {NN_LSTM, NAIVE, "fused", NO_NORM} <= set(quick)


def test_a_precision_that_is_not_the_usual_one_of_the_device_has_a_page_of_its_own(monkeypatch, tmp_path):
    given = []

    def everything(shapes, plan, device, precision, peers):
        given.append((plan.name, plan.full_length, plan.thorough, precision))
        yield {"name": f"{device.type}-{plan.name}"}

    monkeypatch.setattr(bench, "everything", everything)
    monkeypatch.setattr(bench, "render", str)
    monkeypatch.setattr(bench, "choose_device", torch.device)
    for device in ("cpu", "cuda"):
        for precision in ("float32", "tf32"):
            main(["--quick", "--device", device, "--precision", precision, "--out-dir", str(tmp_path)])
    assert given == [("quick", False, True, "float32"), ("quick-tf32", False, True, "tf32"),
                     ("quick-float32", True, False, "float32"), ("quick", True, False, "tf32")]  # fmt: skip
    assert (tmp_path / "cuda-quick-float32.json").exists()


def test_an_engine_that_cannot_run_is_left_out_and_said(monkeypatch, capsys):
    def refuse(device, dtype):
        raise BnrnnError("no compiler")

    monkeypatch.setattr(timing, "backend", refuse)
    assert timing.engines(CPU) == []
    assert "without fused: no compiler" in capsys.readouterr().err


def test_all_variants_take_turns():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = timing.time_in_turn(runs, CPU, 0.0)
    assert order == ["a", "b"] * 6  # a warm-up and the least number of rounds
    assert [len(t) for t in times.values()] == [5, 5]


def test_the_work_of_a_step_is_that_of_its_products():
    T, B, I, H = 2, 3, 5, 7
    assert Shape("", T=T, quick_T=1, B=B, I=I, H=H).gflop(T) == pytest.approx(2e-9 * T * B * 4 * H * (3 * H + 2 * I))
    stacked = Shape("", T=T, quick_T=1, B=B, I=I, H=H, num_layers=2, input_gradient=True)
    assert stacked.gflop(T) == pytest.approx(2e-9 * T * B * 4 * H * (3 * H + 3 * I + 3 * H + 3 * H))


TIMES = {
    NN_LSTM: [100.0, 100.0, 200.0, 100.0, 100.0],
    NAIVE: [190.0, 200.0, 420.0, 210.0, 220.0],
    "cpu": [90.0, 100.0, 220.0, 120.0, 130.0],
}
ROW = {"section": "Training step", "name": "S1, T 196", "threads": 1, "base": NN_LSTM, "ms": TIMES, "gflop": 9.0}


def test_a_ratio_is_taken_round_by_round_and_a_verdict_needs_the_quartiles_on_one_side():
    assert ratios(ROW | {"targets": {}}, "cpu") == pytest.approx((1.0, 1.1, 1.2))
    for target, expected in ((1.25, "yes"), (1.2, "yes"), (1.15, "undecided"), (1.0, "undecided"), (0.95, "no")):
        assert verdict(ROW | {"targets": {"cpu": target}}, "cpu") == expected
    assert verdict(ROW | {"targets": {}}, "cpu") == "–"


def stored(**changed):
    row = ROW | {"targets": {"cpu": 1.15}}
    evaluation = row | {"section": "Evaluation", "name": "S1, B 1", "targets": {}, "gflop": None}
    return {
        "name": "cpu-full",
        "commit": "0123456789ab",
        "date": "2025-01-31",
        "environment": {"torch": "2.13.0"},
        "hardware": "a processor",
        "peak": 200.0,
        "precision": "float32",
        "shapes": {"S1": "sequential MNIST (B 64, I 1, H 100)"},
        "errors": {"S1": {"T": 50, "error": {NAIVE: 1e-6, "cpu": 3.21e-6}}},
        "rows": [row, row | {"threads": 2, "targets": {}}, evaluation],
        "memory": {"S1": {"T": 784, "MiB": {NN_LSTM: 200.0, NAIVE: None, "cpu": 160.0}}},
    } | changed


def test_readme_gets_the_range_over_the_layer_sizes_on_one_thread():
    rows = stored()["rows"]
    slower = rows[0] | {"name": "S2, T 16", "ms": {name: [2 * t if name == "cpu" else t for t in times]
                                                   for name, times in rows[0]["ms"].items()}}  # fmt: skip
    text = render_brief(stored(rows=[*rows, slower]))
    assert text.startswith("For 2 layer sizes from the papers' tasks, with sequences of 16 to 196 steps, ")
    assert "batch-normalized LSTM takes 1.10 to 2.20 times" in text
    assert "takes 2.10 to 2.10 times as long. (Medians; engine `cpu` on a processor; one thread, float32" in text


def test_with_lengths_it_is_the_packed_lstm():
    lstm, ours = torch.nn.LSTM(3, 5), LSTM(3, 5)
    ours.load_state_dict(lstm.state_dict())
    x, lengths = torch.randn(6, 4, 3), torch.tensor([6, 3, 5, 3])
    assert_near("y", padded.of_packed(lstm, x, lengths), padded.with_lengths(ours, x, lengths))


def test_sequences_of_different_lengths_are_measured_alone_and_summed_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(padded, "SIZES", ((4, 3, 5),))
    monkeypatch.setattr("scripts.bench.PADDED", PADDED_PLAN)
    main(["--padded", "--device", "cpu", "--out-dir", str(tmp_path)])
    result = json.loads((tmp_path / "cpu-padded.json").read_text())
    (row,) = result["rows"]
    assert list(row["ms"]) == [padded.PADDED, padded.PACKED, NO_NORM, padded.BN_LSTM]
    assert f"## {padded.SECTION}" in capsys.readouterr().out
    row["ms"] = dict(zip(row["ms"], ([2.0], [9.0], [2.0], [3.0]), strict=True))
    text = render_padded(result)
    assert "takes 1.5 to 1.5 times as long as one of `nn.LSTM` that ignores the lengths" in text
    assert "takes 3.0 to 3.0 times as long as ours. (1 sizes of up to 4 steps" in text


def test_the_page_says_what_was_measured():
    page = render(stored())
    for line in (
        "|  | threads | nn.LSTM, ms | naive loop | cpu | target | met |",
        "| S1, T 196 | 1 | 100 | 2.10 (2.00–2.10) | **1.10 (1.00–1.20)** | 1.15 | undecided |",
        "| S1, T 196 | 2 | 100 | 2.10 (2.00–2.10) | 1.10 (1.00–1.20) | – | – |",
        "| S1, B 1 | 1 | 100 | 2.10 (2.00–2.10) | 1.10 (1.00–1.20) | – | – |",
        "| Training step | S1, T 196 | 1 | cpu | 120 | 90.0 | 100 | 50 % | 5 |",
        "| Training step | S1, T 196 | 2 | cpu | 120 | 90.0 | 100 | 25 % | 5 |",
        "| Evaluation | S1, B 1 | 1 | cpu | 120 | 90.0 | – | – | 5 |",
        "| S1 | 50 | 1.0e-06 | 3.2e-06 |",
        "| S1 | 784 | 200 | – | 0.80 |",
        "## Evaluation",
    ):
        assert line in page.splitlines(), line
    assert "a processor, torch 2.13.0, float32, 2025-01-31, commit 0123456789ab" in page
    assert "peak of one thread: 200 GFLOP/s" in page
    assert "Memory" not in render(stored(memory={})) and "peak of" not in render(stored(peak=None))


@pytest.mark.slow
def test_a_measurement_is_stored_and_rendered_again(tmp_path, capsys):
    main(["--device", "cpu", "--out-dir", str(tmp_path)], TINY, PLAN)
    printed = capsys.readouterr()
    path = tmp_path / "cpu-tiny.json"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    result = json.loads(path.read_text())
    rows = {(row["section"], row["name"]): row for row in result["rows"]}
    pixels = rows["Training step", "S1, T 4"]
    assert list(pixels["ms"]) == [NN_LSTM, NAIVE, *timing.engines(CPU), NO_NORM, LAYER_NORM, ZONEOUT]
    assert pixels["targets"] == {timing.fastest(CPU): 1e6, NO_NORM: layers.WITHOUT_NORM, LAYER_NORM: 1e6}
    assert verdict(pixels, timing.fastest(CPU)) == "yes"
    assert list(rows["Training step", "S2, T 4"]["targets"]) == [NO_NORM]
    assert set(rows["Evaluation", "S1, B 64, 20 calls of one step"]["ms"]) == {NN_LSTM, "BN-LSTM", NO_NORM}
    assert {section for section, _ in rows} == {
        "Training step", "Evaluation", "Recurrent highway networks", layer_norm.SECTION,
        gru.SECTION, f"{gru.SECTION}: a loop",
        "Attentive readers", "Speech",
    }  # fmt: skip
    assert result["errors"]["S1"]["T"] == 2
    assert result["peak"] is None or result["peak"] > 1
    assert result["commit"] and result["environment"]["torch"] == torch.__version__
    assert "error against float64" in printed.err
    assert backend(CPU, torch.float64) == "reference"  # auto's choice
    assert printed.out == f"{render_file(path)}\n"


def test_what_was_measured_is_kept_if_a_benchmark_is_stopped(tmp_path, monkeypatch):
    measured = []

    def stop_at_the_third(case, device, seconds):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(case.name)
        return {"section": case.section, "name": case.name}

    monkeypatch.setattr("scripts.bench.measure", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        main(["--device", "cpu", "--out-dir", str(tmp_path)], TINY, PLAN)
    (path,) = tmp_path.iterdir()
    assert path.name == "cpu-tiny.partial" and [r["name"] for r in json.loads(path.read_text())["rows"]] == measured


def test_the_loop_of_the_papers_equations_computes_the_same_layer():
    torch.manual_seed(0)
    ours, x = LNLSTM(3, 5), torch.randn(4, 2, 3)
    for p in ours.parameters():
        torch.nn.init.normal_(p)
    (y, state), (expected, last) = (model(x) for model in (ours, layer_norm.LayerNormLoop(ours, over_sum=False)))
    torch.testing.assert_close((y, *state), (expected, *last))


def test_jax_computes_the_same_layer():
    pytest.importorskip("jax")
    shape = TINY["S2"]
    x, dy = layers.draw(shape, shape.T, CPU)
    lstm = layers.build("cpu", shape, shape.T, CPU)
    expected = layers.step("reference", lstm, x, dy)
    found, dx = peers.jax_step(lstm.layers[0], x, dy)()
    for name, reference in zip(dict(lstm.layers[0].named_parameters()), expected, strict=False):
        assert_near(name, reference, torch.tensor(found[name].tolist()), 1e-4)
    assert_near("x", expected[-1], torch.tensor(dx.tolist()), 1e-4)


@pytest.mark.skipif(not layers.CLEAR_REFS.exists(), reason="needs Linux to tell the peak of one step")
def test_memory_of_a_step_is_measured_in_a_process_of_its_own():
    shape = Shape("", T=64, quick_T=64, B=64, I=8, H=128)
    mib = layers.in_fresh_process(layers.memory_growth, "reference", shape, shape.T, CPU, "float32")
    gates = shape.T * shape.B * 4 * shape.H * 4 / 2**20  # 8 MiB; the reference keeps several of that size
    assert 2 * gates < mib < 20 * gates


def test_a_process_that_dies_gives_no_figure():
    assert layers.in_fresh_process(os._exit, 1) is None


def test_a_precision_that_the_device_does_not_have_is_refused():
    with pytest.raises(BnrnnError, match="precision=tf32 needs a GPU"):
        main(["--device", "cpu", "--precision", "tf32"])


def test_a_file_of_something_else_is_refused(tmp_path):
    for content in ("{}", "[]", '{"rows": []}', json.dumps(stored(rows=[{}])), "# a page"):
        (tmp_path / "some.json").write_text(content)
        with pytest.raises(BnrnnError, match=r"some.json is not a benchmark"):
            render_file(tmp_path / "some.json")


def test_the_command_reports_bad_input_in_one_message(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--device", "tpu"])
    with pytest.raises(SystemExit, match=r"^error: device=tpu is unknown"):
        runpy.run_path(str(ROOT / "scripts" / "bench.py"), run_name="__main__")
