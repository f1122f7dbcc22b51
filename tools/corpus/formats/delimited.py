"""Read CSV and TSV: whole rows by Arrow, at its speed; the others are rejected.

Between commas a value may be quoted and hold newlines; a TSV knows no quoting.
"""

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

from tokenfeed.pipeline.arithmetic import binaries
from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.blocks import IS_UTF16, UTF16_MARKS, is_utf8
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.quoting import Lines, QuotedRows, whole_rows
from tokenfeed.tools.corpus.formats.tables import batch_records, column_problem
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.records import Fields, Records, Reject, rejected

__all__ = ["CSV", "TSV"]


def _read(part: FilePart, fields: Fields, delimiter: str) -> Iterator[Records]:
    blocks, consumed = part.blocks(), 0
    for records in _records(
        blocks,
        fields,
        name=part.source.name,
        delimiter=delimiter,
        most_bytes=part.source.max_record_bytes,
    ):
        yield replace(records, weight_bytes=part.weight_of(blocks.consumed_bytes - consumed))
        consumed = blocks.consumed_bytes


def _records(
    blocks: Iterable[bytes], fields: Fields, *, name: str, delimiter: str, most_bytes: int
) -> Iterator[Records]:
    """Read a file whose first line names its columns.

    Args:
        blocks: Its bytes.
        fields: The columns wanted.
        name: The file's, for an error.
        delimiter: Stands between values; only between commas are values quoted.
        most_bytes: A longer row is rejected.

    Raises:
        CorpusError: A field is to hold a list.
        ValueError: There is no header.
    """
    if any(kind.item for kind in fields.values()):
        raise CorpusError(
            f"{name}: `{'` and `'.join(fields)}` must hold lists, and CSV and TSV have none. Make "
            "it JSON Lines or Parquet, or leave it out by `--exclude`."
        )
    is_quoted = delimiter == ","
    parse = csv.ParseOptions(
        delimiter=delimiter,
        quote_char='"' if is_quoted else False,
        newlines_in_values=is_quoted,
    )
    rows = whole_rows(blocks, QuotedRows(delimiter) if is_quoted else Lines(), most_bytes)
    header = next(rows, None)
    if header is None:
        raise ValueError("Empty CSV or TSV: its first line must name the columns")
    if header.data.startswith(UTF16_MARKS):
        yield rejected(0, fields, IS_UTF16)
        return
    columns = csv.read_csv(pa.BufferReader(header.data), parse_options=parse).column_names
    schema = pa.schema([(column, pa.large_binary()) for column in columns])
    problem = header.reason or column_problem(schema, fields)
    if problem:
        yield rejected(0, fields, problem)
        return
    record = 0
    for data, reason, warning in rows:
        if reason:
            records = rejected(record, fields, reason)
        else:
            records = _parsed(data, fields, columns, parse, record)
        yield replace(records, warning=warning)
        record += len(records) + len(records.rejects)


def _parsed(
    data: bytes, fields: Fields, columns: list[str], parse: csv.ParseOptions, first: int
) -> Records:
    """The records of whole rows, the first of which is record `first`."""
    rejects: list[Reject] = []

    def reject(row: csv.InvalidRow) -> str:
        reason = f"has {row.actual_columns} values, expected {row.expected_columns}"
        rejects.append(Reject(first + row.number - 1, reason))
        return "skip"

    no_rows = Records(np.empty(0, np.uint64), {name: [] for name in fields}, rejects)
    if not data.strip(b"\r\n"):
        return no_rows
    is_readable = True
    try:
        table = _table(data, fields, columns, parse)
    except pa.ArrowInvalid:  # a row has too few or too many values, which is rare
        is_readable = is_utf8(data)
        data = data if is_readable else data.decode("latin-1").encode()
        rejecting = csv.ParseOptions(
            delimiter=parse.delimiter,
            quote_char=parse.quote_char,
            newlines_in_values=parse.newlines_in_values,
            invalid_row_handler=reject,
        )
        table = _table(data, fields, columns, rejecting)
    if not table.num_rows:
        return no_rows
    candidates = np.arange(first, first + table.num_rows + len(rejects), dtype=np.uint64)
    numbers = np.setdiff1d(candidates, np.array([reject.record for reject in rejects], np.uint64))
    (batch,) = table.to_batches()
    records = batch_records(batch if is_readable else _as_it_was(batch), fields, numbers)
    records.rejects.extend(rejects)
    return records


def _table(data: bytes, fields: Fields, columns: list[str], parse: csv.ParseOptions) -> pa.Table:
    if data.startswith(codecs.BOM_UTF8):  # belongs to the first value, and Arrow drops one
        data = codecs.BOM_UTF8 + data
    return csv.read_csv(
        pa.BufferReader(data),
        csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=columns),
        parse,
        csv.ConvertOptions(
            check_utf8=False,
            include_columns=list(fields),
            column_types={name: pa.large_binary() for name in fields},
        ),
    )


def _as_it_was(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Values of a block whose bytes were read as characters.

    Arrow decodes each row that it calls invalid, and gives up the block where it cannot.
    """
    columns = (
        [value.decode().encode("latin-1") for value in column.to_pylist()] for column in batch
    )
    return pa.RecordBatch.from_arrays([*map(binaries, columns)], batch.schema.names)


CSV = Format(
    name="csv", endings=(".csv",), read=partial(_read, delimiter=","), is_compressible=True
)
TSV = Format(
    name="tsv", endings=(".tsv",), read=partial(_read, delimiter="\t"), is_compressible=True
)
