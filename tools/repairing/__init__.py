"""`shards repair`: damaged or lost files of a data set, made or fetched again."""
