"""Data sets of a run, their batching and defaults; micro-batches, as models and tasks take them."""
