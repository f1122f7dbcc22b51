"""Modules and environment of encoding workers, loaded before the options are parsed."""

__all__ = ["ENVIRONMENT", "MODULES"]

MODULES = ("tokenfeed.tools.encoding.unit", "awkward", "gigatoken")
"""What they will import."""

ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
"""What a batch has freed they keep for the next: zeroing it anew took a tenth of the time."""
