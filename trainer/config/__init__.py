"""Settings of a run: their types, bounds, presets, phases and learning-rate schedule."""
