"""The Triton engine in Triton's interpreter: small shapes, on the CPU, against the reference in float64."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan.lstm.reference import lstm_scan
from bnrnn.scan.lstm.triton import LSTMForm
from bnrnn.scan.triton_shared import launches, tuning
from bnrnn.scan.triton_shared.driver import TritonSteps, nearest_tf32
from bnrnn.scan.triton_shared.tuning import Division
from tests.helpers import assert_near
from tests.scan.captured import graphs
from tests.scan.cases import ALL_OF_RHN, assert_agrees, everything, in_dtype, problem, rhn_problem

NONE = (False,) * 5
BARE = dict.fromkeys(ALL_OF_RHN, False)
PLACE_B = ALL_OF_RHN | {"gamma_z": False}
PLACE_C = BARE | {"bias": True, "gamma_z": True}


@pytest.fixture(autouse=True)
def _triton():
    launches._known.clear()
    scan.set_backend("triton")


def divide(monkeypatch, **changes) -> None:
    """Change the division that the rule chooses."""
    rule = tuning.by_rule
    monkeypatch.setattr(tuning, "by_rule", lambda size: replace(rule(size), **changes))


@pytest.fixture(params=["fused", "apart"])
def product(request, monkeypatch):
    """Whether the recurrent product is part of the kernel."""
    divide(monkeypatch, fused=request.param == "fused")


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(
    "case",
    [
        partial(problem, 2, 6, 17),  # two programs, the second for a single unit
        partial(problem, 2, 6, 5, NONE),
        partial(problem, 2, 5, 17, (True, False, True, True, False)),
        partial(problem, 2, 5, 3, (False, True, False, False, True)),
        partial(problem, 2, 5, 9, population=True),
        partial(problem, 1, 2, 33, eps=0.1),  # a usual eps would make gradients tiny differences of large numbers
        partial(problem, 1, 70, 5),
        partial(problem, 3, 6, 5, batch_sizes=[6, 5, 1]),
        partial(problem, 3, 6, 5, batch_sizes=[5, 4, 3], ended_count=True),  # one sequence has no step at all
        partial(problem, 2, 6, 5, NONE, batch_sizes=[5, 3]),
        partial(problem, 2, 6, 5, population=True, batch_sizes=[5, 1]),
    ],
    ids=lambda case: "",
)
def test_the_lstm_agrees_with_the_reference(case):
    assert_agrees("triton", case())


@pytest.mark.parametrize(
    "case",
    [
        dict(T=2, H=17, D=2),
        dict(T=2, given=BARE, D=2),
        dict(T=3, given=BARE, coupled=True, D=1),
        dict(T=2, given=PLACE_B, coupled=True, D=2),
        dict(T=2, given=PLACE_B, K=1),
        dict(T=2, given=PLACE_C, D=2),
        dict(T=2, given=PLACE_B | {"beta_s": False}, D=2, population=True),
        dict(T=2, population=True, D=2),
        dict(T=1, B=4, D=1, K=1),
        dict(T=1, B=70, H=5, D=2),  # two tiles of sequences
        dict(T=3, H=5, given=PLACE_B, D=2, batch_sizes=[6, 5, 3]),
        dict(T=3, H=5, K=1, D=2, coupled=True, batch_sizes=[5, 4, 3]),
        dict(T=3, H=5, given=BARE, D=2, batch_sizes=[5, 4, 3]),
        dict(T=3, H=5, population=True, D=2, batch_sizes=[5, 4, 1]),
    ],
    ids=str,
)
def test_the_highway_network_agrees_with_the_reference(case):
    assert_agrees("triton", rhn_problem(**case))


@pytest.mark.parametrize(
    "case",
    [dict(T=2, D=2, H=5), dict(T=2, given=BARE, coupled=True), dict(T=2, given=PLACE_B, K=1, batch_sizes=[6, 3])],
)
def test_the_highway_network_agrees_where_products_are_not_part_of_the_kernel(case, monkeypatch):
    divide(monkeypatch, fused=False)
    assert_agrees("triton", rhn_problem(**case))


@pytest.mark.parametrize(
    "case",
    [
        partial(problem, 3, 6, 5),
        partial(problem, 3, 6, 5, NONE, batch_sizes=[5, 4, 1]),
        partial(problem, 2, 5, 3, population=True),
    ],
    ids=lambda case: "",
)
def test_one_kernel_for_the_whole_sequence_agrees_too(case, monkeypatch):
    """The interpreter runs programs one after the other, so that there must be only one."""
    divide(monkeypatch, whole_sequence=True)
    args = case()
    for _ in range(2):  # the counter begins at 0 again
        assert_agrees("triton", args)
    of_forms = launches._known.values()
    assert {of_form.fixed["arrived"].item() for of_form in of_forms if of_form.whole_sequence} == {len(args["x_proj"])}
    assert all(of_form.whole_sequence for of_form in of_forms)


def test_a_whole_sequence_that_cannot_be_launched_runs_step_by_step_from_then_on(monkeypatch, caplog):
    """The driver refuses a cooperative launch of more programs than the process may have on the GPU at once."""
    whole, launch, tried = Division(True, 16, 32, 4, 2, whole_sequence=True), TritonSteps.launch, []

    def refused(steps, direction, division):
        tried.append((direction, division.whole_sequence))
        if division.whole_sequence:
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch\nand more")
        launch(steps, direction, division)

    monkeypatch.setattr(TritonSteps, "launch", refused)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "division", lambda size, device, _: tuning._chosen.setdefault((size, device), whole))
    for _ in range(2):
        assert_agrees("triton", problem(3, 6, 5))
    single = [("forward", False), ("backward", False)]
    assert tried == [("forward", True), single[0], ("backward", True), single[1], *single]
    assert caplog.messages == [
        f"lstm {direction} cannot run (Triton Error [CUDA]: too many blocks in cooperative launch): other processes "
        "may use the GPU. Its steps are launched one by one, more slowly."
        for direction in ("forward", "backward")
    ]


def test_an_error_of_single_steps_is_not_hidden(monkeypatch, caplog):
    def fail(steps, direction, division):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(TritonSteps, "launch", fail)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        run(problem(2, 3, 2))
    assert not caplog.messages


def test_no_sequence_runs_after_the_last_step(monkeypatch):
    """The kernels of the last step ask for the number of sequences of the next one."""
    seen = []
    monkeypatch.setattr(launches.Launches, "run", lambda self, num_steps, values: seen.append(values["running"]))
    run(problem(2, 5, 3, batch_sizes=[4, 3]))
    scan.rhn_scan(**in_dtype(rhn_problem(2, 5, 3, 1, batch_sizes=[4, 3])))
    assert [sizes.tolist() for sizes in seen] == [[4, 3, 0]] * 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_memory_of_x_is_used_only_if_it_may_be_overwritten(overwrite):
    args = problem(2, 5, 3)
    expected = everything(lstm_scan, args)
    given, gradients = [], []

    def run(x_proj, **options):
        x = x_proj * 1.0  # a result of the caller's, which nothing else needs
        x.register_hook(gradients.append)
        given.append((x, x.detach().clone()))
        return scan.lstm_scan(x, overwrite=overwrite, **options)

    found = everything(run, args, torch.float32)
    for name, ref in expected.items():
        assert_near(name, ref, found[name], 1e-5)
    x, before = given[0]
    assert torch.equal(x, before) == (not overwrite)
    assert (gradients[0].data_ptr() == x.data_ptr()) == overwrite


def run(args: dict) -> tuple[Tensor, list[Tensor]]:
    args = in_dtype(args)
    leaves = [value.requires_grad_() for value in args.values() if isinstance(value, Tensor)]
    return scan.lstm_scan(**args)[0], leaves


def test_several_scans_may_wait_for_their_backward_passes():
    several = [problem(2, 5, 6), problem(2, 5, 6)]
    expected = [[y, *torch.autograd.grad(y.square().sum(), leaves)] for y, leaves in map(run, several)]
    together = [run(args) for args in several]
    for (y, leaves), refs in zip(together, expected, strict=True):
        assert all(map(torch.equal, [y, *torch.autograd.grad(y.square().sum(), leaves)], refs))


@pytest.mark.usefixtures("product")
def test_a_captured_graph_runs_scans_of_any_length_and_padding(request, monkeypatch):
    """Of any batch size too, unless cuBLAS is part of the graph."""
    monkeypatch.setattr(launches, "CHUNKS", (2, 1))
    apart = "apart" in request.node.name
    with graphs() as made:
        for T, B, sizes in ((1, 6, [6]), (3, 6, [6, 5, 1]), (2, 4, [4, 3])):
            assert_agrees("triton", problem(T, 6 if apart else B, 5, batch_sizes=sizes))
    assert sorted(graph.replays for graph in made) == [1, 1, 2, 2]  # one step and two, forward and backward
    with graphs() as made:
        for T, B in ((1, 6), (3, 6 if apart else 5), (2, 6 if apart else 4)):
            assert_agrees("triton", rhn_problem(T=T, B=B, D=2, H=3, K=1))
    assert sorted(graph.replays for graph in made) == [1, 1, 2, 2]


def test_only_so_many_forms_are_remembered(monkeypatch):
    monkeypatch.setattr(launches, "MAX_FORMS", 2)
    with torch.no_grad():
        for H in (1, 2, 1, 3):
            run(problem(1, 3, H))
    assert [key[0].hidden_size for key, _ in launches._known] == [1, 3]


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("run", [scan.lstm_scan, scan.rhn_scan], ids=["lstm", "rhn"])
def test_bfloat16_products_keep_statistics_and_states_in_float32(run):
    args = problem(2, 5, 12) if run is scan.lstm_scan else rhn_problem(2, 6, 12, 2)
    full = everything(run, args, torch.float32)
    low = everything(run, {**args, "product_dtype": torch.bfloat16}, torch.float32)
    assert all(v.dtype == torch.float32 for v in low.values())
    assert not torch.equal(full["y"], low["y"])
    assert_near("y", full["y"], low["y"], 1e-2 if run is scan.lstm_scan else 3e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(everything(run, args, torch.float32)["y"], low["y"])


def test_weights_are_rounded_to_the_nearest_tf32_number():
    x = torch.cat([torch.randn(1000), 1e30 * torch.randn(1000), torch.tensor([0.0, 1 + 2**-11, -1 - 2**-11, math.inf])])
    found = nearest_tf32(x)
    assert not (found.view(torch.int32) & 0x1FFF).any()  # 10 of the 23 bits after the point
    assert ((found - x).abs() <= 2**-11 * x.abs()).logical_or(found == x).all()
    assert found[-3:].tolist() == [1 + 2**-10, -1 - 2**-10, math.inf]  # ties away from zero, as cvt.rna rounds them
    every_nan = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    assert nearest_tf32(every_nan).isnan().all()


def test_only_tf32_is_rounded(monkeypatch):
    form = LSTMForm(torch.device("cuda"), 5, 4, 1, 16, (), True, False, True, 1e-5, torch.float32, True, False)
    assert not form.rounds  # in the interpreter
    monkeypatch.setattr("bnrnn.scan.triton_shared.form.INTERPRETED", False)
    assert form.rounds and not replace(form, tf32=False).rounds and not replace(form, low=torch.bfloat16).rounds


def test_it_needs_a_gpu_and_at_most_float32(monkeypatch):
    with pytest.raises(BnrnnError, match=r"float32, bfloat16 and float16 on a GPU, not torch.float64 on cpu"):
        scan.backend(torch.device("cpu"), torch.float64)
    assert scan.backend(torch.device("cuda"), torch.float32) == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BnrnnError, match=r"not torch.float32 on cpu"):
        scan.backend(torch.device("cpu"), torch.float32)
