"""Units of a run: claims, records, the crew of workers."""
