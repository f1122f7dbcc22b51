"""The format: what a data set is on disk, written and read by everyone else."""
