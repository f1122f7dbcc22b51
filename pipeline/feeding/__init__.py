"""Feeding: workers make windows ahead, batches are built on host or device; ShardLoader."""
