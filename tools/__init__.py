"""The commands: `pretokenize`, `shards`, `train`, `report` and `doctor`."""
