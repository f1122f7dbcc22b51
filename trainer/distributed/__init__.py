"""Several processes: launch, process group, synchronization of ranks, sharded models."""
