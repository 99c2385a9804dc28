"""The recurrences, each as one function over a whole sequence; several engines run it (see backend.py)."""

from bnrnn.scan.backend import BACKENDS, ENGINES, backend, set_backend
from bnrnn.scan.linear import linear
from bnrnn.scan.lstm import lstm_scan
from bnrnn.scan.norm import normalize_over_time, normalize_sequence
from bnrnn.scan.rhn import rhn_scan

__all__ = [
    "BACKENDS",
    "ENGINES",
    "backend",
    "linear",
    "lstm_scan",
    "normalize_over_time",
    "normalize_sequence",
    "rhn_scan",
    "set_backend",
]
