"""What a task is: fields of records in, rows with their columns out, a batch at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from tokenfeed.pipeline.format.ragged import Ragged
from tokenfeed.pipeline.format.schema import ENDED_TASKS, Column, Task, task_columns
from tokenfeed.tools.corpus.kinds import Fields, Kind
from tokenfeed.tools.encoding.labels import Labels
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

__all__ = ["Encode", "FieldValues", "Labelled", "Samples", "TaskEncoder"]

FieldValues = dict[str, list[Any]]
"""The values of R records, by field."""

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


@dataclass(frozen=True, kw_only=True)
class TaskEncoder(ABC):
    """What a task reads and writes.

    A subclass has an attribute for each of its own fields: the name that records have for it, or
    None to read none. The template and the end token stand around the texts.
    """

    name: ClassVar[Task]
    """As `--task` has it."""
    record: ClassVar[str]
    """What a record is, as the help of `--task` has it."""
    kinds: ClassVar[Fields]
    """What its own fields must hold."""
    add_special_tokens: bool = False

    @property
    def fields(self) -> Fields:
        """The fields it reads of each record, by the names that records have for them."""
        return {name: self.kinds[own] for own, name in self.named.items()}

    @property
    def named(self) -> dict[str, str]:
        """The name that records have for each of its own fields; those not read are left out."""
        names: dict[str, str | None] = {own: getattr(self, own) for own in self.kinds}
        return {own: name for own, name in names.items() if name is not None}

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns it adds to the ids."""
        return task_columns(self.name)

    @property
    def num_texts(self) -> int:
        """Texts in a row, between which the template may stand."""
        return 1

    @property
    def label_names(self) -> tuple[str, ...]:
        """Its labels in the order of their numbers, if it has any."""
        return ()

    def template(self, tokenizer: TextTokenizer) -> Template:
        """What stands around the texts of a row; no end where nothing is to follow."""
        return Template.from_tokenizer(
            tokenizer,
            num_texts=self.num_texts,
            special=self.add_special_tokens,
            end_id=tokenizer.end_id if self.name in ENDED_TASKS else None,
        )

    @abstractmethod
    def texts(self, values: FieldValues) -> list[bytes]:
        """A text for each record that tells it from others: to hash, and to compare engines by."""

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Records whose fields do not fit together, and why."""
        return {}

    @abstractmethod
    def encode(self, values: FieldValues, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows."""


@dataclass(frozen=True, kw_only=True)
class Labelled(TaskEncoder):
    """A task with labels, which are numbered in the data set as a whole."""

    labels: Labels = field(default_factory=Labels)
    """Every label there is; known when the corpus has been read."""

    @property
    def own_label_field(self) -> str:
        """Which of its own fields holds the label or labels."""
        return next(own for own, kind in self.kinds.items() if kind in (Kind.LABEL, Kind.LABELS))

    @property
    def label_field(self) -> str:
        """The name that records have for it."""
        return self.named[self.own_label_field]

    @property
    def label_names(self) -> tuple[str, ...]:
        """Its labels in the order of their numbers."""
        return self.labels.names

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Records that have a label without a number, once there are numbers: see `Labels`."""
        numbers, name = self.labels.numbers, self.label_field
        labels = values[name]
        of_records = labels if self.fields[name] is Kind.LABELS else [*zip(labels, strict=True)]
        if not numbers or numbers.keys() >= set(chain.from_iterable(of_records)):
            return {}
        unlike = "a whole number" if self.labels.are_numbers else "a label of the others"
        return {
            index: f"field `{name}` has {unknown[0][:40]!r}, expected {unlike}"
            for index, of_record in enumerate(of_records)
            if (unknown := [label for label in of_record if label not in numbers])
        }
