import pytest
import triton.language as tl
from triton.runtime import interpreter

from bnrnn import scan
from bnrnn.scan import backends
from bnrnn.scan.native import build


@pytest.fixture(autouse=True)
def _restore():
    yield
    scan.set_backend("auto")
    build.library.cache_clear()
    backends._has.cache_clear()


@pytest.fixture(autouse=True)
def _patched_once(monkeypatch):
    """Let Triton's interpreter replace the functions of triton.language once in each launch.

    It does so at every call of a jitted function, which takes 40 % of the tests' time.
    """
    patch, done = interpreter._patch_lang, set()

    def patch_once(fn):
        modules = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if modules in done:
            return interpreter._LangPatchScope()
        scope, outermost = patch(fn), not done
        done.add(modules)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (restore(), done.clear())
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
