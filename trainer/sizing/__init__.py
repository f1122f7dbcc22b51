"""What fits the device: memory, micro-batch search, dry run, defaults for a data set."""
