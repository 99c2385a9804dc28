"""All engines compared with the reference in float64: outputs, statistics and all gradients."""

import itertools
import platform
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.scan import backends
from bnrnn.scan.lstm.reference import Statistics, lstm_scan
from bnrnn.scan.native import build
from tests.helpers import assert_near, forked
from tests.scan.cases import ALL, NAMES, OPTIONAL, assert_agrees, everything, problem

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
ENGINES = ["fused", pytest.param("cpu", marks=needs_compiler)]
SIZES = [[6, 5, 5, 3, 1], [6, 6, 6, 6, 6], [5, 4, 3, 3, 3]]  # how many of six sequences run at each of five steps
GIVEN = list(itertools.product([True, False], repeat=5))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("population", [False, True])
def test_engines_agree_with_the_reference_with_any_part_of_bn(engine, given, population):
    assert_agrees(engine, problem(5, 6, 23, given, population))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "shape", [(1, 5, 16), (4, 2, 19), (3, 9, 1), (2, 4, 3), (2, 3, 100), (40, 7, 36), (2, 15, 530)]
)
def test_engines_agree_at_edges_of_shape(engine, shape):
    assert_agrees(engine, problem(*shape))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", [ALL, (False,) * 5, (True, False, True, True, False)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ended_count", [False, True])
@pytest.mark.parametrize("population", [False, True])
def test_engines_agree_on_padded_batches(engine, given, sizes, ended_count, population):
    assert_agrees(engine, problem(5, 6, 21, given, population, batch_sizes=sizes, ended_count=ended_count))


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_at_random_shapes(engine):
    draw = random.Random(0)
    for _ in range(15):
        T, B, H = draw.randint(1, 9), draw.randint(3, 20), draw.randint(1, 70)
        sizes = sorted((draw.randint(3, B) for _ in range(T)), reverse=True) if draw.random() < 0.5 else None
        given = [draw.random() < 0.5 for _ in range(5)]
        options = {"batch_sizes": sizes, "ended_count": draw.random() < 0.5}
        assert_agrees(engine, problem(T, B, H, given, draw.random() < 0.3, **options))


@pytest.mark.parametrize("ended_count", [False, True])
def test_the_reference_on_a_padded_batch_is_eqs_6_to_8_row_by_row(ended_count):
    """Computed with masks instead of slices, like the released code."""
    T, B, H = 5, 6, 3
    args = problem(T, B, H)
    sizes = SIZES[0]

    def bn(v: Tensor, counts: Tensor, gamma: Tensor, beta: Tensor | float) -> Tensor:
        n = counts.sum()
        mean = (v * counts).sum(0) / n
        var = ((v - mean).square() * counts).sum(0) / n
        return gamma * (v - mean) / (var + 1e-5).sqrt() + beta

    h, c = args["h"], args["c"]
    ys = []
    for t in range(T):
        runs = (torch.arange(B) < sizes[t])[:, None].double()
        counts = torch.ones_like(runs) if ended_count else runs
        a = bn(h @ args["weight_hh"].T, counts, args["gamma_hh"], 0.0)
        a = a + bn(args["x_proj"][t], counts, args["gamma_ih"], args["bias"])
        i, f, g, o = a.chunk(4, dim=1)
        c = runs * (f.sigmoid() * c + i.sigmoid() * g.tanh()) + (1 - runs) * c
        h = runs * o.sigmoid() * bn(c, counts, args["gamma_c"], args["beta_c"]).tanh() + (1 - runs) * h
        ys.append(h)
    options = {n: args[n] for n in OPTIONAL}
    y, state, _ = lstm_scan(*(args[n] for n in NAMES[:4]), **options, batch_sizes=sizes, ended_count=ended_count)
    for name, ref, out in (("y", torch.stack(ys), y), ("h", h, state[0]), ("c", c, state[1])):
        assert_near(name, ref, out)


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_bfloat16_keeps_statistics_and_states_in_float32(engine):
    scan.set_backend(engine)
    args = problem(30, 8, 24)
    full = everything(scan.lstm_scan, args, torch.float32)
    low = everything(partial(scan.lstm_scan, product_dtype=torch.bfloat16), args, torch.float32)
    assert all(v.dtype == torch.float32 for v in low.values())
    assert not torch.equal(full["y"], low["y"])
    assert_near("y", full["y"], low["y"], 1e-2)
    halves = {n: args[n].bfloat16() for n in NAMES}
    y, (_, c), used = scan.lstm_scan(*(halves[n] for n in NAMES[:4]), **{n: halves[n] for n in OPTIONAL})
    assert (y.dtype, c.dtype, used.var_hh.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    states = {n: args[n].float() for n in ("h", "c")}
    y, (h, c), _ = scan.lstm_scan(**{n: halves[n] for n in NAMES} | states)
    assert (y.dtype, h.dtype, c.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, (_, c), used = scan.lstm_scan(
            *(args[n].float() for n in NAMES[:4]), **{n: args[n].float() for n in OPTIONAL}
        )
    assert torch.equal(y, low["y"])


@pytest.mark.parametrize("name", [*NAMES[1:], "mean_hh"])
@pytest.mark.parametrize("wrong", [lambda v: v[..., 1:], lambda v: v.double()])
def test_wrong_shapes_and_dtypes_are_named_before_a_kernel_reads_them(name, wrong):
    args = problem(3, 4, 5, population=name == "mean_hh")
    args = {k: v.float() if isinstance(v, Tensor) else v for k, v in args.items()}
    if name == "mean_hh":
        stats = Statistics(*(s.float() for s in args["population"]))
        args["population"] = stats._replace(mean_hh=wrong(stats.mean_hh))
    else:
        args[name] = wrong(args[name])
    with pytest.raises(BnrnnError, match=f"{name} does not match x_proj: expected"):
        scan.lstm_scan(**args)


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize("name", Statistics._fields)
def test_a_population_that_lacks_a_term_is_an_error_of_every_engine(engine, name):
    scan.set_backend(engine)
    args = {k: v.float() if isinstance(v, Tensor) else v for k, v in problem(3, 4, 5, population=True).items()}
    population = Statistics(*(s.float() for s in args["population"]))._replace(**{name: None})
    gamma = f"gamma_{name.partition('_')[2]}"
    with pytest.raises(BnrnnError, match=f"population.{name} is None, expected a tensor because {gamma} is given"):
        scan.lstm_scan(**args | {"population": population})
    assert scan.lstm_scan(**args | {"population": population, gamma: None})[0].isfinite().all()


@pytest.mark.parametrize("sizes", [[4, 4], [5, 4, 3], [4, 2, 3], [4, 4, 0]])
def test_wrong_batch_sizes_are_named(sizes):
    args = {k: v.float() if isinstance(v, Tensor) else v for k, v in problem(3, 4, 5).items()}
    with pytest.raises(
        BnrnnError, match="batch_sizes must be 3 numbers between 4 and 1, one per step, never increasing"
    ):
        scan.lstm_scan(**args, batch_sizes=sizes)


def test_an_input_product_of_another_shape_is_named():
    for shape in ((3, 4, 22), (4, 20), (2, 3, 4, 20)):
        with pytest.raises(BnrnnError, match=r"x_proj must be \(T, B, 4H\), got"):
            scan.lstm_scan(torch.zeros(shape), torch.zeros(4, 5), torch.zeros(4, 5), torch.zeros(20, 5))


def test_a_product_that_does_not_fit_is_an_error_of_torch_and_is_not_read_by_the_kernel():
    for weight in (torch.zeros(4, 7), torch.zeros(4, 5).double()):
        with pytest.raises(RuntimeError, match=r"must match|cannot be multiplied|same dtype"):
            scan.linear(torch.zeros(2, 3, 5), weight)


@pytest.mark.parametrize("engine", ENGINES)
def test_x_is_left_alone_unless_it_may_be_overwritten(engine):
    scan.set_backend(engine)
    args = problem(3, 4, 5)
    leaves = [args[n].float().requires_grad_() for n in NAMES[:4]]
    before = leaves[0].detach().clone()
    scan.lstm_scan(*leaves, gamma_ih=args["gamma_ih"].float())[0].sum().backward()
    assert torch.equal(leaves[0], before)


@pytest.mark.parametrize("engine", ENGINES)
def test_constant_columns_have_finite_gradients(engine):
    args = problem(3, 6, 5)
    args["h"].zero_()
    args["x_proj"][:, :, :10] = args["x_proj"][:, :1, :10]
    assert_agrees(engine, args)


def test_float64_keeps_its_precision_under_autocast():
    args = problem(3, 6, 5)
    expected = everything(scan.lstm_scan, args, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found = everything(scan.lstm_scan, args, torch.float64)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_second_backward_raises(engine):
    scan.set_backend(engine)
    args = problem(3, 4, 5)
    y, _, _ = scan.lstm_scan(*(args[n].float().requires_grad_() for n in NAMES[:4]))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already run backward, which spent its buffers"):
        y.sum().backward()


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for another x86 processor")
@pytest.mark.parametrize("flags", ["haswell", "x86-64", "x86-64 -DLANES=16 -DTILE=4", "x86-64 -DLANES=4 -DTILE=4"])
def test_the_kernel_is_right_for_other_processors(flags, monkeypatch, tmp_path):
    """AVX2, generic vectors of 8 floats by a compiler without OpenMP, and the vectors and tiles of AVX-512 and NEON."""
    if flags == "x86-64":
        compiler = tmp_path / "compiler"
        compiler.write_text(f'#!/bin/sh\nfor a; do [ "$a" = -fopenmp ] && exit 1; done\nexec {build.compiler()} "$@"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-O0", *f"-march={flags}".split()])
    build.library.cache_clear()
    for shape in ((3, 7, 45), (2, 4, 1), (3, 5, 8)):
        assert_agrees("cpu", problem(*shape))
    assert_agrees("cpu", problem(5, 6, 21, batch_sizes=SIZES[0], ended_count=True))
    assert len(list((tmp_path / "bnrnn").iterdir())) == 1


@needs_compiler
def test_two_threads_give_what_one_gives():
    scan.set_backend("cpu")
    args = problem(4, 6, 150, batch_sizes=[6, 6, 4, 3], ended_count=True)
    one = everything(scan.lstm_scan, args, torch.float32)
    torch.set_num_threads(2)
    for name, value in everything(scan.lstm_scan, args, torch.float32).items():
        assert torch.equal(value, one[name]), name


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"batch_sizes": SIZES[0]}, {"batch_sizes": SIZES[0], "ended_count": True}])
@pytest.mark.parametrize("population", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_the_product_of_an_input_of_one_feature_is_never_stored(normalized, population, options):
    """Its statistics and gradients follow from those of the feature."""
    T, B, H = 5, 6, 21
    given = [normalized, True, True, True, True]
    args = problem(T, B, H, given, population=population)
    x, weight_ih = torch.rand(T, B, 1).double() + 0.5, torch.randn(4 * H, 1).double()
    found = {}
    for name, dtype in (("reference", torch.float64), ("cpu", torch.float32)):
        scan.set_backend(name)
        own = {k: v.to(dtype).requires_grad_() for k, v in args.items() if k in NAMES and v is not None}
        own["weight_ih"] = weight_ih.to(dtype).requires_grad_()
        statistics = args["population"] and Statistics(*(s.to(dtype) for s in args["population"]))
        own.pop("x_proj")
        y, state, used = scan.lstm_scan(x.to(dtype), **own, population=statistics, **options)
        torch.manual_seed(2)
        loss = sum((v * torch.randn(v.shape, dtype=torch.float64).to(dtype)).sum() for v in (y, *state))
        grads = torch.autograd.grad(loss, list(own.values()))
        found[name] = {
            "y": y,
            **{k: v for k, v in used._asdict().items() if v is not None},
            **dict(zip(own, grads, strict=True)),
        }
    assert found["cpu"].keys() == found["reference"].keys()
    for key, expected in found["reference"].items():
        assert_near(key, expected, found["cpu"][key], 2e-5)


@needs_compiler
def test_weights_that_change_between_evaluations_are_packed_again():
    """Also if the change does not increase the tensor's version, or if another tensor takes its memory."""
    scan.set_backend("cpu")
    args = {k: v.float() if isinstance(v, Tensor) else v for k, v in problem(3, 4, 40).items()}
    other = torch.randn(160, 40)

    def run(weight: Tensor) -> Tensor:
        return scan.lstm_scan(**{**args, "weight_hh": weight})[0]

    weight = args["weight_hh"]
    first, expected = run(weight), run(other.clone())
    assert torch.equal(run(weight), first)
    weight.data.copy_(other)
    assert torch.equal(run(weight), expected)
    weight.add_(1)
    assert not torch.equal(run(weight), expected)


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 4, 1, 7), (2, 5, 6, 1), (7, 300, 130, 70), (1, 1, 3, 2), (3, 7, 1100, 37)])
def test_the_compiled_product_is_linear_in_outputs_and_gradients(shape):
    scan.set_backend("cpu")
    T, B, I, G = shape
    x, weight, bias, dy = torch.randn(T, B, I), torch.randn(G, I), torch.randn(G), torch.randn(T, B, G)
    results = []
    for dtype, run in ((torch.float64, F.linear), (torch.float32, scan.linear)):
        leaves = [v.to(dtype).requires_grad_() for v in (x, weight, bias)]
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(dtype))])
    for name, ref, out in zip(("y", "dx", "dweight", "dbias"), *results, strict=True):
        assert_near(name, ref, out)


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
def test_the_product_with_ids_is_that_with_one_hot_vectors(engine):
    scan.set_backend(engine)
    ids, weight, bias = torch.randint(5, (4, 3)), torch.randn(7, 5), torch.randn(7)
    for b in (None, bias):
        assert_near("product", scan.linear(F.one_hot(ids, 5).float(), weight, b), scan.linear(ids, weight, b))


@needs_compiler
def test_auto_takes_the_kernel_for_float32_and_the_reference_for_the_rest():
    cpu = torch.device("cpu")
    assert scan.backend(cpu, torch.float32) == "cpu"
    assert scan.backend(cpu, torch.float64) == "reference"
    assert scan.backend(torch.device("cuda"), torch.float64) == "reference"


def test_without_a_compiler_auto_takes_the_reference_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(build, "compiler", lambda: None)
    build.library.cache_clear()
    backends._has.cache_clear()
    assert [scan.backend(torch.device("cpu"), torch.float32) for _ in range(2)] == ["reference"] * 2
    assert len(caplog.messages) == 1
    assert "needs a C++ compiler" in caplog.messages[0]


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    build.library.cache_clear()
    with pytest.raises(BnrnnError, match="cannot be written"):
        scan.set_backend("cpu")


@pytest.fixture
def copies(monkeypatch, tmp_path):
    """A cache of its own and a compiler that copies the kernels built before, after a moment."""
    built = build.library()._name
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nfor a; do last=$a; done\nsleep 0.1\ncp "{built}" "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    return tmp_path / "bnrnn"


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_library_in_the_cache_is_built_again(damage, copies):
    build.library()
    (path,) = copies.iterdir()
    content = path.read_bytes()
    broken = copies.parent / "broken"  # put in its place as a whole: this process has the file mapped
    broken.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:] if damage is None else damage)
    broken.replace(path)
    build.library.cache_clear()
    assert_agrees("cpu", problem(2, 4, 3))
    (path,) = copies.iterdir()
    assert path.read_bytes() == content
    before = path.stat().st_mtime_ns
    build.library.cache_clear()
    build.library()
    assert path.stat().st_mtime_ns == before  # intact: not built again


@needs_compiler
def test_where_the_library_cannot_be_loaded_the_reference_runs_and_says_so_once(monkeypatch, tmp_path, caplog):
    compiler = tmp_path / "compiler"  # it writes what is no library
    compiler.write_text('#!/bin/sh\nfor a; do last=$a; done\necho no library > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    backends._has.cache_clear()
    assert [scan.backend(torch.device("cpu"), torch.float32) for _ in range(2)] == ["reference"] * 2
    _, message = caplog.messages  # after the one about compiling
    assert "cannot be loaded" in message and "The reference runs instead" in message
    with pytest.raises(BnrnnError, match="cannot be loaded"):
        scan.set_backend("cpu")


@needs_compiler
def test_an_engine_that_cannot_run_is_an_error(monkeypatch):
    with pytest.raises(BnrnnError, match="backend=gpu is unknown: use auto, reference, fused, cpu"):
        scan.set_backend("gpu")
    scan.set_backend("cpu")
    with (
        pytest.raises(BnrnnError, match=r"float32 on the CPU, not torch.bfloat16"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        BNLSTM(2, 3, 4)(torch.randn(4, 5, 2))
    with pytest.raises(BnrnnError, match=r"float32 on the CPU, not torch.float64"):
        BNLSTM(2, 3, 4).double()(torch.randn(4, 5, 2, dtype=torch.float64))
    monkeypatch.setattr(build, "compiler", lambda: None)
    build.library.cache_clear()
    with pytest.raises(BnrnnError, match=r"needs a C\+\+ compiler"):
        scan.set_backend("cpu")


@needs_compiler
def test_what_the_compiler_says_is_reported(monkeypatch, tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    monkeypatch.setattr(build, "KERNELS", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    with pytest.raises(BnrnnError, match=r"could not build its kernels: (.|\n)*error"):
        scan.set_backend("cpu")


@needs_compiler
def test_a_first_build_says_so(copies, caplog):
    for _ in range(2):
        build.library.cache_clear()
        build.library()
    (message,) = caplog.messages
    assert message.startswith("Compiling the kernels for this processor, once, into ") and str(copies) in message


@needs_compiler
def test_several_processes_can_build_the_kernel_at_once(copies):
    processes = [forked(build.library) for _ in range(3)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(copies.iterdir())) == 1
