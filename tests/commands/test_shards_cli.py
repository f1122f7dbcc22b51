"""`shards inspect|verify|cat`: what is inside, whether it is whole, and what it says."""

import subprocess
import sys
from pathlib import Path


def test_cat_into_a_closed_pipe_is_quiet(documents: Path) -> None:
    command = (
        f"'{sys.executable}' -m tokenfeed.tools.shards cat '{documents}' --rows 90 | head -n 1"
    )
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.stdout.startswith("--- train row 0 ")
    assert result.stderr == ""
