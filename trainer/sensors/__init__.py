"""What machine and process are doing, asked of driver and system; never of torch, and never waited
for. Whatever is not told is None, and ends no training."""
