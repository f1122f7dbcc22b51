"""The plan: the order of rows, as a pure function of manifests, seed and policy. No torch."""
