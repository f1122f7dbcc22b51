"""GPUs: what is known of each model, and readings of the GPU of a run."""
