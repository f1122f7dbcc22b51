"""A run of `pretokenize`: its options, its input, the encoding of units, and the finished data
set."""
