"""Windows: read rows from shards in the order of the plan, and copy the slice of one rank."""
