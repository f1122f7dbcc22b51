"""`train`, killed at any of its writes, goes on to the bits of an undisturbed run.

Now and then the folder of the run is lost as well. The command then goes on from its copy.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.commands import call, kill_at
from support.data_sets import files_of

from tokenfeed.tools import train

STEPS = 8
SETTINGS: dict[str, Any] = {
    "--model": "support.training:dropping_model",
    "--steps": STEPS,
    "--sequence-length": 32,
    "--micro-batch-tokens": 128,
    "--step-tokens": 256,
    "--warmup-steps": 2,
    "--eval-every": 4,
    "--eval-tokens": 256,
    "--save-every": 2,
    "--log-every": 1,
    "--device": "cpu",
}


def words_of(shards: Path, folder: Path) -> list[object]:
    """A command that begins a run or goes on with it, and copies it to another folder."""
    words = [word for pair in SETTINGS.items() for word in pair]
    words += ["--shards", shards, "--resume", "auto", "--run-dir", folder / "run"]
    return [*words, "--upload", folder / "copy", "--export", folder / "export"]


def last_state(folder: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint: weights, moments, states of random numbers."""
    files = next((folder / "run/checkpoints").glob(f"*{STEPS}")).glob("*.safetensors")
    tensors = [tensor for path in sorted(files) for tensor in load_file(path).items()]
    return {name: tensor.tobytes() for name, tensor in tensors}


@pytest.mark.slow
def test_a_run_killed_at_any_write_ends_with_the_bits_of_an_undisturbed_one(
    documents: Path, tmp_path: Path
) -> None:
    whole, out, draw = tmp_path / "whole", tmp_path / "out", random.Random(0)
    call(train.main, *words_of(documents, whole))
    kills = losses = 0
    while kill_at(draw.randint(1, 40), "train", *words_of(documents, out)):
        kills += 1
        if (out / "copy").exists() and draw.random() < 0.3:
            shutil.rmtree(out / "run", ignore_errors=True)
            losses += 1
    assert kills >= 3
    assert losses
    assert files_of(out / "export") == files_of(whole / "export")
    assert last_state(out) == last_state(whole)
