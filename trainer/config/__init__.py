"""Settings of a run: their types, bounds and learning-rate schedule."""
