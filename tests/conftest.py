"""What several test files share: small data sets made by the real writer."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import WORDS, texts
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenfeed.pipeline.manifest import (
    FileInfo,
    Ledger,
    Manifest,
    SplitInfo,
    TokenizerInfo,
    length_histogram,
)
from tokenfeed.pipeline.rows import Rows
from tokenfeed.pipeline.schema import token_dtype
from tokenfeed.pipeline.shard import ShardWriter
from tokenfeed.pipeline.storage import file_xxh3

settings.register_profile("tokenfeed", deadline=None)  # shared machines pause; that is no failure
settings.load_profile("tokenfeed")

VOCABULARY_SIZE = 1000

WriteDataset = Callable[..., Path]
MakeDataset = Callable[..., Path]


def random_rows(lengths: np.ndarray) -> Rows:
    """Random rows of given lengths; row k says so in its origin_record."""
    ids = np.random.default_rng(0).integers(1, VOCABULARY_SIZE, int(lengths.sum()))
    return rows_of_ids(ids, lengths, VOCABULARY_SIZE)


def rows_of_ids(ids: np.ndarray, lengths: np.ndarray, vocabulary_size: int) -> Rows:
    """Rows of one source file, in its order."""
    count = len(lengths)
    return Rows(
        lengths.astype(np.int64),
        {"input_ids": ids.astype(token_dtype(vocabulary_size))},
        {
            "origin_file": np.zeros(count, np.uint32),
            "origin_record": np.arange(count, dtype=np.uint64),
        },
    )


def write_split(
    folder: Path, split: str, rows: Rows, vocabulary_size: int, num_shards: int
) -> SplitInfo:
    """Write rows as shards of about equal numbers of rows."""
    shards = []
    for number, part in enumerate(np.array_split(np.arange(len(rows)), num_shards)):
        if len(part):
            with ShardWriter(folder, f"{split}/{number:05d}.arrow", vocabulary_size) as writer:
                writer.append(rows.slice(int(part[0]), int(part[-1]) + 1))
            assert writer.info is not None
            shards.append(writer.info)
    histogram = tuple(length_histogram(rows.lengths).tolist())
    return SplitInfo(shards=tuple(shards), length_histogram=histogram)


def write_rows(
    folder: Path, splits: dict[str, Rows], vocabulary_size: int, num_shards: int = 1
) -> Path:
    """Write a whole data set: shards, side files, manifest."""
    infos = {
        split: write_split(folder, split, rows, vocabulary_size, num_shards)
        for split, rows in splits.items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "empty").touch()
    empty = FileInfo(file="empty", bytes=0, xxh3=file_xxh3(folder / "empty"))
    count = sum(len(rows) for rows in splits.values())
    Manifest(
        format_version=1,
        task="lm",
        columns=(),
        label_names=(),
        tokenizer=TokenizerInfo(
            file=empty.file,
            bytes=empty.bytes,
            xxh3=empty.xxh3,
            vocabulary_size=vocabulary_size,
            end_id=None,
            pad_id=0,
            engine="test",
            engine_version="0",
            audited=0,
            differences=0,
            special_tokens_in_text="plain",
            special_tokens_added=False,
        ),
        splits=infos,
        ledger=Ledger(files=1, bytes=0, read=count, written=count, empty=0, rejected=0),
        sources=empty,
        rejects=empty,
    ).write(folder)
    return folder


@pytest.fixture(scope="session")
def write_dataset() -> WriteDataset:
    """Writes given ids: (folder, {split: (ids, lengths)}, vocabulary_size) -> folder."""

    def write(
        folder: Path, splits: dict[str, tuple[np.ndarray, np.ndarray]], vocabulary_size: int
    ) -> Path:
        rows = {split: rows_of_ids(*arrays, vocabulary_size) for split, arrays in splits.items()}
        return write_rows(folder, rows, vocabulary_size)

    return write


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Makes random rows of given lengths, each time in a new folder: (lengths, num_shards=2)."""
    made = 0

    def make(lengths: np.ndarray | list[int], num_shards: int = 2) -> Path:
        nonlocal made
        made += 1
        rows = random_rows(np.asarray(lengths))
        return write_rows(tmp_path / f"set{made}", {"train": rows}, VOCABULARY_SIZE, num_shards)

    return make


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer.json."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["</s>"],
        show_progress=False,
    )
    made.train_from_iterator(WORDS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """60 text files and a .jsonl with two bad lines and an empty text."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index, text in enumerate(texts(60)):
        (folder / f"{index:02}.txt").write_text(text)
    lines = [json.dumps({"text": text}) for text in ["", *texts(200, seed=1)]]
    (folder / "lines.jsonl").write_text("\n".join([*lines, "{", '{"text": 1}']))
    return folder
