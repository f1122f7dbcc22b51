"""What people run: `pretokenize`, `train` and `shards`, and the parts they are made of."""
