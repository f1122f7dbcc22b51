"""Loaders of a run: batching, splits, phases."""
