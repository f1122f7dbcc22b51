"""The corpora of benchmarks/shuffle/: rows in an order that a shuffle has to undo.

Only lengths and groups matter to an order. The ids are one block of random ones, rare and frequent
as words are, over and over: shards compress and decode about as those of text do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tokenfeed.pipeline.format.manifest import (
    FileInfo,
    Manifest,
    RecordCounts,
    ShardInfo,
    SplitInfo,
    TokenizerInfo,
    length_histogram,
)
from tokenfeed.pipeline.format.schema import FORMAT_VERSION, Rows, Task, task_columns
from tokenfeed.pipeline.format.shard_writer import ShardWriter
from tokenfeed.pipeline.format.storage import file_xxh3

__all__ = ["CORPORA", "Corpus", "write_manifest", "write_shards"]

VOCABULARY = 32_768
SHARD_TOKENS = 64_000_000
GROUPS = 10


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows in the order of the files."""

    lengths: np.ndarray
    """Tokens of each, (R,), int64."""
    groups: np.ndarray
    """What each is of: a source, a tenth, a label; (R,), int64."""
    task: Task = "lm"
    """`classify`: the groups are labels, and stand in the data set."""


def by_source(tokens: int, mean: float, spread: float, longest: int) -> Corpus:
    """Ten sources of as many tokens, one after the other."""
    lengths = draw(tokens, mean, spread, longest)
    return Corpus(lengths, tenths(lengths))


def by_length(tokens: int) -> Corpus:
    """Documents, the shortest first."""
    lengths = np.sort(draw(tokens, 600, 1.0, 16_384))
    return Corpus(lengths, tenths(lengths))


def by_date(tokens: int) -> Corpus:
    """Documents that grow longer by and by, to three times the length."""
    lengths = draw(tokens, 600, 1.0, 16_384)
    growth = np.linspace(0.5, 1.5, len(lengths))
    lengths = np.clip(lengths * growth, 1, 16_384).astype(np.int64)
    return Corpus(lengths, tenths(lengths))


def few(rows: int) -> Corpus:
    """A small set of documents, in no order."""
    lengths = draw(rows * 600, 600, 1.0, 16_384)[:rows]
    return Corpus(lengths, tenths(lengths))


def two_classes(rows: int) -> Corpus:
    """Short rows of two classes, of which one is longer: medians 20 and 67; in no order."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, rows)
    lengths = rng.lognormal(np.log(np.where(labels, 67, 20)), 0.4).astype(np.int64)
    return Corpus(np.clip(lengths, 1, 512), labels, "classify")


def draw(tokens: int, mean: float, spread: float, longest: int) -> np.ndarray:
    """Lognormal lengths until they have so many tokens."""
    count = int(tokens / mean * 1.2) + 100
    middle = np.log(mean) - spread**2 / 2
    lengths = np.random.default_rng(0).lognormal(middle, spread, count)
    whole = np.clip(lengths, 1, longest).astype(np.int64)
    return whole[: int(np.searchsorted(np.cumsum(whole), tokens)) + 1]


def tenths(lengths: np.ndarray) -> np.ndarray:
    """Which tenth of the tokens each row begins in."""
    before = np.cumsum(lengths) - lengths
    return np.asarray(before * GROUPS // lengths.sum())


CORPORA: dict[str, Callable[[float], Corpus]] = {
    "documents by source": lambda scale: by_source(int(2e8 * scale), 600, 1.0, 16_384),
    "documents by length": lambda scale: by_length(int(2e8 * scale)),
    "documents by date": lambda scale: by_date(int(2e8 * scale)),
    "short rows by source": lambda scale: by_source(int(2e8 * scale), 24, 0.6, 512),
    "2,000 documents": lambda scale: few(2_000),
    "two classes": lambda scale: two_classes(20_000),
    "a small source": lambda scale: few(int(6_000 * scale) + 1),
}
"""Name -> the rows, at a scale."""


@cache
def _block() -> np.ndarray:
    """The ids that are repeated."""
    draws = np.random.default_rng(0).random(1 << 23)
    return np.exp(draws * np.log(VOCABULARY - 1)).astype(np.uint16)


def write_shards(folder: Path, corpus: Corpus) -> None:
    """Write a data set of rows of these lengths, as `pretokenize` would."""
    lengths = corpus.lengths
    folder.mkdir(parents=True)
    shard = (np.cumsum(lengths) - lengths) // SHARD_TOKENS
    cuts = np.flatnonzero(np.diff(shard)) + 1
    parts = np.split(np.arange(len(lengths)), cuts)
    shards = tuple(write_shard(folder, n, corpus, part) for n, part in enumerate(parts))
    histogram = tuple(length_histogram(lengths).tolist())
    split = SplitInfo(shards=shards, length_histogram=histogram)
    write_manifest(folder, split, vocabulary=VOCABULARY, task=corpus.task)


def write_shard(folder: Path, number: int, corpus: Corpus, part: np.ndarray) -> ShardInfo:
    of_rows = corpus.lengths[part]
    labels = {"label": corpus.groups[part].astype(np.int32)} if corpus.task == "classify" else {}
    rows = Rows(
        of_rows,
        {"input_ids": np.resize(_block(), int(of_rows.sum()))},
        {"origin_file": np.zeros(len(part), np.uint32), "origin_record": part.astype(np.uint64)}
        | labels,
    )
    columns = task_columns(corpus.task)
    with ShardWriter(folder, f"train/{number:05d}.arrow", VOCABULARY, columns) as writer:
        writer.append(rows)
    assert writer.info
    return writer.info


def write_manifest(folder: Path, split: SplitInfo, *, vocabulary: int, task: Task = "lm") -> None:
    """Freeze one split of shards as the data set in `folder`."""
    empty = folder / "empty"
    empty.touch()
    nothing = FileInfo(file=empty.name, bytes=0, xxh3=file_xxh3(empty))
    Manifest(
        format_version=FORMAT_VERSION,
        task=task,
        columns=task_columns(task),
        label_names=("short", "long") if task == "classify" else (),
        tokenizer=TokenizerInfo(
            file=nothing.file,
            bytes=0,
            xxh3=nothing.xxh3,
            vocabulary_size=vocabulary,
            end_id=None,
            pad_id=0,
            engine="none",
            engine_version="0",
            audited=0,
            differences=0,
            special_tokens_in_text="plain",
            special_tokens_added=False,
        ),
        splits={"train": split},
        ledger=RecordCounts(
            files=1, bytes=0, read=split.rows, written=split.rows, empty=0, rejected=0
        ),
        sources=nothing,
        rejects=nothing,
    ).write(folder)
