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


def test_an_interruption_while_the_command_begins_is_told_in_one_line(documents: Path) -> None:
    code = (
        "import os, signal, sys, threading\n"
        "from tokenfeed.tools.shards import main\n"
        "assert not {'numpy', 'pyarrow', 'rich'} & sys.modules.keys()\n"
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "main()"
    )
    command = [sys.executable, "-c", code, "cat", str(documents), "--rows", "99999999"]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert (result.stderr, result.returncode) == ("interrupted\n", 130)
