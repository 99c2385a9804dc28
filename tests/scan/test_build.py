"""How the compiled kernels are built, stored and chosen."""

import platform

import pytest
import torch

from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.scan import backends
from bnrnn.scan.native import build
from tests.helpers import forked
from tests.scan.cases import assert_agrees, problem

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")


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
    assert_agrees("cpu", problem(5, 6, 21, batch_sizes=[6, 5, 5, 3, 1], ended_count=True))
    assert len(list((tmp_path / "bnrnn").iterdir())) == 1


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
