"""Tasks: what a model is trained for, each with an entry in `registry`; labels share a file."""
