import pytest

from bnrnn import scan
from bnrnn.scan import lstm_cpu


@pytest.fixture(autouse=True)
def _restore():
    yield
    scan.set_backend("auto")
    lstm_cpu.library.cache_clear()
    scan._has.cache_clear()
    scan._engine.cache_clear()
