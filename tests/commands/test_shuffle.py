"""`shards shuffle`: every row once, anywhere with equal chance, whatever happens on the way."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from command import files_of, kill_at
from data_sets import VOCABULARY_SIZE, random_rows, write_rows

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools.shuffling import run
from tokenfeed.tools.shuffling.run import Settings, shuffle_dataset
from tokenfeed.tools.shuffling.unit import PARTITIONS

SHUFFLE = ("tokenfeed.tools.shards", "shuffle")
COMMAND = [sys.executable, "-m", *SHUFFLE]


MakeDataset = Callable[..., Path]


def shuffle(source: Path, out: Path, **settings: Any) -> Path:
    shuffle_dataset(source, out, Settings(**{"seed": 0, "workers": 1} | settings))
    return out


def command(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    result = warm.run(["-m", *SHUFFLE, *arguments])
    assert result.returncode == expect, result.stderr
    return result


def error_of(*arguments: object, expect: int = 1) -> str:
    """The one line that a run ends with."""
    (line,) = command(*arguments, expect=expect).stderr.splitlines()
    assert line.startswith("error: ")
    return line


def lengths_of(count: int, mean: float = 30, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).exponential(mean, count).astype(np.int64)
    return np.maximum(1, drawn)


def test_workers_and_memory_change_no_byte(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_SMALL_BYTES", 0)
    source = make_dataset(lengths_of(20_000), 5)
    expected = files_of(shuffle(source, tmp_path / "expected"))
    for workers, memory in ((1, 10**5), (2, 10**9), (3, 10**6)):
        out = shuffle(source, tmp_path / f"{workers}", workers=workers, memory_bytes=memory)
        assert files_of(out) == expected


def test_nothing_temporary_is_left_and_the_same_command_is_already_finished(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    source, out = make_dataset(lengths_of(300)), tmp_path / "out"
    first = json.loads(command(source, out, "--json").stdout)
    expected = files_of(out)
    assert {path.name for path in out.iterdir() if path.name.startswith(".")} == {".made_by.json"}
    (out / PARTITIONS).mkdir()  # a kill at the very end leaves it
    again = command(source, out, "--json", "--memory", "2GB", "--workers", "2")
    assert again.stderr == "already finished: the same command and input made this data set\n"
    assert json.loads(again.stdout)["already_finished"]
    assert not first["already_finished"]
    assert first["splits"] == {"train": 300}
    assert files_of(out) == expected
    assert not (out / PARTITIONS).exists()
    assert "--seed was 0, is 1" in error_of(source, out, "--seed", 1, expect=2)
    other = make_dataset(lengths_of(301))
    assert "the fingerprint of IN was" in error_of(other, out, expect=2)


def test_a_folder_that_cannot_be_the_output_is_refused(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    source = make_dataset(lengths_of(300))
    assert "is or lies in the data set" in error_of(source, source / "deep" / "out", expect=2)
    for out, said in ((source, "is or lies in the data set"), (tmp_path, "holds other data")):
        with pytest.raises(ConfigError, match=said):
            shuffle(source, out)


def test_an_unfinished_data_set_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / ".journal.jsonl").touch()
    assert "holds no finished data set" in error_of(unfinished, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_shard_is_named_and_the_run_goes_on_when_it_is_mended(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    source, out = make_dataset(lengths_of(8000), 3), tmp_path / "out"
    shard = source / "train/00001.arrow"
    good = shard.read_bytes()
    shard.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
    assert str(shard) in error_of(source, out)
    shard.unlink()
    assert str(shard) in error_of(source, out)
    shard.write_bytes(good)
    command(source, out)
    assert files_of(out) == files_of(shuffle(source, tmp_path / "expected"))


def test_an_unfinished_run_is_continued_by_the_command_that_began_it_alone(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    source, out = make_dataset(lengths_of(3000), 3), tmp_path / "out"
    assert kill_at(1, "shuffle", source, out)
    with pytest.raises(ConfigError, match="--seed was 0, is 1"):
        shuffle(source, out, seed=1)
    with pytest.raises(ConfigError, match="--memory was 1000000000, is 5"):
        shuffle(source, out, memory_bytes=5)
    (tmp_path / "some.txt").write_text("text")
    pretokenize = [sys.executable, "-m", "tokenfeed.tools.pretokenize", tmp_path / "some.txt", out]
    refused = subprocess.run(pretokenize, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "holds an unfinished run of another command" in refused.stderr
    shuffle(source, out)


def test_a_run_killed_at_any_step_continues_to_the_same_bytes(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    source = make_dataset(lengths_of(3000), 3)
    expected = files_of(shuffle(source, tmp_path / "expected"))
    out = tmp_path / "out"
    kills = 0
    while kill_at(1 + 5 * kills, "shuffle", source, out):
        kills += 1
    assert kills >= 4
    assert files_of(out) == expected


def test_damaged_partitions_are_made_again(make_dataset: MakeDataset, tmp_path: Path) -> None:
    source, out = make_dataset(lengths_of(30_000), 3), tmp_path / "out"
    expected = files_of(shuffle(source, tmp_path / "expected", memory_bytes=10**6))
    assert kill_at(25, "shuffle", source, out, "--memory", "1MB", "--workers", "1")
    partitions = sorted((out / PARTITIONS).iterdir())
    assert len(partitions) > 3
    partitions[0].write_bytes(partitions[0].read_bytes()[:-1])
    partitions[1].unlink()
    partitions[2].write_bytes(
        bytes([partitions[2].read_bytes()[0] ^ 1]) + partitions[2].read_bytes()[1:]
    )
    shuffle(source, out, memory_bytes=10**6)
    assert files_of(out) == expected


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    source, out = make_dataset(lengths_of(30_000), 3), tmp_path / "out"
    result = subprocess.run(
        [*COMMAND, str(source), str(out)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {out}")
    assert os.strerror(errno.EFBIG) in line
    command(source, out)
    assert files_of(out) == files_of(shuffle(source, tmp_path / "expected"))


def large_set(tmp_path: Path) -> Path:
    """Work for processes."""
    rows = random_rows(lengths_of(30_000, mean=500))
    return write_rows(tmp_path / "in", {"train": rows}, VOCABULARY_SIZE, 8)


@pytest.mark.slow
def test_ctrl_c_says_what_is_kept_and_the_same_command_continues(tmp_path: Path) -> None:
    source, out = large_set(tmp_path), tmp_path / "out"
    options = ("--memory", "60MB", "--workers", "2")
    process = subprocess.Popen(
        [*COMMAND, str(source), str(out), *options], stderr=subprocess.PIPE, text=True
    )
    journal = out / ".journal.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < 3:  # the job, and two units
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "units are finished and kept; the same command continues with the others" in said
    assert len(said.splitlines()) == 1
    assert json.loads(command(source, out, "--json", *options).stdout)["resumed_units"] > 0
    assert files_of(out) == files_of(shuffle(source, tmp_path / "expected"))


@pytest.mark.slow
@pytest.mark.parametrize("most", [5, pytest.param(20, marks=pytest.mark.long)])
def test_kills_at_random_moments_change_no_byte(most: int, tmp_path: Path) -> None:
    source = large_set(tmp_path)
    started = time.monotonic()
    options = ("--memory", "60MB", "--workers", "2")
    command(source, tmp_path / "expected", *options)
    seconds = time.monotonic() - started
    expected = files_of(tmp_path / "expected")
    draw = np.random.default_rng(0)
    kills = finished = 0
    while kills < most or not finished:
        out = tmp_path / f"out{finished}"
        process = subprocess.Popen(
            [*COMMAND, str(source), str(out), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=draw.uniform(0, seconds))
            assert process.returncode == 0, said
            assert files_of(out) == expected
            finished += 1
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            kills += 1
