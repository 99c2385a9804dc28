"""Batch normalization in recurrent networks: layers, recipes and evidence."""

from bnrnn.heap import keep_heap
from bnrnn.layers.population import batch_statistics, estimate_population_statistics
from bnrnn.layers.stack import LSTM, Stack

__all__ = ["LSTM", "Stack", "batch_statistics", "estimate_population_statistics", "keep_heap"]
