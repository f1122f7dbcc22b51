"""Tables of which tests then damage or cut short the files, or cannot read them."""

import base64
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe

__all__ = ["GROUP", "ROWS", "random_texts", "write_batches", "write_encrypted"]

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
