"""`shards export OUT TO --to FORMAT`: the rows of a data set in a format of another project.

Each format is a class that receives the rows of a split in their order, one verified record batch
at a time, so memory stays small. The files are written into a temporary folder, which gets its name
when all are complete. `parquet` keeps all columns, the other formats only the token ids and, but
for `nanogpt` and `llm.c`, the ends of rows.
"""

import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest, read_checked
from tokenfeed.pipeline.format.schema import (
    ORIGIN_FILE,
    ORIGIN_RECORD,
    Rows,
    record_batch,
    shard_schema,
    token_dtype,
)
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.storage import atomic_folder
from tokenfeed.pipeline.format.store import Store, local_path, open_store
from tokenfeed.pipeline.text import count_of
from tokenfeed.tools.data_sets.cat import DataSet
from tokenfeed.tools.jobs.crew import Done
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

Format = Literal["megatron", "nanogpt", "llm.c", "olmo", "parquet"]


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """The result of an export."""

    to: str
    format: str
    splits: dict[str, int]
    """Rows by split."""
    tokens: int
    files: list[str]
    left_out: list[str]
    """Columns that the format cannot hold."""
    seconds: float

    def __str__(self) -> str:
        rows = ", ".join(f"{count_of(rows, 'row')} of {name}" for name, rows in self.splits.items())
        left = f" Without the columns {', '.join(self.left_out)}." if self.left_out else ""
        return f"{self.to}: {rows}, {self.tokens:,} tokens, as {self.format}.{left}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Write a data set in a format of another project: Megatron, nanoGPT, llm.c, OLMo or
    Parquet."""

    out: DataSet
    """Output folder of `pretokenize`, or an address."""
    folder: Annotated[str, text("TO")]
    """A new or empty folder."""
    to: Format = "parquet"
    """megatron: .bin and .idx; nanogpt: a .bin of ids alone; llm.c: a .bin with its header; olmo:
    .npy and .csv.gz; parquet: all columns."""
    split: Annotated[str, text("NAME")] | None = None
    """Split to export. Default: all."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Export the data set."""
        exported = export_data_set(self.out, local_path(self.folder), self.to, self.split)
        print_json(asdict(exported)) if self.json else print(exported)
        return 0


def export_data_set(path: str, folder: Path, to: Format, split: str | None = None) -> ExportSummary:
    """Write splits of a data set in another format.

    Args:
        path: The data set.
        folder: A new or empty folder.
        to: The format.
        split: The only split to write; None for all that have rows.

    Raises:
        ConfigError: The folder holds something, or the format cannot hold the rows.
        ShardFormatError: A shard is damaged. The folder is not made then.
    """
    started = time.perf_counter()
    store = open_store(path)
    manifest = Manifest.read(store)
    if split is not None:
        manifest.split(split)
    names = [name for name, info in manifest.splits.items() if info.rows and split in (None, name)]
    if not names:
        raise ConfigError(f"{store.name}: has no rows to export.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is not empty. Give a new or empty folder.")
    kind = FORMATS[to]
    shards = [(name, info) for name in names for info in manifest.splits[name].shards]
    sizes = [info.bytes for _, info in shards]
    with atomic_folder(folder) as temporary, ExitStack() as files, Bar(sizes) as bar:
        writers = {name: kind(temporary, name, store, manifest, files) for name in names}
        for name, info in shards:
            reader = ShardReader.open(store, manifest, info)
            for batch in range(info.batches):
                rows, _ = reader.read(batch)
                writers[name].append(rows)
                share = len(rows.ids) / info.tokens
                bar.advance(Done(info.bytes * share, len(rows.ids)))
            bar.count_unit()
        for writer in writers.values():
            writer.finish()
    return ExportSummary(
        to=str(folder),
        format=to,
        splits={name: manifest.splits[name].rows for name in names},
        tokens=sum(manifest.splits[name].tokens for name in names),
        files=sorted(file.name for file in folder.iterdir()),
        left_out=[] if kind.keeps_columns else [column.name for column in manifest.columns],
        seconds=round(time.perf_counter() - started, 3),
    )


class _Writer:
    """Writes a split. `files` closes its files."""

    keeps_columns: ClassVar[bool] = False
    """Whether labels and other columns are kept, not the ids alone."""

    def __init__(
        self, folder: Path, split: str, store: Store, manifest: Manifest, files: ExitStack
    ) -> None:
        self.folder, self.split, self.store, self.manifest = folder, split, store, manifest
        self.files = files
        self.vocabulary_size = manifest.tokenizer.vocabulary_size
        self.tokens = manifest.splits[split].tokens
        self.dtype: np.dtype[Any] = token_dtype(self.vocabulary_size)
        self.begin()

    def open(self, name: str) -> IO[bytes]:
        return self.files.enter_context((self.folder / name).open("wb"))

    def begin(self) -> None:
        """Open the files."""

    def append(self, rows: Rows) -> None:
        """Write rows, which follow those before."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write what needs all rows."""


class _Ids(_Writer):
    """Writes all ids to one file, and keeps the lengths of the rows."""

    ending: ClassVar[str]

    def begin(self) -> None:
        self.ids = self.open(f"{self.split}{self.ending}")
        self.parts: list[np.ndarray] = []

    def append(self, rows: Rows) -> None:
        self.ids.write(np.ascontiguousarray(rows.ids, self.dtype).data)
        self.parts.append(rows.lengths.astype(np.uint32))

    def row_lengths(self) -> np.ndarray:
        """Tokens of each row of the split, uint32."""
        return np.concatenate(self.parts)


class _Megatron(_Ids):
    """`.bin` and `.idx` of `IndexedDataset`, index version 1: one document per row."""

    ending = ".bin"

    def begin(self) -> None:
        if self.vocabulary_size >= 65_500:
            self.dtype = np.dtype(np.int32)
        super().begin()
        self.index = self.open(f"{self.split}.idx")

    def finish(self) -> None:
        lengths = self.row_lengths().astype(np.int32)
        pointers = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        pointers = np.concatenate([[0], pointers[:-1]]).astype(np.int64)
        dtype_code = 8 if self.dtype == np.uint16 else 4
        self.index.write(b"MMIDIDX\0\0" + np.uint64(1).tobytes() + bytes([dtype_code]))
        self.index.write(np.array([len(lengths), len(lengths) + 1], np.uint64).data)
        for values in (lengths, pointers, np.arange(len(lengths) + 1, dtype=np.int64)):
            self.index.write(values.data)


class _NanoGpt(_Ids):
    """`train.bin` and `val.bin`: uint16 ids, one row after the other."""

    ending = ".bin"

    def begin(self) -> None:
        if self.dtype != np.uint16:
            raise ConfigError(
                f"{self.store.name}: nanoGPT reads ids of two bytes, and the tokenizer has "
                f"{self.vocabulary_size:,} ids. Use `--to llm.c` or `--to megatron`."
            )
        if self.split == "validation" and "val" not in self.manifest.splits:
            self.split = "val"
        super().begin()


class _LlmC(_Writer):
    """`SPLIT_000001.bin` and so on: a header of 256 int32 and at most 100 M ids each."""

    FILE_TOKENS: ClassVar[int] = 100_000_000

    def begin(self) -> None:
        self.written = self.number = 0
        self.room = 0
        """Tokens that the present file can still take."""

    def append(self, rows: Rows) -> None:
        ids = np.ascontiguousarray(rows.ids, self.dtype)
        while len(ids):
            mode = "ab" if self.room else "xb"
            if not self.room:
                self.number += 1
                self.room = min(self.FILE_TOKENS, self.tokens - self.written)
            part, ids = ids[: self.room], ids[self.room :]
            with (self.folder / f"{self.split}_{self.number:06d}.bin").open(mode) as file:
                if mode == "xb":
                    file.write(self._header().data)
                file.write(part.data)
            self.written += len(part)
            self.room -= len(part)

    def _header(self) -> np.ndarray:
        header = np.zeros(256, np.int32)
        magic, version = (20240520, 1) if self.dtype == np.uint16 else (20240801, 7)
        header[:3] = magic, version, self.room
        return header


class _Olmo(_Ids):
    """`.npy` without a header, and a `.csv.gz` with start, end, row, source and record."""

    ending = ".npy"

    def begin(self) -> None:
        super().begin()
        sources = read_checked(self.store, self.manifest.sources).splitlines()
        paths = (json.loads(line)["path"] for line in sources)
        self.names = pa.array([path.encode(errors="backslashreplace").decode() for path in paths])
        sink = pa.CompressedOutputStream(self.folder / f"{self.split}.csv.gz", "gzip")
        self.sink = self.files.enter_context(sink)
        self.end = self.row = 0

    def append(self, rows: Rows) -> None:
        super().append(rows)
        ends = self.end + np.cumsum(rows.lengths)
        columns = {
            "start": ends - rows.lengths,
            "end": ends,
            "id": np.arange(self.row, self.row + len(rows)),
            "src": self.names.take(pa.array(rows.per_row[ORIGIN_FILE])),
            "loc": rows.per_row[ORIGIN_RECORD],
        }
        csv.write_csv(pa.table(columns), self.sink, csv.WriteOptions(include_header=False))
        self.end, self.row = int(ends[-1]), self.row + len(rows)


class _Parquet(_Writer):
    """One file for each split, with all columns."""

    keeps_columns = True

    def begin(self) -> None:
        self.schema = shard_schema(self.vocabulary_size, self.manifest.columns)
        file = parquet.ParquetWriter(
            self.folder / f"{self.split}.parquet", self.schema, compression="zstd"
        )
        self.file = self.files.enter_context(file)

    def append(self, rows: Rows) -> None:
        self.file.write_batch(record_batch(rows, self.schema)[0])


FORMATS: dict[Format, type[_Writer]] = {
    "megatron": _Megatron,
    "nanogpt": _NanoGpt,
    "llm.c": _LlmC,
    "olmo": _Olmo,
    "parquet": _Parquet,
}
"""By the value of `--to`."""
