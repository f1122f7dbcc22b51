"""The feed: windows made ahead by workers, batches built on host or device, ShardLoader."""
