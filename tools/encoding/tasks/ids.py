"""Token ids are copied: a data set of the task lm, or of chat with a mask, or of classify with a
label."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.kinds import BEGINS, Kind
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS, KINDS, Task, token_dtype
from tokenfeed.tools.corpus.records import FieldKind, Fields, IdRows
from tokenfeed.tools.encoding.tasks.base import (
    Encode,
    FieldValues,
    Labelled,
    Samples,
    TaskEncoder,
    not_of_type,
)
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class IdsEncoder(TaskEncoder):
    """Rows that are token ids already. They are copied, and compared with the vocabulary."""

    name: ClassVar[Task] = "lm"
    option: ClassVar[str] = "ids"
    record: ClassVar[str] = "token ids of a document, copied"
    kinds: ClassVar[Fields] = {
        "input_ids": FieldKind.IDS,
        "loss_mask": FieldKind.NUMBERS,
        "labels": FieldKind.NUMBERS,
        "label": FieldKind.LABEL,
        "attention_mask": FieldKind.NUMBERS,
    }
    """Also the fields of the subclasses."""
    keeps: ClassVar[bool] = True
    has_texts: ClassVar[bool] = False
    input_ids: str = "input_ids"
    attention_mask: str | None = None
    """0 for padding, which is left out; None: there is no padding."""
    vocabulary_size: int = 0
    """The largest id of the tokenizer + 1."""

    @classmethod
    def variant(cls, fields: Collection[str]) -> type[TaskEncoder]:
        """Return the class for ids alone, with a mask, or with a label."""
        given = [name for name in ("loss_mask", "labels", "label") if name in fields]
        if len(given) > 1:
            raise ConfigError(
                f"`--field` {given[0]} and {given[1]}: `--task ids` reads one of loss_mask, labels "
                "and label. Leave the others out."
            )
        if not given:
            return cls
        return ClassifiedIdsEncoder if given == ["label"] else MaskedIdsEncoder

    @property
    def fields(self) -> Fields:
        """The fields to read of each record, by the names of the user."""
        return super().fields | {column.name: FieldKind.NUMBERS for column in self.keep}

    def template(self, tokenizer: TextTokenizer) -> Template:
        """Return a template without tokens: rows are copied as they are."""
        return Template.from_tokenizer(tokenizer, num_texts=1, special=False, end_id=None)

    def _without_padding(self, values: FieldValues) -> FieldValues:
        """Return the values without those whose attention mask is 0."""
        if self.attention_mask is None:
            return values
        masks = [mask != 0 for mask in values[self.attention_mask]]

        def cut(column: list[Any]) -> list[Any]:
            pairs = zip(column, masks, strict=True)
            return [each[mask] if len(each) == len(mask) else each for each, mask in pairs]

        names = [name for name, kind in self.fields.items() if kind in _PER_ID]
        return values | {name: cut(values[name]) for name in names if name != self.attention_mask}

    def texts(self, values: FieldValues) -> list[bytes]:
        """Return the bytes of the ids, for hashes."""
        rows = IdRows.of(values[self.input_ids])
        joined: Any = rows.values.astype("<u4").view(np.uint8).data  # a buffer, not copied again
        edges = (4 * rows.offsets).tolist()
        return [joined[begin:end] for begin, end in pairwise(edges)]

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Return records whose kept columns do not fit to the ids or to the type."""
        reasons = super().unusable(values)
        for row, mask in enumerate(values[self.attention_mask] if self.attention_mask else ()):
            reason = _not_as_many(mask, values[self.input_ids][row]) or _not_padding(mask)
            if reason:
                reasons.setdefault(row, f"field `{self.attention_mask}` {reason}")
        for column in self.keep:
            of_records = zip(values[self.input_ids], values[column.name], strict=True)
            for row, (ids, numbers) in enumerate(of_records):
                if reason := _not_as_many(numbers, ids) or not_of_type(numbers, column):
                    reasons.setdefault(row, f"field `{column.name}` {reason}")
        return reasons

    def encode(self, values: FieldValues, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows."""
        values = self._without_padding(values)
        rows = IdRows.of(values[self.input_ids])
        ids, lengths, unusable = rows.values, np.diff(rows.offsets), dict[int, str]()
        if ids.max(initial=0) >= self.vocabulary_size:
            wrong = np.flatnonzero(ids >= self.vocabulary_size)
            row_of = np.searchsorted(rows.offsets, wrong, "right") - 1
            unusable = {
                int(row): f"field `{self.input_ids}` has the id {ids[place]:,}, but the tokenizer "
                f"has {self.vocabulary_size:,} ids"
                for row, place in zip(row_of[::-1], wrong[::-1], strict=True)
            }
            ids = np.where(ids < self.vocabulary_size, ids, 0)
        has_text = lengths > 0
        has_text[[*unusable]] = False
        per_token = {
            INPUT_IDS: Ragged(ids.astype(token_dtype(self.vocabulary_size), copy=False), lengths)
        }
        for column in self.keep:
            numbers = np.concatenate([np.empty(0), *values[column.name]])
            per_token[column.name] = Ragged(numbers.astype(column.dtype), lengths)
        return Samples(per_token, {}, has_text, unusable)


@dataclass(frozen=True, kw_only=True)
class MaskedIdsEncoder(IdsEncoder):
    """Token ids of which a loss counts some. The kind of these tokens is that of an answer."""

    name: ClassVar[Task] = "chat"
    loss_mask: str | None = None
    """0 or 1 for each id."""
    labels: str | None = None
    """The id itself, or -100, for each id."""

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Return records whose mask does not fit to the ids."""
        reasons = super().unusable(values)
        values = self._without_padding(values)
        name = self.loss_mask or self.labels
        assert name
        for row, (ids, given) in enumerate(zip(values[self.input_ids], values[name], strict=True)):
            if not (reason := _not_as_many(given, ids)):
                reason = _not_a_mask(given, None if self.loss_mask else ids)
            if reason:
                reasons.setdefault(row, f"field `{name}` {reason}")
        return reasons

    def encode(self, values: FieldValues, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows. Each run of targets begins a message."""
        samples = super().encode(values, encode, template)
        values = self._without_padding(values)
        ids = samples.per_token[INPUT_IDS]
        if self.loss_mask:
            mask = np.concatenate([np.empty(0), *values[self.loss_mask]]) == 1
        else:
            mask = np.concatenate([np.empty(0), *values[str(self.labels)]]) != IGNORED
        kinds = np.where(mask, np.uint8(Kind.TEXT), np.uint8(Kind.TEMPLATE))
        begins = mask.copy()
        begins[1:] &= ~mask[:-1]
        firsts = ids.offsets[:-1][ids.lengths > 0]
        begins[firsts] = mask[firsts]
        kinds[begins] |= BEGINS
        return replace(samples, per_token={**samples.per_token, KINDS: Ragged(kinds, ids.lengths)})


@dataclass(frozen=True, kw_only=True)
class ClassifiedIdsEncoder(IdsEncoder, Labelled):
    """Token ids of a text, and the class of the text."""

    name: ClassVar[Task] = "classify"
    kinds: ClassVar[Fields] = {
        "input_ids": FieldKind.IDS,
        "label": FieldKind.LABEL,
        "attention_mask": FieldKind.NUMBERS,
    }
    label: str = "label"

    def encode(self, values: FieldValues, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows."""
        samples = super().encode(values, encode, template)
        return replace(samples, per_row=self.numbered(values[self.label]))


def _not_as_many(numbers: np.ndarray, ids: np.ndarray) -> str:
    """Return why numbers do not belong to ids; empty if there are as many."""
    if len(numbers) == len(ids):
        return ""
    return f"has {len(numbers):,} number(s) for {len(ids):,} id(s)"


_PER_ID = (FieldKind.IDS, FieldKind.NUMBERS)
"""Kinds of fields with a value for each id."""


def _not_padding(mask: np.ndarray) -> str:
    """Return why numbers are not the attention mask of a padded row; empty if they are."""
    if not np.isin(mask, (0, 1)).all():
        return "has other numbers than 0 and 1"
    changes = np.count_nonzero(np.diff(mask, prepend=0, append=0))
    return "has 0 between ids, where no padding can be" if changes > 2 else ""


def _not_a_mask(numbers: np.ndarray, ids: np.ndarray | None) -> str:
    """Return why numbers are not a mask of 0 and 1, or not labels if `ids` are given.

    Empty if they are valid.
    """
    if ids is None:
        is_target, is_right, expected = numbers == 1, np.isin(numbers, (0, 1)), "0 or 1"
    else:
        is_target = numbers != IGNORED
        is_right, expected = ~is_target | (numbers == ids), "the id itself or -100"
    if not is_right.all():
        place = int(np.argmin(is_right))
        return f"has {numbers[place]:g} for token {place:,}, expected {expected}"
    return "" if is_target.any() or not len(numbers) else "has no target: nothing to learn"
