"""What columns a shard has for each task, and how wide a token is on disk.

Tokens take two bytes while the vocabulary fits, else four: disk, page cache, inter-process copies
and the wire to the GPU all shrink with them. They are widened to int64 on the device, not before.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import pyarrow as pa

__all__ = [
    "ENDED_TASKS",
    "FORMAT_VERSION",
    "IGNORED",
    "INPUT_IDS",
    "LABEL",
    "LABELS",
    "ORIGIN_FILE",
    "ORIGIN_RECORD",
    "PROMPT_LENGTH",
    "SCORE",
    "TOKEN_TYPE_IDS",
    "Column",
    "Role",
    "Task",
    "column_of",
    "is_target",
    "no_target",
    "role_of",
    "shard_schema",
    "task_columns",
    "token_dtype",
]

FORMAT_VERSION = 1

Task = Literal["lm", "classify", "score", "tag", "complete"]
Role = Literal["input", "target", "context"]
"""What a batch makes of a task's column.

    input    goes to the model, as it is
    target   is what a loss compares with: a label a token, or one a row
    context  is how many of a row's first tokens are given, and no target
"""
Dtype = Literal["uint8", "int16", "uint16", "int32", "uint32", "uint64", "float32"]
"""A batch has whole numbers as int64, and floats as they are."""
ENDED_TASKS: tuple[Task, ...] = ("lm", "complete")
"""Their rows end in the tokenizer's end token, where it has one."""

INPUT_IDS = "input_ids"
TOKEN_TYPE_IDS = "token_type_ids"
"""Which text of a pair each token belongs to: 0 or 1, unless the tokenizer has it otherwise."""
LABEL = "label"
"""The class of the row: a place in the manifest's label names."""
SCORE = "score"
"""The number that a regression of the row is to give."""
LABELS = "labels"
"""The tag of each token: a place in the manifest's label names, or -100 where none is due."""
PROMPT_LENGTH = "prompt_length"
"""Tokens before the completion, which alone is to be learnt."""
ORIGIN_FILE = "origin_file"
"""Which input file a row came from: a line number, counted from 0, of sources.jsonl."""
ORIGIN_RECORD = "origin_record"
"""Which record of that file: line or row number, counted from 0; 0 where a file is one document."""

IGNORED = -100
"""The label of a token without one: what torch's losses ignore by default. See `no_target`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column beside the ids: a value a token, or a value a row."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-z_]+$")]
    dtype: Dtype
    """numpy's name of the type."""
    per: Literal["token", "row"]


_ORIGIN = (
    Column(name=ORIGIN_FILE, dtype="uint32", per="row"),
    Column(name=ORIGIN_RECORD, dtype="uint64", per="row"),
)
_TYPES = Column(name=TOKEN_TYPE_IDS, dtype="uint8", per="token")
_OF_TASK: dict[Task, tuple[Column, ...]] = {
    "lm": (),
    "classify": (Column(name=LABEL, dtype="int32", per="row"),),
    "score": (Column(name=SCORE, dtype="float32", per="row"),),
    "tag": (Column(name=LABELS, dtype="int16", per="token"),),
    "complete": (Column(name=PROMPT_LENGTH, dtype="uint32", per="row"),),
}
_ROLES: dict[str, Role] = {
    TOKEN_TYPE_IDS: "input",
    LABEL: "target",
    SCORE: "target",
    LABELS: "target",
    PROMPT_LENGTH: "context",
}
"""Of each column that a task adds; nothing but this table knows these columns by their names."""


def task_columns(task: Task, *, pairs: bool = False) -> tuple[Column, ...]:
    """The columns that a task adds to the ids; rows made of two texts say which token is whose."""
    return ((_TYPES,) if pairs else ()) + _OF_TASK[task]


def role_of(column: str) -> Role | None:
    """What a batch makes of a column; None for the ids and for a row's origin."""
    return _ROLES.get(column)


def column_of(columns: Iterable[Column], role: Role) -> Column | None:
    """The column of a role, of which a task adds at most one; None where there is none."""
    return next((column for column in columns if role_of(column.name) == role), None)


def no_target(*, is_float: bool) -> float:
    """What stands where no target is due: `IGNORED`, and NaN among floats, where -100 would pass
    for a target. A loss that forgets to leave it out is NaN, and not wrong without a sign."""
    return math.nan if is_float else IGNORED


def is_target(values: np.ndarray) -> np.ndarray:
    """Which values of a column of targets are due, bool."""
    found: np.ndarray = ~np.isnan(values) if values.dtype.kind == "f" else values != IGNORED
    return found


def token_dtype(vocabulary_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The dtype of ids on disk: uint16 up to 65,536 ids, else uint32."""
    return np.dtype(np.uint16) if vocabulary_size <= 1 << 16 else np.dtype(np.uint32)


@functools.cache
def shard_schema(vocabulary_size: int, columns: tuple[Column, ...] = ()) -> pa.Schema:
    """The Arrow schema of a shard: ids, `columns`, origin. Nothing is nullable."""
    width: Dtype = "uint16" if token_dtype(vocabulary_size) == np.uint16 else "uint32"
    ids = Column(name=INPUT_IDS, dtype=width, per="token")
    return pa.schema([_field(column) for column in (ids, *columns, *_ORIGIN)])


def _field(column: Column) -> pa.Field:
    kind = pa.from_numpy_dtype(np.dtype(column.dtype))
    if column.per == "token":
        kind = pa.list_(pa.field("item", kind, False))
    return pa.field(column.name, kind, nullable=False)
