"""Token ids are copied: a data set of the task lm, or of chat with a mask, or of classify with a
label."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.kinds import BEGINS, Kind
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS, KINDS, Column, Task, token_dtype
from tokenfeed.tools.corpus.records import FieldKind, Fields, Records, listed
from tokenfeed.tools.encoding.tasks.base import Encode, Samples, TaskEncoder, Values, not_of_type
from tokenfeed.tools.encoding.template import Template


@dataclass(frozen=True, kw_only=True)
class IdsEncoder(TaskEncoder):
    """Rows that are token ids already. They are copied, and compared with the vocabulary."""

    option = "ids"
    record = "token ids of a document, copied"
    kinds: ClassVar = {
        "input_ids": FieldKind.IDS,
        "loss_mask": FieldKind.NUMBERS,  # 0 or 1 for each id
        "labels": FieldKind.NUMBERS,  # the id itself, or -100, for each id
        "label": FieldKind.LABEL,
        "attention_mask": FieldKind.NUMBERS,  # 0 for padding, which is left out
    }
    optional = ("loss_mask", "labels", "label", "attention_mask")
    keeps = True
    has_texts = False
    vocabulary_size: int = 0
    """The largest id of the tokenizer + 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [own for own in ("loss_mask", "labels", "label") if own in self.names]
        if len(given) > 1:
            raise ConfigError(
                f"`--field` {given[0]} and {given[1]}: `--task ids` reads one of loss_mask, labels "
                "and label. Leave the others out."
            )

    @property
    def name(self) -> Task:
        """The task of the data set."""
        if self._mask:
            return "chat"  # what a loss counts has the kind of an answer
        return "classify" if "label" in self.names else "lm"

    @property
    def _mask(self) -> str:
        """The field with the tokens that a loss counts; empty without one."""
        return next((own for own in ("loss_mask", "labels") if own in self.names), "")

    @property
    def has_end(self) -> bool:
        """False: rows are copied as they are."""
        return False

    @property
    def fields(self) -> Fields:
        """The fields to read of each record, by the names of the user."""
        return super().fields | {column.name: FieldKind.NUMBERS for column in self.keep}

    def values_of(self, records: Records) -> Values:
        """Return the values of records, also those of kept columns."""
        kept = {column: records.fields[column.name] for column in self.keep}
        return {**super().values_of(records), **kept}

    def texts(self, values: Values) -> list[bytes]:
        """Return the bytes of the ids, for hashes."""
        rows = _ragged(values["input_ids"])
        joined: Any = rows.values.astype("<u4").view(np.uint8).data  # a buffer, not copied again
        edges = (4 * rows.offsets).tolist()
        return [joined[begin:end] for begin, end in pairwise(edges)]

    def unusable(self, values: Values) -> dict[int, str]:
        """Return records whose masks or kept columns do not fit to the ids or to their type."""
        reasons = super().unusable(values)

        def check(own: str | Column, problem: Callable[..., str]) -> None:
            name = own.name if isinstance(own, Column) else self.names[own]
            ids = listed(values["input_ids"])
            for row, (numbers, of_row) in enumerate(zip(values[own], ids, strict=True)):
                reason = ""
                if len(numbers) != len(of_row):
                    reason = f"has {len(numbers):,} number(s) for {len(of_row):,} id(s)"
                if reason := reason or problem(numbers, of_row):
                    reasons.setdefault(row, f"field `{name}` {reason}")

        if "attention_mask" in self.names:
            check("attention_mask", _not_padding)
        for column in self.keep:
            check(column, partial(_not_of_column, column))
        if self._mask:
            values = self._without_padding(values)
            check(self._mask, partial(_not_a_mask, self._mask))
        return reasons

    def _without_padding(self, values: Values) -> Values:
        """Return the values without those whose attention mask is 0."""
        if "attention_mask" not in self.names:
            return values
        masks = [mask != 0 for mask in values["attention_mask"]]

        def cut(rows: list[np.ndarray]) -> list[np.ndarray]:
            pairs = zip(rows, masks, strict=True)
            return [row[mask] if len(row) == len(mask) else row for row, mask in pairs]

        cuts = {own: cut(values[own]) for own in (self._mask, *self.keep) if own}
        return {**values, **cuts, "input_ids": cut(listed(values["input_ids"]))}

    def encode(self, values: Values, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows."""
        values = self._without_padding(values)
        rows, most, unusable = _ragged(values["input_ids"]), self.vocabulary_size, dict[int, str]()
        ids, lengths = rows.values, rows.lengths
        if ids.max(initial=0) >= most:
            wrong = np.flatnonzero(ids >= most)
            row_of = np.searchsorted(rows.offsets, wrong, "right") - 1
            unusable = {
                int(row): f"field `{self.names['input_ids']}` has the id {ids[place]:,}, but the "
                f"tokenizer has {most:,} ids"
                for row, place in zip(row_of[::-1], wrong[::-1], strict=True)
            }
            ids = np.where(ids < most, ids, 0)
        has_text = lengths > 0
        has_text[[*unusable]] = False
        made = Ragged(ids.astype(token_dtype(most), copy=False), lengths)
        per_token = {INPUT_IDS: made}
        if self._mask:
            per_token[KINDS] = self._kinds(values, made)
        for column in self.keep:
            numbers = _ragged(values[column]).values
            per_token[column.name] = Ragged(numbers.astype(column.dtype), lengths)
        per_row = self.numbered(values["label"]) if "label" in self.names else {}
        return Samples(per_token, per_row, has_text, unusable)

    def _kinds(self, values: Values, ids: Ragged) -> Ragged:
        """Return the kinds column for a mask. Each run of targets begins a message."""
        numbers = _ragged(values[self._mask]).values
        mask = numbers != IGNORED if self._mask == "labels" else numbers == 1
        kinds = np.where(mask, np.uint8(Kind.TEXT), np.uint8(Kind.TEMPLATE))
        begins = mask.copy()
        begins[1:] &= ~mask[:-1]
        firsts = ids.offsets[:-1][ids.lengths > 0]
        begins[firsts] = mask[firsts]
        kinds[begins] |= BEGINS
        return Ragged(kinds, ids.lengths)


def _ragged(rows: "Ragged | list[np.ndarray]") -> Ragged:
    """Return the values of a field with a list in each record."""
    if isinstance(rows, Ragged):
        return rows
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Ragged(np.concatenate(rows) if rows else np.empty(0, np.int64), lengths)


def _not_padding(mask: np.ndarray, ids: np.ndarray) -> str:
    """Return why numbers are not the attention mask of a padded row; empty if they are."""
    if not np.isin(mask, (0, 1)).all():
        return "has other numbers than 0 and 1"
    changes = np.count_nonzero(np.diff(mask, prepend=0, append=0))
    return "has 0 between ids, where no padding can be" if changes > 2 else ""


def _not_of_column(column: Column, numbers: np.ndarray, ids: np.ndarray) -> str:
    return not_of_type(numbers, column)


def _not_a_mask(own: str, numbers: np.ndarray, ids: np.ndarray) -> str:
    """Return why numbers are not a `loss_mask` of 0 and 1, or not `labels`; empty if they are."""
    is_target, is_right, expected = numbers == 1, np.isin(numbers, (0, 1)), "0 or 1"
    if own == "labels":
        is_target = numbers != IGNORED
        is_right, expected = ~is_target | (numbers == ids), "the id itself or -100"
    if not is_right.all():
        place = int(np.argmin(is_right))
        return f"has {numbers[place]:g} for token {place:,}, expected {expected}"
    return "" if is_target.any() or not len(numbers) else "has no target: nothing to learn"
