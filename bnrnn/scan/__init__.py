"""The recurrences. Each is one function over a whole sequence, which several engines implement (see backends.py)."""

from bnrnn.scan.backends import BACKENDS, ENGINES, backend, set_backend
from bnrnn.scan.backends import check_with as _check_with
from bnrnn.scan.gru import gru_scan
from bnrnn.scan.lstm import lstm_scan
from bnrnn.scan.norm import normalize_over_time, normalize_sequence
from bnrnn.scan.products import linear
from bnrnn.scan.rhn import rhn_scan
from bnrnn.scan.selfcheck import problem_on as _problem_on

_check_with(_problem_on)

__all__ = [
    "BACKENDS",
    "ENGINES",
    "backend",
    "gru_scan",
    "linear",
    "lstm_scan",
    "normalize_over_time",
    "normalize_sequence",
    "rhn_scan",
    "set_backend",
]
