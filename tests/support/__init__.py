"""What several tests share. The folder `programs` has programs that tests start."""

from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
FORMAT_1 = ROOT / "tests/golden/format1"
"""Data sets of format version 1, which are read for ever."""
