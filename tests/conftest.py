"""What several test files share: small data sets made by the real writer."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from tokenfeed.pipeline.manifest import (
    FileInfo,
    Ledger,
    Manifest,
    SplitInfo,
    TokenizerInfo,
    length_histogram,
)
from tokenfeed.pipeline.shard import Rows, ShardWriter
from tokenfeed.pipeline.storage import file_xxh3

MakeDataset = Callable[..., Path]

settings.register_profile("tokenfeed", deadline=None)  # shared machines pause; that is no failure
settings.load_profile("tokenfeed")


def make_rows(lengths: np.ndarray, vocabulary_size: int = 1000, seed: int = 0) -> Rows:
    """Random rows of given lengths; row k says so in its origin_record."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, vocabulary_size, int(lengths.sum()))
    numbers = np.arange(len(lengths))
    return Rows(
        ids.astype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32),
        lengths.astype(np.int64),
        np.zeros(len(lengths), np.uint32),
        numbers.astype(np.uint64),
    )


def write_dataset(
    folder: Path,
    lengths: np.ndarray,
    *,
    num_shards: int = 2,
    vocabulary_size: int = 1000,
    split: str = "train",
    seed: int = 0,
) -> Path:
    """Write a whole data set: shards, side files, manifest."""
    rows = make_rows(lengths, vocabulary_size, seed)
    shards = []
    for number, part in enumerate(np.array_split(np.arange(len(lengths)), num_shards)):
        if len(part):
            with ShardWriter(folder, f"{split}/{number:05d}.arrow", vocabulary_size) as writer:
                writer.append(rows.slice(int(part[0]), int(part[-1]) + 1))
            assert writer.info is not None
            shards.append(writer.info)
    for name in ("tokenizer.json", "sources.jsonl", "rejects.jsonl"):
        (folder / name).write_text("{}\n")

    def info(name: str) -> dict[str, str | int]:
        path = folder / name
        return {"file": name, "bytes": path.stat().st_size, "xxh3": file_xxh3(path)}

    count = len(lengths)
    Manifest(
        format_version=1,
        task="lm",
        tokenizer=TokenizerInfo(
            **info("tokenizer.json"),
            vocabulary_size=vocabulary_size,
            end_id=None,
            pad_id=0,
            engine="test",
            engine_version="0",
        ),
        splits={
            split: SplitInfo(
                shards=tuple(shards), length_histogram=tuple(length_histogram(lengths).tolist())
            )
        },
        ledger=Ledger(files=1, bytes=0, read=count, written=count, empty=0, rejected=0),
        sources=FileInfo(**info("sources.jsonl")),
        rejects=FileInfo(**info("rejects.jsonl")),
    ).write(folder)
    return folder


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """A factory of data sets in the test's own folder."""
    made = 0

    def make(lengths: np.ndarray | list[int], **options: object) -> Path:
        nonlocal made
        made += 1
        return write_dataset(tmp_path / f"set{made}", np.asarray(lengths), **options)

    return make
