"""Where things are in the repository, for tests that read them."""

from pathlib import Path

__all__ = ["FORMAT_1", "ROOT", "SUPPORT"]

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
FORMAT_1 = ROOT / "tests/golden/format1"
"""Data sets of format version 1, which are read for ever."""
