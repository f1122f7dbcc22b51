"""Arrow files of many rows, which tests then damage or cut short."""

import os
from pathlib import Path

import pyarrow as pa

__all__ = ["GROUP", "ROWS", "random_texts", "write_batches"]

ROWS, GROUP = 30_000, 10_000


def random_texts(count: int = ROWS) -> list[str]:
    """Texts that hardly compress; each begins with its number."""
    return [f"{number:06} {os.urandom(20).hex()}" for number in range(count)]


def write_batches(path: Path, rows: list[str], compression: str | None) -> list[int]:
    """Where the record batches begin, each of `GROUP` rows."""
    table = pa.table({"text": rows})
    with open(path, "wb") as file:
        starts = []
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(file, table.schema, options=options) as writer:
            for batch in table.to_batches(max_chunksize=GROUP):
                starts.append(file.tell())
                writer.write_batch(batch)
    return starts
