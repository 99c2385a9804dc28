import pytest

from bnrnn import scan
from bnrnn.scan import backends
from bnrnn.scan.native import build


@pytest.fixture(autouse=True)
def _restore():
    yield
    scan.set_backend("auto")
    build.library.cache_clear()
    backends._has.cache_clear()
