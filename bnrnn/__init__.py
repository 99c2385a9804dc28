"""Batch normalization in recurrent networks: layers, recipes and evidence."""

from typing import Any

from bnrnn.layers.gru_stack import GRU, LiGRU
from bnrnn.layers.population import batch_statistics, estimate_population_statistics
from bnrnn.layers.stack import LSTM, Stack
from bnrnn.system.memory import keep_heap

__all__ = ["GRU", "LSTM", "LiGRU", "Stack", "batch_statistics", "estimate_population_statistics", "keep_heap"]


def __getattr__(name: str) -> Any:
    if name != "__version__":
        raise AttributeError(f"module 'bnrnn' has no attribute {name!r}")
    from importlib.metadata import version  # reads files, so only where it is asked for

    return version("bnrnn")
