"""What the tasks have in common: fields of records in, rows with their columns out.

A task is a file of this room: the fields to read, the columns to write, the texts of a record, and
the rows from their ids. `registry` lists the tasks. A record whose texts have no tokens becomes an
empty row, which is counted and not written.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Self, cast

import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.format.schema import (
    ENDED_TASKS,
    INPUT_IDS,
    LABEL,
    TOKEN_TYPE_IDS,
    Column,
    Task,
    task_columns,
)
from tokenfeed.tools.corpus.records import FieldKind, Fields, Records
from tokenfeed.tools.encoding.labels import Labels
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

Values = dict[Any, Any]
"""The values of R records, by field of the task and by kept column: a list each, or `Ragged`."""

_TASKS_BY_FIELDS = {
    ("messages",): "chat",
    ("conversations",): "chat",
    ("prompt", "chosen", "rejected"): "chat",
    ("chosen", "rejected"): "chat",
    ("prompt", "completion"): "complete",
    ("instruction", "output"): "chat",
    ("tokens", "tags"): "tag",
    ("tokens", "ner_tags"): "tag --field tags=ner_tags",
    ("words", "tags"): "tag --field tokens=words",
    ("input_ids",): "ids",
    ("text", "label"): "classify",
    ("text", "score"): "score",
}
"""The value of `--task` for records with these fields, for hints."""

_MEANINGFUL = re.compile(
    "(chosen|rejected|labels?|instruction|history|messages|images?)|.*(mask|weight|loss).*"
)
"""Matches usual names of fields that change what a record means."""

OF_MESSAGES = {"messages", "prompt", "completion", "chosen", "rejected"}
"""Fields of conversations that cannot be named beside those of any other layout."""

_OTHER_NAMES = {
    "kto_tag": "label",
    "functions": "tools",
    **dict.fromkeys(("assistant_masks", "completion_mask"), "loss_mask"),
}
"""Usual names of fields that a task reads only if they are named, with the task's own names."""

Encode = Callable[[list[bytes]], Ragged]
"""Turns UTF-8 texts into ids; see `Engine.encode`."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Encoded records: rows that may still be empty."""

    per_token: dict[str, Ragged]
    """Ids and what is aligned to them."""
    per_row: dict[str, np.ndarray]
    """The task's values a row, shape (R,)."""
    has_text: np.ndarray
    """Which rows have a token of their own, beside the template, shape (R,), bool."""
    unusable: dict[int, str] = field(default_factory=dict)
    """Rows that cannot be written, and why; `has_text` is False for them."""
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    """What users should know of each row, by name, shape (R,), int64."""


@dataclass(frozen=True, kw_only=True)
class TaskEncoder(ABC):
    """The encoder of a task: from the fields of records to rows.

    A subclass declares the fields that it reads, and turns their values into texts and rows. The
    template and the end token stand around the texts.
    """

    option: ClassVar[str]
    """The value of `--task`."""
    record: ClassVar[str]
    """A record of the task, described for the help of `--task`."""
    kinds: ClassVar[Fields]
    """The kind of each field of the task."""
    optional: ClassVar[tuple[str, ...]] = ()
    """The fields that are read only if the user names them."""
    keeps: ClassVar[bool] = False
    """Whether records can have a value per token, so that `keep` is allowed."""
    has_texts: ClassVar[bool] = True
    """Whether `encode` calls an engine."""
    risk: ClassVar[str] = ""
    """What may have ended a process that encoded records, for the error."""
    checks_in_encode: ClassVar[bool] = False
    """Whether `encode` itself finds the records that `unusable` would return."""
    names: dict[str, str] = field(default_factory=dict)
    """The user's name of each field that is read, by the task's name. Fields that are not optional
    are added, each with the task's name for it."""
    labels: Labels = field(default_factory=Labels)
    """Every label of the data set, for a task with labels. Known when the corpus has been read."""
    add_special_tokens: bool = False
    keep: tuple[Column, ...] = ()
    """Columns of the user with a value per token, which are stored beside the ids."""

    def __post_init__(self) -> None:
        names = {own: own for own in self.kinds if own not in self.optional} | self.names
        ordered = {own: names[own] for own in self.kinds if own in names}
        object.__setattr__(self, "names", ordered)

    @property
    def name(self) -> Task:
        """The task of the data set."""
        return cast(Task, self.option)

    @property
    def fields(self) -> Fields:
        """The fields to read of each record, by the names of the user."""
        return {name: self.kinds[own] for own, name in self.names.items()}

    def values_of(self, records: Records) -> Values:
        """Return the values of records, read by `fields`, by the names of the task."""
        return {own: records.fields[name] for own, name in self.names.items()}

    def remedy(self, reason: str) -> str:
        """Return the option to give, if records are rejected for lack of a field."""
        found = re.match("no (?:field|column) `(.*)`; it has: (.*)", reason)
        if reason.startswith("not JSON: "):
            return " Each line needs one object: `jq -c . FILE` writes such lines."
        if not found:
            return self._name_inside(reason)
        missing, present = found[1], {*found[2].split(", ")}
        if self.names.keys() <= present:  # another field was named
            return self._name_field(missing)
        for names, task in _TASKS_BY_FIELDS.items():
            if present.issuperset(names) and not self.kinds.keys() >= {*names}:
                return f" Records with `{'` and `'.join(names)}` need `--task {task}`."
        if present == {"text"} and "text" not in self.kinds:
            return " Records with `text` alone need `--task lm`."
        return self._name_field(missing)

    def warning_of(self, field: str) -> str:
        """Return what to do about a field that is not read; empty if the rows are whole without."""
        if not self.names.keys() & {"completion", "messages", "chosen", "input_ids"}:
            return ""
        if field == "input" and "completion" in self.names:
            prompt = self.names["prompt"]
            return f"give --field prompt='{{{prompt}}}\\n{{input}}' completion=NAME"
        own = _OTHER_NAMES.get(field, field)
        is_label_of_pair = own == "label" and "chosen" in self.names
        if own in self.kinds and own not in OF_MESSAGES and not is_label_of_pair:
            return f"give --field {own}={field} beside the other fields"
        if own == "label" and "completion" in self.names:
            return "--task chat rejects records whose label is false"
        is_meaningful = _MEANINGFUL.fullmatch(field)
        return "prepare the records first if it changes their meaning" if is_meaningful else ""

    def _name_inside(self, reason: str) -> str:
        """Return the option that names a text inside an object or a list; empty without one."""
        found = re.match(r"(?:field|column) `(.*)` is (dict|struct|\w*list)", reason)
        own = next((own for own, name in self.names.items() if found and name == found[1]), None)
        if not found or not own:
            return ""
        inside = "[0]" if "list" in found[2] else ".KEY"
        return f" Name the value inside: `--field {own}={found[1]}{inside}`."

    def _name_field(self, missing: str) -> str:
        """Return the option that names a missing field; empty if no option does."""
        names = [own for own, name in self.names.items() if name == missing]
        return f" Name the field: `--field {names[0]}=NAME`." if names else ""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that the task adds to the ids."""
        return (*task_columns(self.name, pairs="pair" in self.names), *self.keep)

    def with_tokenizer(self, json_bytes: bytes) -> Self:
        """Return the task with facts from tokenizer.json. Each worker calls this once."""
        return self

    def template(self, tokenizer: TextTokenizer) -> Template:
        """Return the special tokens around the texts of a row, with the end token if the task has
        one."""
        return Template.from_tokenizer(
            tokenizer,
            num_texts=2 if "pair" in self.names else 1,
            special=self.add_special_tokens,
            end_id=tokenizer.end_id if self.has_end else None,
        )

    @property
    def has_end(self) -> bool:
        """Whether the end token of the tokenizer ends each row."""
        return self.name in ENDED_TASKS

    @property
    def label_field(self) -> str:
        """The field with the label or labels of a record; empty for a task without labels."""
        of_labels = (own for own in self.names if "LABEL" in self.kinds[own].name)
        return next(of_labels, "")

    def numbered(self, labels: list[str]) -> dict[str, np.ndarray]:
        """Return the column with the number of each record's label."""
        numbers = map(self.labels.numbers.__getitem__, labels)
        return {LABEL: np.fromiter(numbers, np.int32, len(labels))}

    def texts(self, values: Values) -> list[bytes]:
        """Return a text for each record, to hash the record and to compare engines."""
        texts: list[list[bytes]] = [
            values[own] for own in self.names if self.kinds[own] is FieldKind.TEXT
        ]
        return list(map(b"\n".join, zip(*texts, strict=True))) if texts[1:] else texts[0]

    def unusable(self, values: Values) -> dict[int, str]:
        """Return records whose fields do not fit together, and why. A label without a number does
        not fit, once the labels are numbered."""
        numbers, own = self.labels.numbers, self.label_field
        if not numbers:
            return {}
        is_one = self.kinds[own] is FieldKind.LABEL
        of_records = [*zip(values[own], strict=True)] if is_one else values[own]
        if numbers.keys() >= set(chain.from_iterable(of_records)):
            return {}
        unlike = "a whole number" if self.labels.are_numbers else "a label of the others"
        return {
            index: f"field `{self.names[own]}` has {unknown[0][:40]!r}, expected {unlike}"
            for index, of_record in enumerate(of_records)
            if (unknown := [label for label in of_record if label not in numbers])
        }

    def check_first(self, values: Values) -> None:  # noqa: B027 - most have nothing to check
        """Check what only the first records of a run can show.

        Raises:
            TokenizerError: The rows would be wrong.
        """

    @abstractmethod
    def encode(self, values: Values, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows."""


SHOWN = 20
"""Characters of a word in a message."""


def not_of_type(numbers: np.ndarray, column: Column) -> str:
    """Return why a column cannot store numbers of float64; empty if it can."""
    if column.dtype == "float32":
        most, expected = float(np.finfo(np.float32).max), "a number in the range of float32"
        wrong = numbers[np.abs(numbers) > most]
    else:
        info = np.iinfo(column.dtype)
        expected = f"{column.dtype}, a whole number from {info.min:,} to {info.max:,}"
        is_whole = numbers == np.floor(numbers)
        wrong = numbers[~is_whole | (numbers < info.min) | (numbers > info.max)]
    return f"has {wrong[0]:g}, expected {expected}" if len(wrong) else ""


class OfTexts(TaskEncoder):
    """A task whose rows are texts or pairs of texts, each with a value."""

    optional: ClassVar[tuple[str, ...]] = ("pair",)

    def encode(self, values: Values, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows."""
        texts = [encode(values[own]) for own in ("text", "pair") if own in values]
        per_token = {INPUT_IDS: template.around(*texts)}
        if "pair" in values:
            per_token[TOKEN_TYPE_IDS] = template.types_around(*texts)
        has_text = np.add.reduce([text.lengths for text in texts]) > 0
        return Samples(per_token, self.per_row(values), has_text)

    @abstractmethod
    def per_row(self, values: Values) -> dict[str, np.ndarray]:
        """Return the value of each record."""
