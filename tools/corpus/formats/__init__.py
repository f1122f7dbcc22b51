"""Formats of input files: one file each, and a line in `registry`."""
