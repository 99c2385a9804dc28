"""Faults of the Triton engine on a GPU: each ends in right numbers from the next engine, and in one line of the log.

The kernels run in Triton's interpreter, and CUDA graphs are what they would launch (captured.py).
"""

import logging
import math
import sys
from functools import partial

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan import backends, dispatch, graphs, rnn, selfcheck, trials
from bnrnn.scan.lstm import triton as of_lstm
from bnrnn.scan.rhn import triton as of_rhn
from bnrnn.scan.triton_shared import launches, tuning
from bnrnn.scan.triton_shared.driver import TritonSteps
from bnrnn.scan.triton_shared.tuning import Division
from tests.scan import captured
from tests.scan.cases import ALL_OF_RHN, everything, in_dtype, problem, rhn_problem

GPU = torch.device("cuda")
TOLERANCE = 1e-4  # of kernels in float32 against float64, where statistics of few sequences enlarge rounding errors


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Let `auto` treat the CPU as a GPU on which Triton's interpreter runs."""
    launches._known.clear()
    backends._has.cache_clear()
    monkeypatch.setattr(trials, "_problems", {})
    monkeypatch.setattr(trials, "T", 2)
    monkeypatch.setattr(trials, "needed", lambda device: True)
    monkeypatch.setattr(backends, "_problems", {GPU: None})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    on_gpu = backends.backend
    monkeypatch.setattr(dispatch, "engine_of", lambda x, low: on_gpu(GPU, low or x.dtype))
    monkeypatch.setattr(rnn, "backend", lambda device, dtype: on_gpu(GPU, dtype))
    scan.set_backend("auto")
    yield
    launches._known.clear()
    backends.triton_engine.cache_clear()


def rnn_problem(T=2, B=6, H=5, norm=True, population=False, **options) -> dict:
    args = {"x_proj": torch.randn(T, B, H).double(), "h": torch.randn(B, H).double()}
    args["weight_hh"] = torch.randn(H, H).double() / H**0.5
    args |= {name: torch.randn(H).double() for name in ("gamma", "beta")} if norm else {}
    return (
        args | {"population": (args["x_proj"][:, 0], torch.rand(T, H).double() + 0.1) if population else None} | options
    )


RUNS = {"lstm": (scan.lstm_scan, problem), "rhn": (scan.rhn_scan, rhn_problem), "rnn": (rnn.rnn_scan, rnn_problem)}


def results(run, args, dtype=torch.float32) -> dict[str, Tensor]:
    """All that a scan computes, by name. The statistics of a tanh RNN are a plain tuple."""

    def named(**given):
        y, state, used = run(**given)
        return (y, state, used) if hasattr(used, "_asdict") else (y, state)

    return everything(named, args, dtype)


def exact(run, args) -> dict[str, Tensor]:
    """What the reference computes in float64."""
    chosen = backends._chosen
    scan.set_backend("reference")
    expected = results(run, args, torch.float64)
    scan.set_backend(chosen)
    return expected


def assert_right(run, args, tol=TOLERANCE) -> None:
    expected, found = exact(run, args), results(run, args)
    assert found.keys() == expected.keys()
    largest = max(value.norm() for name, value in expected.items() if name.startswith("d"))
    for name, ref in expected.items():
        scale = ref.norm() if ref.norm() > 1e-2 * largest else largest
        assert (found[name] - ref).norm() < tol * scale, name


@pytest.fixture
def lines(caplog):
    """A function that returns the lines of the log, none of which is a traceback."""
    caplog.set_level(logging.WARNING, "bnrnn")
    yield lambda: caplog.messages
    assert all(record.exc_info is None and "\n" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lstm", {}),
        ("lstm", {"given": (False,) * 5}),
        ("lstm", {"given": (True, False, True, False, True), "batch_sizes": [6, 4]}),
        ("lstm", {"population": True, "batch_sizes": [6, 4]}),
        ("lstm", {"ended_count": True, "batch_sizes": [5, 4]}),
        ("lstm", {"product_dtype": torch.bfloat16}),
        ("rhn", {}),
        ("rhn", {"given": dict.fromkeys(ALL_OF_RHN, False), "coupled": True, "D": 1}),
        ("rhn", {"given": ALL_OF_RHN | {"gamma_z": False}, "K": 1, "batch_sizes": [6, 4]}),
        ("rhn", {"population": True}),
        ("rnn", {}),
        ("rnn", {"norm": False, "batch_sizes": [6, 4]}),
        ("rnn", {"population": True}),
    ],
    ids=str,
)
def test_every_form_is_tried_once_and_then_runs_on_the_engine(kind, options, monkeypatch, lines):
    tried, run = [], RUNS[kind][0]
    of_form = trials.Trial._tried
    monkeypatch.setattr(trials.Trial, "_tried", lambda trial: tried.append(str(trial)) or of_form(trial))
    args = RUNS[kind][1](T=2, B=6, H=5, **options)
    for _ in range(2):
        assert_right(run, args, 3e-2 if "product_dtype" in options else TOLERANCE)
    assert len(tried) == 1 and not lines()
    assert backends.engine_that_ran("?") == "triton"
    with torch.no_grad():
        run(**in_dtype(args))
    assert len(tried) == 2 and "without gradients" in tried[1], "that is another kernel"
    longer = options | ({"batch_sizes": [6, 4, 2]} if "batch_sizes" in options else {})
    run(**in_dtype(RUNS[kind][1](T=3, B=7, H=5, **longer)))
    assert len(tried) == 2, "numbers of steps and of sequences are no part of the form"


def fail(error: Exception, *_, **__) -> None:
    raise error


SLOWER = "The engine `fused` runs instead, more slowly."
FULL = "gamma_ih, gamma_hh, bias, gamma_c, beta_c"
RAISED = [
    (ValueError("PTXAS error\nand a page of code"), "ValueError: PTXAS error"),
    (OutOfResources(300_000, 232_448, "shared memory"), "OutOfResources: out of resource: shared memory"),
    (RuntimeError("Triton Error [CUDA]: too many resources requested for launch"), "RuntimeError: Triton Error [CUDA]"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), "OutOfMemoryError: CUDA out of memory"),
]


@pytest.mark.parametrize(("error", "said"), RAISED, ids=[type(error).__name__ for error, _ in RAISED])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_a_kernel_raises_is_one_line_and_fused_runs(error, said, direction, monkeypatch, lines):
    launch = TritonSteps.launch
    monkeypatch.setattr(TritonSteps, "launch", lambda *given: fail(error) if given[1] == direction else launch(*given))
    for _ in range(2):
        assert_right(scan.lstm_scan, problem(2, 6, 5))
    (line,) = lines()
    assert line.startswith(f"The engine `triton` cannot run lstm_scan with 6 sequences of 5 units, {FULL} ({said}")
    assert line.endswith(SLOWER)
    assert backends.engine_that_ran("?") == "fused"


@pytest.mark.parametrize("error", [error for error, _ in RAISED[2:]])
def test_what_the_trial_itself_raises_is_one_line(error, monkeypatch, lines):
    monkeypatch.setattr(trials, "problem_of", partial(fail, error))
    assert_right(scan.rhn_scan, rhn_problem(2, 6, 5, 2))
    (line,) = lines()
    assert line.startswith("The engine `triton` cannot run rhn_scan") and line.endswith(SLOWER)


@pytest.mark.parametrize("factor", [1.01, math.nan])
@pytest.mark.parametrize("what", ["y", "state", "statistics", "gradient"])
def test_wrong_numbers_are_one_line_and_fused_runs(what, factor, monkeypatch, lines):
    right, gradients = of_lstm.triton_scan, of_lstm.TritonLSTM.gradients

    def wrong(*given, **options):
        y, (h, c), used = right(*given, **options)
        if what == "statistics":
            return y, (h, c), used._replace(var_c=used.var_c * factor)
        return (y * factor, (h, c), used) if what == "y" else (y, (h, c * factor), used)

    def wrong_gradient(*given):
        found = gradients(*given)
        return found | {"bias": found["bias"] * factor}

    if what == "gradient":
        monkeypatch.setattr(of_lstm.TritonLSTM, "gradients", wrong_gradient)
    else:
        monkeypatch.setattr(of_lstm, "triton_scan", wrong)
    for _ in range(2):
        assert_right(scan.lstm_scan, problem(2, 6, 5))
    (line,) = lines()
    assert f"{FULL} (its error is {'nan' if math.isnan(factor) else ''}" in line and line.endswith(SLOWER)


def test_a_tanh_rnn_falls_back_to_the_reference(monkeypatch, lines):
    monkeypatch.setattr(of_rhn, "rhn_triton_scan", partial(fail, RuntimeError("no kernel image")))
    for _ in range(2):
        assert_right(rnn.rnn_scan, rnn_problem())
    assert lines() == [
        "The engine `triton` cannot run rnn_scan with 6 sequences of 5 units, gamma, beta (RuntimeError: no kernel "
        "image). The engine `reference` runs instead, more slowly."
    ]
    assert backends.engine_that_ran("?") == "reference"


def test_only_the_form_that_fails_leaves_the_engine(monkeypatch, lines):
    launch = TritonSteps.launch
    monkeypatch.setattr(
        TritonSteps,
        "launch",
        lambda steps, *given: fail(RuntimeError("no")) if steps.form.padded else launch(steps, *given),
    )
    scan.lstm_scan(**in_dtype(problem(2, 6, 5, (False,) * 5)))
    assert backends.engine_that_ran("?") == "triton" and not lines()
    scan.lstm_scan(**in_dtype(problem(2, 6, 5, (False,) * 5, batch_sizes=[6, 4])))
    assert backends.engine_that_ran("?") == "triton+fused"
    scan.set_backend("auto")
    assert backends.engine_that_ran("?") == "?", "another run begins"
    assert lines() == [
        f"The engine `triton` cannot run lstm_scan with 6 sequences of 5 units, padded, without "
        f"gradients (RuntimeError: no). {SLOWER}"
    ]


def test_an_engine_that_was_asked_for_by_name_fails_with_an_error(monkeypatch, lines):
    monkeypatch.setattr(TritonSteps, "launch", partial(fail, RuntimeError("no kernel image")))
    scan.set_backend("triton")
    message = r"backend=triton cannot run lstm_scan with 6 .* units, .*\(RuntimeError: no kernel image\): use auto"
    for _ in range(2):
        with pytest.raises(BnrnnError, match=message):
            scan.lstm_scan(**in_dtype(problem(2, 6, 5)))
    assert not lines()


@pytest.mark.parametrize("error", [ImportError("libcuda.so"), AttributeError("module 'triton' has no attribute 'jit'")])
def test_without_triton_fused_runs_and_the_log_says_so_once(error, monkeypatch, lines):
    backends.triton_engine.cache_clear()
    monkeypatch.setattr(backends, "import_module", partial(fail, error))
    for _ in range(2):
        assert_right(scan.lstm_scan, problem(2, 6, 5))
    said = f"{type(error).__name__}: {error}"
    assert lines() == [f"backend=triton cannot be imported ({said}): pip install triton, or use auto. {SLOWER}"]
    with pytest.raises(BnrnnError, match="pip install triton"):
        scan.set_backend("triton")


def test_a_part_of_the_engine_that_cannot_be_imported_is_one_line(monkeypatch, lines):
    backends.triton_engine.cache_clear()
    backends._problems.clear()
    monkeypatch.setitem(sys.modules, "bnrnn.scan.rhn.triton", None)
    monkeypatch.setattr(selfcheck, "problem_of", lambda *_: None)
    for _ in range(2):
        assert_right(scan.rhn_scan, rhn_problem(2, 6, 5, 2))
    (line,) = lines()
    assert line.startswith("The Triton engine is wrong on this machine (BnrnnError: backend=triton cannot be imported")


def test_a_cooperative_launch_that_is_refused_becomes_single_steps(monkeypatch, lines):
    whole, launch = Division(True, 16, 32, 4, 2, whole_sequence=True), TritonSteps.launch

    def refused(steps, direction, division):
        if division.whole_sequence:
            raise OutOfResources(132, 66, "blocks of a cooperative launch")
        launch(steps, direction, division)

    monkeypatch.setattr(TritonSteps, "launch", refused)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "division", lambda size, device, _: tuning._chosen.setdefault((size, device), whole))
    for _ in range(2):
        assert_right(scan.lstm_scan, problem(2, 6, 5))
    assert [line.partition(" (")[0] for line in lines()] == ["lstm forward cannot run", "lstm backward cannot run"]
    assert all(line.endswith("Its steps are launched one by one, more slowly.") for line in lines())
    assert backends.engine_that_ran("?") == "triton"


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted\nwhen capturing"), RAISED[3][0]])
def test_kernels_that_cannot_be_captured_are_launched_one_by_one(error, monkeypatch, lines):
    with captured.graphs():
        monkeypatch.setattr(graphs, "captured", partial(fail, error))
        for _ in range(2):
            assert_right(scan.lstm_scan, problem(2, 6, 5))
    assert lines() == [
        f"lstm {direction} cannot be captured as a CUDA graph ({str(error).splitlines()[0]}). Its steps are launched "
        "one by one, more slowly."
        for direction in ("forward", "backward")
    ]
    assert backends.engine_that_ran("?") == "triton"


def test_a_graph_that_replays_something_else_is_noticed(monkeypatch, lines):
    def replay(graph):
        for _ in range(0 if isinstance(graph.run, partial) else 2):  # Triton's kernels do not run, the others twice
            graph.run()

    with captured.graphs() as made:
        assert_right(scan.lstm_scan, problem(2, 6, 5))
        assert made and not lines(), "right graphs are used"
        trials._problems.clear()
        launches._known.clear()
        monkeypatch.setattr(captured.Graph, "replay", replay)
        for _ in range(4):
            assert_right(scan.lstm_scan, problem(2, 6, 5))
    first, *others = lines()
    assert "when graphs are replayed). The engine `fused` runs instead" in first
    assert others == 2 * [
        "The engine `fused` cannot be captured as a CUDA graph (its replay computes something else). It runs step by "
        "step, more slowly."
    ]


def test_while_the_caller_captures_a_graph_nothing_is_tried(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not trials.needed(GPU) and not trials.needed(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert trials.needed(GPU)


def test_a_trial_draws_no_random_numbers_and_works_in_an_evaluation(lines):
    args = in_dtype(problem(2, 6, 5))
    before = torch.get_rng_state()
    with torch.inference_mode():
        scan.lstm_scan(**args)
    assert torch.equal(before, torch.get_rng_state()) and not lines()
    assert list(trials._problems.values()) == [None]
