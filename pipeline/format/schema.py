"""The columns of a shard for each task, and the dtype of token ids on disk.

Token ids have two bytes if the vocabulary fits, else four. That saves disk, page cache, shared
memory and transfer to the GPU. They are widened to int64 on the device.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import pyarrow as pa

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


def column_of(columns: Iterable[Column], role: Role) -> Column | None:
    """Return the column of a role, or None. A task has at most one column of each role."""
    return next((column for column in columns if role_of(column.name) == role), None)


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
