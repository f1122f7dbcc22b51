"""A run of `pretokenize`: its input, who encodes it, and the data set that is left at the end."""
