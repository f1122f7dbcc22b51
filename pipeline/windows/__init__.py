"""Windows: rows read from shards as a plan says, and the slice of them that one rank gets."""
