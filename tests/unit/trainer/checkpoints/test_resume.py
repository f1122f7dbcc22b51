"""Going on from the newest checkpoint, in the folder of a run or at its URL."""

import dataclasses
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.checkpoints import (
    checkpoint,
    copy_of,
    make_state,
    refuse,
    save,
    saving_config,
)
from support.stores import URL, FaultyStore
from support.training import run

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.tools.train_settings import parse_config
from tokenfeed.trainer.checkpoints.resume import download_newest
from tokenfeed.trainer.checkpoints.retention import Checkpoints
from tokenfeed.trainer.checkpoints.uploader import RemoteRun
from tokenfeed.trainer.config.run_config import TrainConfig


def spoil(path: Path) -> None:
    file = path / "state-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_ends_a_resume_in_one_line(few_rows: Path, tmp_path: Path) -> None:
    config = saving_config(few_rows, tmp_path / "run", steps=2)
    run(config)
    path = Checkpoints.of_run(config.run_dir).path(2)
    spoil(path)
    with pytest.raises(ResumeError, match=r"is damaged .* fails its checksum.* Delete") as error:
        run(dataclasses.replace(config, resume="auto", steps=4))
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_damaged_copy_leaves_no_checkpoint(tmp_path: Path, store: type[FaultyStore]) -> None:
    path = checkpoint(tmp_path / "there", 2)
    copy_of(tmp_path / "there", URL)
    spoil(path)
    name = f"{URL}/checkpoints/{path.name}"
    store.store[f"{name}/state-0.safetensors"] = (path / "state-0.safetensors").read_bytes()
    with pytest.raises(ResumeError, match=f"{name}: the checkpoint is damaged .* checksum"):
        download_newest(tmp_path / "here", URL)
    assert Checkpoints.of_run(tmp_path / "here").steps() == []


def test_auto_does_not_begin_anew_where_the_url_does_not_answer(
    tmp_path: Path, store: type[FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    store.before = staticmethod(refuse)
    with pytest.raises(ResumeError, match=f"{URL}: cannot be read .*the line is dead"):
        download_newest(tmp_path, URL)
    checkpoint(tmp_path, 1)
    assert download_newest(tmp_path, URL)
    assert f"{URL} cannot be read" in caplog.text


def test_auto_without_a_checkpoint_begins(tmp_path: Path, store: type[FaultyStore]) -> None:
    assert not download_newest(tmp_path / "new", URL)
    assert not download_newest(tmp_path / "new", None)


def test_auto_takes_the_newer_of_here_and_there(tmp_path: Path, store: type[FaultyStore]) -> None:
    ahead, behind = tmp_path / "ahead", tmp_path / "behind"
    checkpoint(behind, 3)
    save(ahead / "checkpoints", 5, make_state(5))
    copy_of(ahead, URL)
    assert download_newest(behind, URL)
    assert Checkpoints.of_run(behind).steps() == [3, 5]
    save(behind / "checkpoints", 7, make_state(7))
    store.before = staticmethod(lambda operation, path: operation != "get" or refuse("", ""))
    assert download_newest(behind, URL)


def test_of_several_processes_that_a_launcher_starts_one_brings_the_checkpoint(
    tmp_path: Path, store: type[FaultyStore]
) -> None:
    checkpoint(tmp_path / "first", 1)
    copy_of(tmp_path / "first", URL)
    gets: list[str] = []
    store.before = staticmethod(
        lambda operation, path: operation == "get" and (gets.append(path), time.sleep(0.05))
    )
    run_dir = tmp_path / "run"
    with ThreadPoolExecutor(4) as pool:  # a file that is opened twice is locked as by two processes
        assert all(pool.map(lambda _: download_newest(run_dir, URL), range(4)))
    assert len(gets) == 1


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> TrainConfig:
    monkeypatch.setattr("sys.argv", ["train", *words])
    return parse_config()


def test_the_same_command_line_begins_a_run_and_goes_on_with_its_settings(
    few_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[FaultyStore]
) -> None:
    run_dir = tmp_path / "run"
    words = ["--shards", str(few_rows), "--run-dir", str(run_dir), "--upload", URL]
    begun = parsed(monkeypatch, *words, "--resume", "auto", "--steps", "4")
    assert begun.resume is False
    small = saving_config(few_rows, run_dir, upload=URL, steps=4, learning_rate=0.01)
    run(small)
    shutil.rmtree(run_dir)
    again = parsed(monkeypatch, *words, "--resume", "auto", "--steps", "4")
    assert again == dataclasses.replace(small, resume=True)
    longer = parsed(monkeypatch, "--run-dir", str(run_dir), "--resume", "--steps", "6")
    assert longer == dataclasses.replace(small, resume=True, steps=6)
    run(longer)
    assert RemoteRun(URL).steps()[-1] == 6


def test_resume_alone_needs_a_run(
    few_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--shards", str(few_rows), "--run-dir", str(tmp_path / "run")]
    with pytest.raises(ResumeError, match="no checkpoint to resume from"):
        run(parsed(monkeypatch, *words, "--resume"))
    with pytest.raises(ConfigError, match="needs --run-dir"):
        parsed(monkeypatch, *words[:2], "--resume", "auto")
