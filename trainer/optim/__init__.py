"""Optimizers, precision and gradients; the state that a step changes."""
