"""What many tests share: small data sets made by the real writer, and plans without a disk."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from support.commands import run
from tokenfeed.pipeline.format.manifest import (
    CHECKSUM_KEY,
    FileInfo,
    Manifest,
    RecordCounts,
    ShardInfo,
    SplitInfo,
    TokenizerInfo,
    canonical,
    length_histogram,
)
from tokenfeed.pipeline.format.schema import Column, Rows, Task, task_columns, token_dtype
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.shard_writer import ShardWriter
from tokenfeed.pipeline.format.storage import file_xxh3
from tokenfeed.pipeline.planning.batching import WindowPlan
from tokenfeed.pipeline.planning.plan import Ahead, Plan
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.pipeline.planning.schedule import Schedule, Source, Stretch
from tokenfeed.pipeline.windows.reader import Window, WindowReader

VOCABULARY_SIZE = 1000

WriteDataset = Callable[..., Path]
MakeDataset = Callable[..., Path]


Span = tuple[int, int, int]
"""A piece: its row, its first token within the row, and the token after its last."""


def random_rows(
    lengths: np.ndarray,
    task: Task = "lm",
    *,
    pairs: bool = False,
    vocabulary_size: int = VOCABULARY_SIZE,
) -> Rows:
    """Random rows of given lengths, labelled as the task has it; row k says so in its
    origin_record."""
    rng = np.random.default_rng(0)
    rows = rows_of_ids(
        rng.integers(1, vocabulary_size, int(lengths.sum())), lengths, vocabulary_size
    )
    for column in task_columns(task, pairs=pairs):
        columns = rows.per_token if column.per == "token" else rows.per_row
        size = len(rows.ids) if column.per == "token" else len(rows)
        least, most = {
            "labels": (-2, 5),
            "kinds": (0, 8),
            "prompt_length": (0, int(lengths.max()) + 2),
        }.get(column.name, (0, 2))
        values = rng.integers(least, most, size)
        if column.dtype == "float32":
            values = values + rng.random(size)
        columns[column.name] = np.where(values < 0, -100, values).astype(column.dtype)
    return rows


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
    folder: Path,
    split: str,
    rows: Rows,
    vocabulary_size: int,
    num_shards: int,
    columns: tuple[Column, ...] = (),
) -> SplitInfo:
    """Write rows as shards of about equal numbers of rows."""
    shards = []
    for number, part in enumerate(np.array_split(np.arange(len(rows)), num_shards)):
        if len(part):
            name = f"{split}/{number:05d}.arrow"
            with ShardWriter(folder, name, vocabulary_size, columns) as writer:
                writer.append(rows.slice(int(part[0]), int(part[-1]) + 1))
            assert writer.info is not None
            shards.append(writer.info)
    histogram = tuple(length_histogram(rows.lengths).tolist())
    return SplitInfo(shards=tuple(shards), length_histogram=histogram)


def write_rows(
    folder: Path,
    splits: dict[str, Rows],
    vocabulary_size: int,
    num_shards: int = 1,
    *,
    task: Task = "lm",
    columns: tuple[Column, ...] | None = None,
    label_names: tuple[str, ...] = (),
    tokenizer: bytes = b"",
) -> Path:
    """Write a whole data set: shards, side files, manifest; `columns` are the task's by default."""
    columns = task_columns(task) if columns is None else columns
    infos = {
        split: write_split(folder, split, rows, vocabulary_size, num_shards, columns)
        for split, rows in splits.items()
    }
    folder.mkdir(exist_ok=True)
    count = sum(len(rows) for rows in splits.values())
    ledger = {"read": count, "written": count, "empty": 0, "rejected": 0}
    source = json.dumps({"path": "corpus.txt", "bytes": 0} | ledger).encode()
    for name, content in (("sources", source), ("empty", b""), ("tokenizer", tokenizer)):
        (folder / name).write_bytes(content)
    sources, empty, made_by = (
        FileInfo(file=name, bytes=(folder / name).stat().st_size, xxh3=file_xxh3(folder / name))
        for name in ("sources", "empty", "tokenizer")
    )
    Manifest(
        format_version=1,
        task=task,
        columns=columns,
        label_names=label_names,
        tokenizer=TokenizerInfo(
            file=made_by.file,
            bytes=made_by.bytes,
            xxh3=made_by.xxh3,
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
        ledger=RecordCounts(files=1, bytes=0, **ledger),
        sources=sources,
        rejects=empty,
    ).write(folder)
    return folder


class MemoryReader(WindowReader):
    """Stands in for a WindowReader: record batches from memory."""

    def __init__(self, batches: Sequence[Rows]) -> None:
        self._batches = batches
        self._ends = np.cumsum([len(rows) for rows in batches])

    def read(self, batches: np.ndarray, ahead: Ahead | None = None) -> Window:
        """The rows of some record batches, counted over all sources."""
        chosen = batches.tolist()
        numbers = [
            np.arange(end - len(self._batches[n]), end)
            for n, end in zip(chosen, self._ends[chosen], strict=True)
        ]
        return Window(Rows.concatenate([self._batches[n] for n in chosen]), np.concatenate(numbers))

    def name_of_row(self, number: int) -> str:
        """All rows are of one source."""
        return f"row {number}"


def order_of_one(num_batches: int, num_windows: int, *, seed: int, shuffle: bool) -> Schedule:
    """The order of a single source of one token a record batch."""
    sources = (Source(num_batches, num_batches),)
    epoch = Stretch.of_epoch(sources, [Fraction(1)], 1, "continue")
    epoch = replace(
        epoch, num_windows=num_windows, window_tokens=Fraction(num_batches, num_windows)
    )
    return Schedule(sources, (replace(epoch, per_reading=num_windows),), seed, shuffle)


def plan_in_memory(
    batches: Sequence[Rows],
    batching: Batching,
    *,
    micro_batches_per_step: int = 1,
    num_windows: int = 1,
    seed: int = 0,
    shuffle: bool = True,
) -> tuple[Plan, MemoryReader]:
    """The plan over record batches in memory, all of one source, and what reads them."""
    rows, tokens = (sum(map(len, part)) for part in (batches, [b.ids for b in batches]))
    order = order_of_one(len(batches), num_windows, seed=seed, shuffle=shuffle)
    plan = Plan(
        data=("memory",),
        weights=(1.0,),
        row_ends=(rows,),
        epoch_tokens=(tokens,),
        split="train",
        batching=batching,
        micro_batches_per_step=micro_batches_per_step,
        order=order,
        stream=0,
        num_streams=1,
        window_tokens=max(1, tokens // num_windows),
        exhausted="continue",
    )
    return plan, MemoryReader(batches)


def spans_of(plan: WindowPlan) -> list[list[list[list[Span]]]]:
    """What a plan delivers, by step, micro-batch, sequence and piece."""
    ends = np.flatnonzero(np.diff(plan.cut.rows, append=-1)) + 1
    row_starts = plan.cut.offsets[np.append(0, ends)]
    rows, offsets = plan.cut.rows.tolist(), plan.cut.offsets
    pieces = [
        (row, *(offsets[piece : piece + 2] - row_starts[row]).tolist())
        for piece, row in enumerate(rows)
    ]
    spans: list[Any] = [pieces[piece] for piece in plan.pieces.tolist()]
    sequences = plan.sequence_offsets
    for level in (
        np.arange(len(spans) + 1) if sequences is None else sequences,
        plan.batch_offsets,
        plan.step_offsets,
    ):
        spans = [spans[start:stop] for start, stop in pairwise(level.tolist())]
    return spans


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def lists_of(rows: Rows) -> list[list[int]]:
    """The ids of each row."""
    return [part.tolist() for part in np.split(rows.ids, np.cumsum(rows.lengths)[:-1])]


def rows_in(folder: Path, split: str = "train") -> list[list[int]]:
    """The ids of each row of a data set."""
    manifest = Manifest.read(folder)
    found = []
    for shard in manifest.split(split).shards:
        reader = ShardReader.open(folder, manifest, shard)
        for batch in range(shard.batches):
            found += lists_of(reader.read(batch)[0])
    return found


def corpus_rows(folder: Path) -> Counter[tuple[str, int, tuple[int, ...]]]:
    """Input file, record and ids of every row of a data set."""
    manifest = Manifest.read(folder)
    lines = (folder / manifest.sources.file).read_text().splitlines()
    names = [json.loads(line)["path"] for line in lines]
    found: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        reader = ShardReader.open(folder, manifest, shard)
        for rows in (reader.read(batch)[0] for batch in range(shard.batches)):
            ends = np.cumsum(rows.lengths).tolist()
            origins = zip(rows.per_row["origin_file"], rows.per_row["origin_record"], strict=True)
            for (start, stop), (file, record) in zip(pairwise([0, *ends]), origins, strict=True):
                ids = tuple(rows.ids[start:stop].tolist())
                found[names[int(file)], int(record), ids] += 1
    return found


DOCUMENTS = [f"document {index}: déjà vu 漢字 🎉\n" * (index + 1) for index in range(120)]


def sealed_manifest(content: dict[str, Any]) -> bytes:
    """A manifest.json with the checksum of its content."""
    content = {key: value for key, value in content.items() if key != CHECKSUM_KEY}
    checksum = xxhash.xxh3_64_hexdigest(canonical(content))
    return json.dumps(content | {CHECKSUM_KEY: checksum}).encode()


def byte_tokenizer(
    texts: list[str],
    *,
    end: str = "<|endoftext|>",
    special: Sequence[str] = (),
    vocabulary_size: int = 300,
) -> Tokenizer:
    """A byte-level BPE, whose first ids are `end` and `special`. A vocabulary of 256 ids or fewer
    lacks bytes that are not in the texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if vocabulary_size > 256 else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=alphabet,
        special_tokens=[end, *special],
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def make_documents(folder: Path) -> Path:
    """A data set of `DOCUMENTS` in several shards, both splits, with one reject."""
    byte_tokenizer(DOCUMENTS[:3]).save(str(folder / "tokenizer.json"))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (folder / "in.jsonl").write_text(lines + "{\n")
    options = ("--tokenizer", folder, "--shard-size", "40KB", "--validation", 0.2)
    run(folder / "in.jsonl", folder / "out", *options)
    return folder / "out"


BATCH_TOKENS = 65_536
TOKENS = 120_000_000


def rows_of(mean: float, spread: float) -> np.ndarray:
    middle = np.log(mean) - spread**2 / 2
    count = int(TOKENS / mean)
    lengths = np.random.default_rng(0).lognormal(middle, spread, count)
    return np.clip(lengths, 1, 16_384).astype(np.int64)


def source_of(lengths: np.ndarray) -> Any:
    batches = int(lengths.sum()) // BATCH_TOKENS
    shard = ShardInfo(
        file="train/00000.arrow",
        bytes=1,
        xxh3="0" * 16,
        rows=len(lengths),
        tokens=int(lengths.sum()),
        batches=batches,
        longest_row=int(lengths.max()),
    )
    split = SplitInfo(shards=(shard,), length_histogram=tuple(length_histogram(lengths).tolist()))
    return SimpleNamespace(
        name="memory",
        split=split,
        rows=split.rows,
        tokens=split.tokens,
        batches=batches,
    )
