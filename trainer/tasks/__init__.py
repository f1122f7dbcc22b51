"""Tasks: what a model is trained for. One file each, and one entry in `registry`."""
