"""Loaders of a run: batching and splits."""
