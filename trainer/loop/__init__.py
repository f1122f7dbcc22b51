"""The training loop, and the loaders of a run."""
