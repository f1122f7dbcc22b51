"""`shards export OUT TO --to FORMAT`: the rows of a data set in a format of another project.

Each format is a function that reads a split, one verified record batch at a time, so memory stays
small. The files are written into a temporary folder, which gets its name when all are complete.
`parquet` keeps all columns, the other formats only the token ids and, but for `nanogpt` and
`llm.c`, the ends of rows.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format import schema
from tokenfeed.pipeline.format.kinds import REJECTED
from tokenfeed.pipeline.format.manifest import Manifest, read_checked
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
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Export the data set."""
        made = export_data_set(self.out, local_path(self.folder), self.to)
        if self.json:
            print_json(made)
            return 0
        rows = ", ".join(f"{count_of(n, 'row')} of {name}" for name, n in made["splits"].items())
        left = f" Without the columns {', '.join(made['left_out'])}." if made["left_out"] else ""
        print(f"{made['to']}: {rows}, {made['tokens']:,} tokens, as {self.to}.{left}")
        return 0


def export_data_set(path: str, folder: Path, to: Format) -> dict[str, Any]:
    """Write all splits of a data set in another format, into a new or empty folder. Return what
    `--json` prints: the rows of each split, the files, and the columns that the format cannot hold.

    Raises:
        ConfigError: The folder holds something, or the format cannot hold the rows.
        ShardFormatError: A shard is damaged. The folder is not made then.
    """
    store = open_store(path)
    manifest = Manifest.read(store)
    splits = {name: split for name, split in manifest.splits.items() if split.rows}
    if not splits:
        raise ConfigError(f"{store.name}: has no rows to export.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is not empty. Give a new or empty folder.")
    sizes = [info.bytes for split in splits.values() for info in split.shards]
    with atomic_folder(folder) as temporary, Bar(sizes) as bar:
        for name in splits:
            size = manifest.tokenizer.vocabulary_size
            FORMATS[to](_Split(store, manifest, name, size, to, bar), temporary / name)
    return {
        "to": str(folder),
        "format": to,
        "splits": {name: split.rows for name, split in splits.items()},
        "tokens": sum(split.tokens for split in splits.values()),
        "files": sorted(file.name for file in folder.iterdir()),
        "left_out": [] if to == "parquet" else [column.name for column in manifest.columns],
    }


class _Split(NamedTuple):
    """A split to export."""

    store: Store
    manifest: Manifest
    name: str
    vocabulary_size: int
    to: Format
    bar: Bar

    def rows(self, ids: BinaryIO | None = None, dtype: Any = None) -> Iterator[schema.Rows]:
        """Yield the rows, a record batch at a time, after their ids were written to a file, if one
        is given: as `dtype`, or as they are in shards."""
        for info in self.manifest.splits[self.name].shards:
            reader = ShardReader.open(self.store, self.manifest, info)
            for batch in range(info.batches):
                rows, _ = reader.read(batch)
                if self.to != "parquet" and schema.KINDS in rows.per_token:
                    self._refuse_pairs(rows.per_token[schema.KINDS])
                if ids:
                    ids.write(np.ascontiguousarray(rows.ids, dtype).data)
                yield rows
                self.bar.advance(Done(info.bytes * len(rows.ids) / info.tokens, len(rows.ids)))
            self.bar.count_unit()

    def _refuse_pairs(self, kinds: np.ndarray) -> None:
        """Refuse rows that hold a rejected conversation behind the chosen one: a model would learn
        both as one text."""
        if (kinds & REJECTED).any():
            raise ConfigError(
                f"{self.store.name}: its rows are pairs, and {self.to} would join the rejected "
                "answer to the chosen one. Use `--to parquet`, which keeps `kinds`, or pretokenize "
                "the chosen answers alone: --field prompt=NAME completion=NAME, or messages=NAME."
            )


def _megatron(split: _Split, path: Path) -> None:
    """Write `.bin` and `.idx` of `IndexedDataset`, index version 1: one document per row."""
    code, dtype = (4, np.int32) if split.vocabulary_size >= 65_500 else (8, np.uint16)
    with open(f"{path}.bin", "wb") as ids, open(f"{path}.idx", "wb") as index:
        sizes = np.concatenate([rows.lengths for rows in split.rows(ids, dtype)])
        starts = (np.cumsum(sizes, dtype=np.int64) - sizes) * np.dtype(dtype).itemsize
        index.write(b"MMIDIDX\0\0" + np.uint64(1).tobytes() + bytes([code]))
        index.write(np.array([len(sizes), len(sizes) + 1], np.uint64).data)
        for values in (sizes.astype(np.int32), starts, np.arange(len(sizes) + 1)):
            index.write(values.data)


def _nanogpt(split: _Split, path: Path) -> None:
    """Write `train.bin` and `val.bin`: uint16 ids, one row after the other."""
    if split.vocabulary_size > 1 << 16:
        raise ConfigError(
            f"{split.store.name}: nanoGPT reads ids of two bytes, and the tokenizer has "
            f"{split.vocabulary_size:,} ids. Use `--to llm.c` or `--to megatron`."
        )
    is_val = split.name == "validation" and "val" not in split.manifest.splits
    with open(f"{path.with_name('val') if is_val else path}.bin", "wb") as ids:
        deque(split.rows(ids), maxlen=0)


LLM_C_TOKENS = 100_000_000
"""Most ids in a file for llm.c."""


def _llm_c(split: _Split, path: Path) -> None:
    """Write `SPLIT_000001.bin` and so on, each with a header of 256 int32."""
    left, place = split.manifest.splits[split.name].tokens, 0
    header = np.zeros(256, np.int32)
    header[:2] = (20240520, 1) if split.vocabulary_size <= 1 << 16 else (20240801, 7)
    for rows in split.rows():
        ids = np.ascontiguousarray(rows.ids)
        for part in np.split(ids, range(-place % LLM_C_TOKENS, len(ids), LLM_C_TOKENS)):
            with open(f"{path}_{place // LLM_C_TOKENS + 1:06d}.bin", "ab") as file:
                if not file.tell():
                    header[2] = min(LLM_C_TOKENS, left)
                    file.write(header.data)
                file.write(part.data)
            left, place = left - len(part), place + len(part)


def _olmo(split: _Split, path: Path) -> None:
    """Write `.npy` without a header, and `.csv.gz` with start, end, row, source and record."""
    sources = read_checked(split.store, split.manifest.sources).splitlines()
    paths = (json.loads(line)["path"] for line in sources)
    names = pa.array([path.encode(errors="backslashreplace").decode() for path in paths])
    end = row = 0
    with open(f"{path}.npy", "wb") as ids, pa.output_stream(f"{path}.csv.gz") as table:
        for rows in split.rows(ids):
            ends = end + np.cumsum(rows.lengths)
            columns = {
                "start": ends - rows.lengths,
                "end": ends,
                "id": np.arange(row, row + len(rows)),
                "src": names.take(pa.array(rows.per_row[schema.ORIGIN_FILE])),
                "loc": rows.per_row[schema.ORIGIN_RECORD],
            }
            csv.write_csv(pa.table(columns), table, csv.WriteOptions(include_header=False))
            end, row = int(ends[-1]), row + len(rows)


def _parquet(split: _Split, path: Path) -> None:
    """Write one file with all columns."""
    columns = schema.shard_schema(split.vocabulary_size, split.manifest.columns)
    with parquet.ParquetWriter(f"{path}.parquet", columns, compression="zstd") as file:
        for rows in split.rows():
            file.write_batch(schema.record_batch(rows, columns)[0])


FORMATS: dict[Format, Callable[[_Split, Path], None]] = {
    "megatron": _megatron,
    "nanogpt": _nanogpt,
    "llm.c": _llm_c,
    "olmo": _olmo,
    "parquet": _parquet,
}
"""By the value of `--to`."""
