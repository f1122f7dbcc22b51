"""The plan: which rows come when, as a pure function of manifests, seed and policy. No torch."""
