"""Data sets of other runs, folders of odd names, machines that refuse: one line, or it works."""

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support import FORMAT_1
from support.data_sets import random_rows, rows_of_ids
from support.delivery import MakeDataset, open_loader
from support.processes import open_files, opened_since

from tokenfeed import Manifest, Padded
from tokenfeed.pipeline.errors import ShardFormatError, TokenfeedError
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.manifest import ShardInfo
from tokenfeed.pipeline.format.schema import Rows, task_columns
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.shard_writer import ShardWriter
from tokenfeed.pipeline.windows.reader import WindowReader
from tokenfeed.tools.data_sets.verify import find_problems

NAME = "train/00000.arrow"


CLASSIFY = task_columns("classify")


def write(folder: Path, rows: Rows, **options: Any) -> ShardInfo:
    with ShardWriter(folder, NAME, 1000, **options) as writer:
        writer.append(rows)
    assert writer.info is not None
    return writer.info


def a_shard(folder: Path, tokens: int = 10) -> ShardInfo:
    return write(folder, random_rows(np.array([tokens])))


def first_shard(folder: Path, **changes: Any) -> None:
    """Change what the manifest says of the first shard."""
    manifest = Manifest.read(folder)
    train = manifest.split("train")
    shards = (replace(train.shards[0], **changes), *train.shards[1:])
    replace(manifest, splits={"train": replace(train, shards=shards)}).write(folder)


@pytest.mark.parametrize("only", [None, ("input_ids",)])
def test_a_shard_with_one_label_corrected_is_refused_whatever_is_read(
    tmp_path: Path, only: tuple[str, ...] | None
) -> None:
    rows = random_rows(np.array([3, 5, 2]), "classify")
    ours = write(tmp_path, rows, columns=CLASSIFY)
    rows.per_row["label"][1] ^= 1
    theirs = write(tmp_path, rows, columns=CLASSIFY)
    assert theirs.bytes == ours.bytes, "the case that sizes do not tell apart"
    with pytest.raises(ShardFormatError, match="holds other rows"):
        ShardReader(tmp_path, ours, 1000, CLASSIFY, only=only)
    ShardReader(tmp_path, theirs, 1000, CLASSIFY, only=only)


def test_a_loader_and_verify_refuse_the_shard_of_another_run(make_dataset: MakeDataset) -> None:
    ours = make_dataset([7] * 30, num_shards=1)
    rows = rows_of_ids(np.arange(210) % 1000, np.array([7] * 30), 1000)
    first_shard(ours, bytes=write(ours, rows).bytes)
    with open_loader(ours) as loader, pytest.raises(ShardFormatError, match="holds other rows"):
        next(iter(loader))
    assert [problem for problem in find_problems(ours, Manifest.read(ours)) if NAME in problem]


def test_only_a_manifest_without_seals_takes_shards_without_seals(tmp_path: Path) -> None:
    info = a_shard(tmp_path)
    with pytest.raises(ShardFormatError, match="holds other rows"):
        ShardReader(tmp_path, replace(info, seal=None), 1000)
    golden = FORMAT_1 / "lm"
    old = Manifest.read(golden).split("train").shards[0]
    assert old.seal is None
    with pytest.raises(ShardFormatError, match="holds other rows"):
        ShardReader.open(golden, Manifest.read(golden), replace(old, seal="0" * 16))


MACHINE = [
    (MemoryError("malloc of size 9 failed"), "Cannot allocate memory. The machine lacks memory"),
    (pa.ArrowMemoryError("malloc of size 9 failed"), "The machine lacks memory"),
    (OSError(errno.EMFILE, "open"), "Too many open files. Too many files are open"),
    (OSError(errno.EACCES, "open"), "Permission denied. Give the user of this process permission"),
    (OSError(errno.EIO, "pread"), "Input/output error. The disk or its network failed"),
    (OSError(errno.ESTALE, "pread"), "Stale file handle. The disk or its network failed"),
]


def raising(error: Exception) -> Callable[..., None]:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("error", "expected"), MACHINE)
def test_a_machine_that_refuses_is_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str
) -> None:
    info = a_shard(tmp_path)
    reader = ShardReader(tmp_path, info, 1000)

    class Refusing:
        get_batch_with_custom_metadata = staticmethod(raising(error))

    monkeypatch.setattr(reader, "_reader", Refusing)
    monkeypatch.setattr("pyarrow.ipc.open_file", raising(error))
    for attempt in (lambda: ShardReader(tmp_path, info, 1000), lambda: reader.read(0)):
        with pytest.raises(ShardFormatError) as caught:
            attempt()
        message = str(caught.value)
        assert expected in message
        assert str(tmp_path / NAME) in message
        assert "Copy" not in message


@pytest.mark.parametrize("length", [10, 5000])
def test_a_folder_whose_name_is_no_text_is_written_and_read(
    make_dataset: MakeDataset, tmp_path: Path, length: int
) -> None:
    folder = tmp_path / os.fsdecode(b"latin\xe9")
    make_dataset([length] * 40, num_shards=1).rename(folder)
    assert write(folder / "again", random_rows(np.array([length] * 40))).rows == 40
    assert not [p for p in find_problems(folder, Manifest.read(folder)) if NAME in p]
    with open_loader(folder, Padded(8000)) as loader:
        assert sum(batch.num_tokens for batch in loader) == 40 * length


def test_small_shards_hold_no_descriptor(make_dataset: MakeDataset) -> None:
    folder = make_dataset([4] * 60, num_shards=60)
    before = open_files()
    reader = WindowReader(open_splits([folder], "train"))
    reader.read(np.arange(60))
    assert opened_since(before) == []


@pytest.mark.parametrize("name", ["manifest.json", NAME])
def test_pipe_in_place_of_file_is_refused(make_dataset: MakeDataset, name: str) -> None:
    """An archive can hold named pipes. Opening one without a writer would block for ever."""
    folder = make_dataset([3, 5, 700])
    shard = replace(Manifest.read(folder).split("train").shards[0], bytes=0)

    def read() -> None:
        Manifest.read(folder)
        ShardReader(folder, shard, 1000)

    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    previous = signal.signal(signal.SIGALRM, raising(AssertionError("blocked for 60 s")))
    signal.alarm(60)
    try:
        with pytest.raises(TokenfeedError, match="is not a regular file"):
            read()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
