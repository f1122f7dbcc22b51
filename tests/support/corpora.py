"""What tests of corpora share: reading one in process, records and rejects by their numbers."""

import base64
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.corpus.input_files import MAX_RECORD_BYTES, InputFile
from tokenfeed.tools.corpus.records import FieldKind, listed
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units, read_records

Found = tuple[dict[int, Any], dict[int, str]]


def read(
    path: Path,
    kind: FieldKind = FieldKind.TEXT,
    shard_bytes: int = 10**9,
    max_record_bytes: int = MAX_RECORD_BYTES,
    field: str = "text",
) -> Found:
    """The values of a field, and the reasons for rejection, by record."""
    corpus = find_corpus(
        (str(path),), out=path.parent / "out", field=field, max_record_bytes=max_record_bytes
    )
    return read_sources(corpus.sources, kind, shard_bytes, field)


def read_sources(
    sources: list[InputFile], kind: FieldKind, shard_bytes: int = 10**9, field: str = "text"
) -> Found:
    good: dict[int, Any] = {}
    bad: dict[int, str] = {}
    for part in (part for unit in cut_units(sources, shard_bytes) for part in unit.parts):
        for records in read_records(part, {field: kind}):
            numbers = records.numbers.tolist()
            assert not {*numbers, *dict(records.rejects)} & (good.keys() | bad.keys())
            good |= zip(numbers, listed(records.fields[field]), strict=True)
            bad |= records.rejects
    return good, bad


def read_bytes(path: Path, data: bytes) -> Found:
    path.write_bytes(data)
    return read(path)


ODD_TEXTS = [
    "the quick brown fox jumps over the lazy dog " * 20,
    "def f(x):\n\treturn x  # naïve 🎉 漢字",
    "",
    "a forged end <|endoftext|> [SEP] </s> inside",
    " ",
    "one",
]

WORDS = [
    "the",
    "of",
    "tokens",
    "shard",
    "window",
    "step",
    "stall",
    "feed",
    "déjà",
    "漢字",
    "🎉",
    "def",
    "return",
]


def texts(num_documents: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 400))) for _ in range(num_documents)]


def messages_in(stderr: str) -> list[str]:
    """The lines of a command, without the one that names the texts beside the records of
    `corpus`."""
    return [line for line in stderr.splitlines() if "as text, beside files of records" not in line]


def write_ballast(folder: Path) -> None:
    """Make a corpus large enough for worker processes: one record more, without text."""
    record = {"text": "", "unused": "x" * 2_000_000}
    (folder / "zz-ballast.jsonl").write_text(json.dumps(record) + "\n")


def write_long_corpus(folder: Path, num_lines: int = 3000) -> None:
    """Work for some ten seconds, cut into many units."""
    line = json.dumps({"text": "tokens of the stall " * 500}) + "\n"
    (folder / "long.jsonl").write_text(line * num_lines)


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


class _Keys(pe.KmsClient):
    """Wraps a key by writing it differently."""

    def __init__(self, _: pe.KmsConnectionConfig) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, _: str) -> bytes:
        return base64.b64encode(key_bytes)


def write_encrypted(path: Path, table: pa.Table, column: str) -> None:
    """Write Parquet of which one column is encrypted, and the footer is not."""
    connection = pe.KmsConnectionConfig(custom_kms_conf={"key": "0123456789012345"})
    settings = pe.EncryptionConfiguration(
        "key", column_keys={"key": [column]}, plaintext_footer=True
    )
    factory = pe.CryptoFactory(_Keys)
    properties = factory.file_encryption_properties(connection, settings)
    pq.write_table(table, path, encryption_properties=properties)


def write_lines(path: Path, rows: list[str]) -> Path:
    """Write each text as a line of JSON."""
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_ledger(out: Path, rows: int) -> None:
    """Each source's records are written, empty or rejected, and there are `rows` in all."""
    sources = lines_of(out / "sources.jsonl")
    for source in sources:
        assert source["read"] == source["written"] + source["empty"] + source["rejected"]
    ledger = Manifest.read(out).ledger
    assert ledger.read == sum(source["read"] for source in sources) == rows
    assert ledger.rejected == len(lines_of(out / "rejects.jsonl"))


TEXTS = ["first", 'zwei\n"Zeilen"', "", "a,b\tc\r\n", "trois 🎉", *texts(40)]
"""Texts with quotes, separators, ends of lines and an emoji, an empty one, and 40 plain ones."""
