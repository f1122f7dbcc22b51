"""Measurements, a folder for each question. Start one by `python -m benchmarks.NAME`."""
