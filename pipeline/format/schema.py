"""The columns of a shard for each task, and rows in memory, column by column.

Token ids have two bytes if the vocabulary fits, else four. That saves disk, page cache, shared
memory and transfer to the GPU. They are widened to int64 on the device. In memory all arrays are
flat: a column has one value per token, row after row, or one value per row. So no Python code runs
per row when rows are cut, joined and written. Torch-free.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import pyarrow as pa

from tokenfeed.pipeline.arithmetic import offsets_of, take
from tokenfeed.pipeline.errors import ConfigError

FORMAT_VERSION = 1

Task = Literal["lm", "classify", "score", "tag", "complete", "chat"]
Role = Literal["input", "target", "context"]
"""The use of a task's column in a batch.

    input    an input of the model
    target   the labels of a loss: one per token, or one per row
    context  which tokens are targets: the length of the prompt, or a kind per token
"""
Dtype = Literal["uint8", "int8", "int16", "uint16", "int32", "uint32", "uint64", "float32"]
"""dtypes on disk. A batch has integers as int64, and floats unchanged."""
ENDED_TASKS: tuple[Task, ...] = ("lm", "complete")
"""Tasks whose rows end with the tokenizer's end token, if it has one."""

INPUT_IDS = "input_ids"
TOKEN_TYPE_IDS = "token_type_ids"
"""The text of a pair that each token belongs to: 0 or 1, unless the tokenizer uses other ids."""
LABEL = "label"
"""The class of the row: an index of the manifest's label names."""
SCORE = "score"
"""The target of a regression for the row."""
LABELS = "labels"
"""The tag of each token: an index of the manifest's label names, or -100 for no tag."""
PROMPT_LENGTH = "prompt_length"
"""Number of tokens before the completion. Only the completion is a target."""
KINDS = "kinds"
"""Why each token of a conversation is there: see `kinds`. The loader chooses targets by it."""
ORIGIN_FILE = "origin_file"
"""The input file of a row: a line number of sources.jsonl, from 0."""
ORIGIN_RECORD = "origin_record"
"""The record in that file: a line or row number, from 0. 0 if a file is one document."""

IGNORED = -100
"""The label of tokens without a target, which torch's losses ignore by default. See `no_target`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column besides the ids, with one value per token or one per row."""

    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
    dtype: Dtype
    """numpy's name of the type."""
    per: Literal["token", "row"]


_ORIGIN = (
    Column(name=ORIGIN_FILE, dtype="uint32", per="row"),
    Column(name=ORIGIN_RECORD, dtype="uint64", per="row"),
)
_TYPES = Column(name=TOKEN_TYPE_IDS, dtype="uint8", per="token")
OF_TASK: dict[Task, tuple[Column, ...]] = {
    "lm": (),
    "classify": (Column(name=LABEL, dtype="int32", per="row"),),
    "score": (Column(name=SCORE, dtype="float32", per="row"),),
    "tag": (Column(name=LABELS, dtype="int16", per="token"),),
    "complete": (Column(name=PROMPT_LENGTH, dtype="uint32", per="row"),),
    "chat": (Column(name=KINDS, dtype="uint8", per="token"),),
}
ROLES: dict[str, Role] = {
    TOKEN_TYPE_IDS: "input",
    LABEL: "target",
    SCORE: "target",
    LABELS: "target",
    PROMPT_LENGTH: "context",
    KINDS: "context",
}
"""Role of each column that a task adds."""
RESERVED_NAMES = frozenset(
    {
        *(INPUT_IDS, *ROLES, ORIGIN_FILE, ORIGIN_RECORD),
        *("attention_mask", "position_ids", "seq_idx", "use_cache"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"),
        *("max_length_q", "max_length_k", "max_seqlen"),
        *("segments", "sequence_lengths", "sequence_offsets", "piece_lengths", "row_targets"),
        *("rows", "starts", "lengths", "ignored", "is_filler", "ends_step", "device"),
        *("num_tokens", "num_targets", "num_slots", "targets"),
        *("get", "items", "keys", "values", "to", "tensors", "pin_memory"),
        *("real_rows", "without_targets"),
    }
)
"""Names that a kept column cannot have, because shards or batches use them."""


def task_columns(task: Task, *, pairs: bool = False) -> tuple[Column, ...]:
    """Return the columns of a task besides the ids. `pairs`: rows of two texts, with token
    types."""
    return ((_TYPES,) if pairs else ()) + OF_TASK[task]


def role_of(column: str) -> Role | None:
    """Return the role of a column; None for the ids and for the origin."""
    return ROLES.get(column)


def is_kept(column: str) -> bool:
    """Return whether a column of tokens is one that `pretokenize --keep` copied."""
    return column != INPUT_IDS and column not in ROLES


def refuse_weights(columns: Iterable[Column], name: str) -> None:
    """Refuse data whose messages have weights, for a loss that does not multiply by them.

    Raises:
        ConfigError: A column is named `weight`.
    """
    if any(column.name == "weight" for column in columns):
        raise ConfigError(
            f"{name}: has the column `weight`, which this loss would ignore. Run `pretokenize` "
            "without `--keep weight` (messages of weight 0 are not learnt), or multiply by "
            "`batch['weight']` in a loop of your own."
        )


def column_of(columns: Iterable[Column], role: Role) -> Column | None:
    """Return the column of a role, or None. A task has at most one column of each role."""
    return next((column for column in columns if role_of(column.name) == role), None)


def is_labelled(task: Task) -> bool:
    """Return whether rows or tokens of a task have labels of their own, not the ids of tokens."""
    return column_of(OF_TASK[task], "target") is not None


def no_target(*, is_float: bool) -> float:
    """Return the value for tokens or rows without a target: -100 for integers, NaN for floats.

    -100.0 could be a valid float target. With NaN, a loss that does not mask it becomes NaN, which
    is noticed.
    """
    return math.nan if is_float else IGNORED


def is_target(values: np.ndarray) -> np.ndarray:
    """Return which values of a target column are targets, bool."""
    found: np.ndarray = ~np.isnan(values) if values.dtype.kind == "f" else values != IGNORED
    return found


def token_dtype(vocabulary_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the dtype of ids on disk: uint16 for at most 65,536 ids, else uint32."""
    return np.dtype(np.uint16) if vocabulary_size <= 1 << 16 else np.dtype(np.uint32)


@functools.cache
def shard_schema(vocabulary_size: int, columns: tuple[Column, ...] = ()) -> pa.Schema:
    """Return the Arrow schema of a shard: ids, `columns`, origin. No column is nullable."""
    width: Dtype = "uint16" if token_dtype(vocabulary_size) == np.uint16 else "uint32"
    ids = Column(name=INPUT_IDS, dtype=width, per="token")
    return pa.schema([_field(column) for column in (ids, *columns, *_ORIGIN)])


def _field(column: Column) -> pa.Field:
    kind = pa.from_numpy_dtype(np.dtype(column.dtype))
    if column.per == "token":
        kind = pa.list_(pa.field("item", kind, False))
    return pa.field(column.name, kind, nullable=False)


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
        """Return the rows that a mask selects, shape (R,), bool. Long runs of rows are copied at
        once."""
        if mask.all():
            return self
        offsets = offsets_of(self.lengths)
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))  # of runs
        if 4 * len(edges) > len(mask):
            rows = np.flatnonzero(mask)
            per_token = {name: take(v, offsets, rows) for name, v in self.per_token.items()}
        else:
            runs = [slice(*run) for run in offsets[edges].reshape(-1, 2).tolist()]
            per_token = {
                name: np.concatenate([values[:0], *(values[run] for run in runs)])
                for name, values in self.per_token.items()
            }
        per_row = {name: values[mask] for name, values in self.per_row.items()}
        return Rows(self.lengths[mask], per_token, per_row)

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
    """Return the column kinds of a schema."""
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
        ValueError: A buffer is too small for the rows, or columns have different offsets.
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
            buffers[""] = offsets
        elif (buffers[""] != offsets).any():
            raise ValueError(f"`{name}` has other row offsets")
        buffers[name] = np.frombuffer(parts[3], dtype, int(offsets[-1]))
    return buffers


def rows_of_buffers(buffers: dict[str, np.ndarray], kinds: Kinds) -> Rows:
    """Return the rows of buffers from `batch_buffers`, without a copy.

    Raises:
        ValueError: There is no row, a row is empty, or the offsets are out of order.
    """
    offsets = buffers[""]
    lengths = np.subtract(offsets[1:], offsets[:-1], dtype=np.int64)
    if offsets[0] != 0 or np.minimum.reduce(lengths) < 1:
        raise ValueError("row offsets out of order")
    rows = Rows(lengths, {}, {})
    for name, (_, is_per_token) in kinds.items():
        (rows.per_token if is_per_token else rows.per_row)[name] = buffers[name]
    return rows


def _array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
