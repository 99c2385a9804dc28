"""Batch normalization in recurrent networks: layers, recipes and evidence."""
