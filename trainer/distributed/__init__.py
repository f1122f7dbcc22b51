"""Several processes: launch, process group, agreement of ranks, sharded models."""
