"""Training a tokenizer is deterministic."""

import os
import subprocess
from pathlib import Path

from support.commands import COMMAND


def test_training_twice_gives_the_same_bytes_with_any_number_of_threads(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for index in range(30):
        (tmp_path / f"in/{index}.txt").write_text(f"{index} some words {index * 7919} " * 50)
    for threads in ("1", "3"):
        command = [*COMMAND, str(tmp_path / "in"), str(tmp_path / threads), "--vocab-size", "500"]
        environment = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    one, three = (tmp_path / threads / "tokenizer.json" for threads in ("1", "3"))
    assert one.read_bytes() == three.read_bytes()
