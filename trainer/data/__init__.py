"""Data sets of a run and micro-batches, as models and tasks take them."""
