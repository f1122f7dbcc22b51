"""Going on from the newest checkpoint in the folder of a run."""

import dataclasses
from pathlib import Path

import pytest
from support.checkpoints import saving_config
from support.training import parsed, run

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints


def test_a_damaged_checkpoint_ends_a_resume_in_one_line(few_rows: Path, tmp_path: Path) -> None:
    config = saving_config(few_rows, tmp_path / "run", steps=2)
    run(config)
    path = Checkpoints.of_run(config.run_dir).path(2)
    file = path / "state-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ResumeError, match=r"is damaged .* fails its checksum.* Delete") as error:
        run(dataclasses.replace(config, resume="auto", steps=4))
    assert str(error.value).startswith(f"{path}: ")


def test_the_same_command_line_begins_a_run_and_goes_on_with_its_settings(
    few_rows: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = ["--shards", str(few_rows), "--run-dir", str(run_dir), "--resume", "auto"]
    begun = parsed(*words, "--steps", "4")
    assert begun.resume is False
    small = saving_config(few_rows, run_dir, steps=4, learning_rate=0.01)
    run(small)
    again = parsed(*words, "--steps", "4")
    assert again == dataclasses.replace(small, resume=True)
    longer = parsed("--run-dir", str(run_dir), "--resume", "--steps", "6")
    assert longer == dataclasses.replace(small, resume=True, steps=6)


def test_resume_alone_needs_a_run(few_rows: Path, tmp_path: Path) -> None:
    words = ["--shards", str(few_rows), "--run-dir", str(tmp_path / "run")]
    with pytest.raises(ResumeError, match="no checkpoint to resume from"):
        run(parsed(*words, "--resume"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="needs --run-dir"):
        parsed(*words[:2], "--resume", "auto")
