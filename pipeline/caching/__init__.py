"""Caching: record batches out of stores, fetched once for all processes of a node."""
