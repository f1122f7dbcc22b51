"""Rows in memory, column by column, and their form as an Arrow record batch.

All arrays are flat: a column has one value per token, row after row, or one value per row. So no
Python code runs per row when rows are cut, joined and written. Torch-free.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.format.schema import INPUT_IDS

Kinds = dict[str, tuple[np.dtype, bool]]
"""The columns of a record batch, in order: dtype, and whether it has one value per token."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows: the input of `ShardWriter` and the output of `ShardReader`."""

    lengths: np.ndarray
    """Tokens of each row, shape (R,), int64, every value at least 1."""
    per_token: dict[str, np.ndarray]
    """Columns with one value per token, row after row, shape (N,) each, with `input_ids`."""
    per_row: dict[str, np.ndarray]
    """Columns with one value per row, shape (R,) each, with `origin_file` and `origin_record`."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def ids(self) -> np.ndarray:
        """All token ids, row after row, shape (N,), uint16 or uint32."""
        return self.per_token[INPUT_IDS]

    def slice(self, start: int, stop: int) -> "Rows":
        """Return rows `start` to `stop` - 1, without a copy."""
        first = int(self.lengths[:start].sum())
        last = first + int(self.lengths[start:stop].sum())
        return Rows(
            self.lengths[start:stop],
            {name: values[first:last] for name, values in self.per_token.items()},
            {name: values[start:stop] for name, values in self.per_row.items()},
        )

    def where(self, mask: np.ndarray) -> "Rows":
        """Return a copy of the rows that a mask selects, shape (R,), bool."""
        tokens = np.repeat(mask, self.lengths)
        return Rows(
            self.lengths[mask],
            {name: values[tokens] for name, values in self.per_token.items()},
            {name: values[mask] for name, values in self.per_row.items()},
        )

    @staticmethod
    def concatenate(parts: "list[Rows]") -> "Rows":
        """Concatenate parts. A single part is returned without a copy."""
        if len(parts) == 1:
            return parts[0]
        return Rows(
            np.concatenate([part.lengths for part in parts]),
            {
                name: np.concatenate([part.per_token[name] for part in parts])
                for name in parts[0].per_token
            },
            {
                name: np.concatenate([part.per_row[name] for part in parts])
                for name in parts[0].per_row
            },
        )


def record_batch(rows: Rows, schema: pa.Schema) -> tuple[pa.RecordBatch, dict[str, np.ndarray]]:
    """Return rows as an Arrow record batch of `schema`, without a copy if the dtypes agree.

    It is built from buffers, because `pa.array` imports pandas.

    Returns:
        The record batch, and its buffers as `batch_buffers` returns them.
    """
    assert len(rows.ids) < 1 << 31
    offsets = offsets_of(rows.lengths).astype(np.int32)
    columns, buffers = [], {"": offsets}
    for field in schema:
        is_list = pa.types.is_list(field.type)
        kind = field.type.value_type if is_list else field.type
        values = (rows.per_token if is_list else rows.per_row)[field.name]
        buffers[field.name] = np.ascontiguousarray(values, kind.to_pandas_dtype())
        column = _array(buffers[field.name], kind)
        if is_list:
            own = [None, pa.py_buffer(offsets)]
            column = pa.Array.from_buffers(field.type, len(rows), own, children=[column])
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema), buffers


def column_kinds(schema: pa.Schema) -> Kinds:
    """Return the column kinds of a schema, computed once because Arrow is slow at it."""
    return {
        field.name: (np.dtype(field.type.value_type.to_pandas_dtype()), True)
        if pa.types.is_list(field.type)
        else (np.dtype(field.type.to_pandas_dtype()), False)
        for field in schema
    }


def batch_buffers(batch: pa.RecordBatch, kinds: Kinds) -> dict[str, np.ndarray]:
    """Return the values of every column by name, in Arrow's memory; the row offsets come first, as
    "".

    It uses buffers, not Arrow values, because the batch may be damaged.

    Raises:
        ValueError: A buffer is too small for the rows, or the offsets do not match the tokens.
    """
    num_rows = batch.num_rows
    buffers: dict[str, np.ndarray] = {}
    for number, (name, (dtype, is_per_token)) in enumerate(kinds.items()):
        parts = batch.column(number).buffers()
        if not is_per_token:
            buffers[name] = np.frombuffer(parts[1], dtype, num_rows)
            continue
        offsets = np.frombuffer(parts[1], np.int32, num_rows + 1)
        if "" not in buffers:
            if offsets[0] != 0 or (offsets[1:] <= offsets[:-1]).any():
                raise ValueError("row offsets out of order")
            buffers[""] = offsets
        elif (buffers[""] != offsets).any():
            raise ValueError(f"`{name}` has other row offsets")
        buffers[name] = np.frombuffer(parts[3], dtype, int(offsets[-1]))
    return buffers


def rows_of_buffers(buffers: dict[str, np.ndarray], kinds: Kinds) -> Rows:
    """Return the rows of buffers from `batch_buffers`, without a copy."""
    offsets = buffers[""]
    lengths = np.subtract(offsets[1:], offsets[:-1], dtype=np.int64)
    per_token = {name: buffers[name] for name, (_, is_per_token) in kinds.items() if is_per_token}
    per_row = {name: buffers[name] for name in kinds if name not in per_token}
    return Rows(lengths, per_token, per_row)


def _array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
