"""The lean loop: trains a model from a `ShardLoader` and reports the stall that is left."""
