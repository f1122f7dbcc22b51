"""Caching: a disk cache of record batches from stores, shared by all processes of a node."""
