"""The subcommands of `shards`, each over finished data sets."""
