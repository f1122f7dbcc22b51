"""Tasks: what a model is trained for, each with an entry in `registry`. Tasks with labels share a file."""
