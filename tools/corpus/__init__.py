"""What there is to read: find the input files, cut them into units, read their records."""
