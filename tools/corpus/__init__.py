"""The corpus: find the input files, cut them into units, read their records."""
