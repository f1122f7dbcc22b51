"""Tasks: one file each, and its lines in `registry`."""
