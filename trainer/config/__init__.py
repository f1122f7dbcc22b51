"""Settings of a run: their types, bounds, phases and learning-rate schedule."""
