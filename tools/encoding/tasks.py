"""Tasks: fields of records in, rows with their columns out, a batch at a time.

    lm        a text                       -> ids
    classify  one or two texts and a label  -> ids, label
    score     one or two texts and a number -> ids, score
    tag       words and their tags         -> ids, a label a token
    complete  a prompt and a completion    -> ids, prompt_length
    chat      the messages of a conversation -> ids, a kind a token
    ids       token ids                      -> ids: a data set of the task lm; with a mask of
                                                chat, with a label of classify

A record whose texts have no tokens becomes an empty row, which is counted and not written.
"""

import functools
import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, ClassVar, Literal, Self

import msgspec
import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged, join
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.kinds import BEGINS, REJECTED, Kind
from tokenfeed.pipeline.format.schema import (
    ENDED_TASKS,
    IGNORED,
    INPUT_IDS,
    KINDS,
    LABEL,
    LABELS,
    PROMPT_LENGTH,
    SCORE,
    TOKEN_TYPE_IDS,
    Column,
    Task,
    task_columns,
    token_dtype,
)
from tokenfeed.tools.corpus.records import FieldKind, Fields, IdRows, Unusable
from tokenfeed.tools.encoding.chat import ChatTemplate
from tokenfeed.tools.encoding.chat_messages import (
    UNREAD_KEY,
    Conversation,
    asks,
    continued,
    is_learnt,
    read_messages,
)
from tokenfeed.tools.encoding.chat_parts import COUNTS, Rendered, TokensOfTexts
from tokenfeed.tools.encoding.chat_places import KnownText
from tokenfeed.tools.encoding.chat_renderer import UNLIKE_SPACE, to_json
from tokenfeed.tools.encoding.fim import FIM_ROWS, FillInMiddle
from tokenfeed.tools.encoding.labels import Labels
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, TokenPlaces

FieldValues = dict[str, Any]
"""The values of R records, by field: a list, or `IdRows`."""

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

_MEANINGFUL = {"chosen", "rejected", "label", "instruction", "history", "loss_mask", "labels"}
_MEANINGFUL |= {"attention_mask", "completion_mask", "assistant_masks", "weight", "messages"}
"""Usual names of fields that change what a record means."""
_OTHER_NAMES = {"kto_tag": "label", "functions": "tools"}
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

    A subclass has an attribute for each field of its task. The value is the user's name for the
    field, or None if the field is not read. The template and the end token stand around the texts.
    """

    name: ClassVar[Task]
    """The task of the data set."""
    option: ClassVar[str] = ""
    """The value of `--task`, if it is not `name`."""
    record: ClassVar[str]
    """A record of the task, described for the help of `--task`."""
    kinds: ClassVar[Fields]
    """The kind of each field of the task."""
    keeps: ClassVar[bool] = False
    """Whether records can have a value per token, so that `keep` is allowed."""
    has_texts: ClassVar[bool] = True
    """Whether `encode` calls an engine."""
    checks_in_encode: ClassVar[bool] = False
    """Whether `encode` itself finds the records that `unusable` would return."""
    add_special_tokens: bool = False
    keep: tuple[Column, ...] = ()
    """Columns of the user with a value per token, which are stored beside the ids."""

    @classmethod
    def variant(cls, fields: Collection[str]) -> type["TaskEncoder"]:
        """Return the class that reads the given fields, which are named as in the task."""
        return cls

    @property
    def fields(self) -> Fields:
        """The fields to read of each record, by the names of the user."""
        return {name: self.kinds[own] for own, name in self.named.items()}

    @property
    def named(self) -> dict[str, str]:
        """The user's name of each field of the task. Fields that are not read are left out."""
        names: dict[str, str | None] = {own: getattr(self, own, None) for own in self.kinds}
        return {own: name for own, name in names.items() if name is not None}

    def remedy(self, reason: str) -> str:
        """Return the option to give, if records are rejected for lack of a field."""
        found = re.match("no (?:field|column) `(.*)`; it has: (.*)", reason)
        if not found:
            return self._name_inside(reason)
        missing, present = found[1], {*found[2].split(", ")}
        if self.named.keys() <= present:  # another field was named
            return self._name_field(missing)
        for names, task in _TASKS_BY_FIELDS.items():
            if present.issuperset(names) and not self.kinds.keys() >= {*names}:
                return f" Records with `{'` and `'.join(names)}` need `--task {task}`."
        if present == {"text"} and "text" not in self.kinds:
            return " Records with `text` alone need `--task lm`."
        return self._name_field(missing)

    def warning_of(self, field: str) -> str:
        """Return what to do about a field that is not read; empty if the rows are whole without."""
        if not self.named.keys() & {"completion", "messages", "chosen", "input_ids"}:
            return ""
        if field == "input" and "completion" in self.named:
            prompt = self.named["prompt"]
            return f"give --field prompt='{{{prompt}}}\\n{{input}}' completion=NAME"
        own = _OTHER_NAMES.get(field, field)
        if own in self.kinds and not (own == "label" and "chosen" in self.named):
            return f"give --field {own}={field} beside the other fields"
        if own == "label" and "completion" in self.named:
            return "--task chat rejects records whose label is false"
        return (
            "prepare the records first if it changes their meaning" if field in _MEANINGFUL else ""
        )

    def _name_inside(self, reason: str) -> str:
        """Return the option that names a text inside an object or a list; empty without one."""
        found = re.match("(?:field|column) `(.*)` is (dict|list|struct|large_list)", reason)
        own = next((own for own, name in self.named.items() if found and name == found[1]), None)
        if not found or not own:
            return ""
        inside = "[0]" if "list" in found[2] else ".KEY"
        return f" Name the value inside: `--field {own}={found[1]}{inside}`."

    def _name_field(self, missing: str) -> str:
        """Return the option that names a missing field; empty if no option does."""
        names = [own for own, name in self.named.items() if name == missing]
        return f" Name the field: `--field {names[0]}=NAME`." if names else ""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that the task adds to the ids."""
        return (*task_columns(self.name), *self.keep)

    def with_tokenizer(self, json_bytes: bytes) -> Self:
        """Return the task with facts from tokenizer.json. Each worker calls this once."""
        return self

    @property
    def num_texts(self) -> int:
        """Number of texts in a row. The template may put special tokens between them."""
        return 1

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels in the order of their numbers; empty for a task without labels."""
        return ()

    def template(self, tokenizer: TextTokenizer) -> Template:
        """Return the special tokens around the texts of a row, with the end token if the task has
        one."""
        return Template.from_tokenizer(
            tokenizer,
            num_texts=self.num_texts,
            special=self.add_special_tokens,
            end_id=tokenizer.end_id if self.has_end else None,
        )

    @property
    def has_end(self) -> bool:
        """Whether the end token of the tokenizer ends each row."""
        return self.name in ENDED_TASKS and self.option != "ids"

    @abstractmethod
    def texts(self, values: FieldValues) -> list[bytes]:
        """Return a text for each record, to hash the record and to compare engines."""

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Records whose fields do not fit together, and why."""
        return {}

    def check_first(self, values: FieldValues) -> None:  # noqa: B027 - most have nothing to check
        """Check what only the first records of a run can show.

        Raises:
            TokenizerError: The rows would be wrong.
        """

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
        """The field of the task with the label or labels."""
        return next(
            own for own, kind in self.kinds.items() if kind in (FieldKind.LABEL, FieldKind.LABELS)
        )

    @property
    def label_field(self) -> str:
        """The user's name of this field."""
        return self.named[self.own_label_field]

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels, in the order of their numbers."""
        return self.labels.names

    def numbered(self, labels: list[str]) -> dict[str, np.ndarray]:
        """Return the column with the number of each record's label."""
        numbers = map(self.labels.numbers.__getitem__, labels)
        return {LABEL: np.fromiter(numbers, np.int32, len(labels))}

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Return records whose label has no number, once `Labels` has numbered the labels."""
        numbers, name = self.labels.numbers, self.label_field
        labels = values[name]
        of_records = (
            labels if self.fields[name] is FieldKind.LABELS else [*zip(labels, strict=True)]
        )
        if not numbers or numbers.keys() >= set(chain.from_iterable(of_records)):
            return {}
        unlike = "a whole number" if self.labels.are_numbers else "a label of the others"
        return {
            index: f"field `{name}` has {unknown[0][:40]!r}, expected {unlike}"
            for index, of_record in enumerate(of_records)
            if (unknown := [label for label in of_record if label not in numbers])
        }


_SHOWN = 20
"""Characters of a word in a message."""


@dataclass(frozen=True, kw_only=True)
class LmEncoder(TaskEncoder):
    """Language modelling: a document is a row."""

    name: ClassVar[Task] = "lm"
    record: ClassVar[str] = "a document"
    kinds: ClassVar[Fields] = {"text": FieldKind.TEXT}
    text: str = "text"
    fim: FillInMiddle | None = None
    """Cuts some documents in three; None: none."""

    def with_tokenizer(self, json_bytes: bytes) -> Self:
        """Return the task with the ids of the tokens to fill in the middle."""
        return replace(self, fim=self.fim.with_tokenizer(json_bytes)) if self.fim else self

    def template(self, tokenizer: TextTokenizer) -> Template:
        """Return the special tokens around the texts of a row. Check that the tokenizer has those
        of FIM."""
        self.with_tokenizer(tokenizer.json_bytes)
        return super().template(tokenizer)

    def texts(self, values: FieldValues) -> list[bytes]:
        """The documents."""
        texts: list[bytes] = values[self.text]
        return texts

    def encode(self, values: FieldValues, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows."""
        if self.fim is None:
            ids = encode(values[self.text])
            return Samples({INPUT_IDS: template.around(ids)}, {}, ids.lengths > 0)
        arranged = self.fim.arranged(values[self.text])
        ids, own = self.fim.joined(arranged, encode(arranged.texts))
        counts = {FIM_ROWS: np.array(arranged.is_cut, np.int64)}
        return Samples({INPUT_IDS: template.around(ids)}, {}, own > 0, counts=counts)


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
                if reason := _not_as_many(numbers, ids) or _not_of_type(numbers, column):
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


def _not_of_type(numbers: np.ndarray, column: Column) -> str:
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


@dataclass(frozen=True, kw_only=True)
class _OfTexts(TaskEncoder):
    """A task whose rows are texts or pairs of texts, each with a value."""

    text: str = "text"
    pair: str | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that the task adds to the ids."""
        return task_columns(self.name, pairs=self.pair is not None)

    @property
    def num_texts(self) -> int:
        """Number of texts in a row. The template may put special tokens between them."""
        return 2 if self.pair else 1

    def texts(self, values: FieldValues) -> list[bytes]:
        """The texts, pairs joined."""
        texts: list[bytes] = values[self.text]
        if not self.pair:
            return texts
        return list(map(b"\n".join, zip(texts, values[self.pair], strict=True)))

    def encode(self, values: FieldValues, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows."""
        names = (self.text, self.pair) if self.pair else (self.text,)
        texts = [encode(values[name]) for name in names]
        per_token = {INPUT_IDS: template.around(*texts)}
        if self.pair:
            per_token[TOKEN_TYPE_IDS] = template.types_around(*texts)
        has_text = np.add.reduce([text.lengths for text in texts]) > 0
        return Samples(per_token, self.per_row(values), has_text)

    @abstractmethod
    def per_row(self, values: FieldValues) -> dict[str, np.ndarray]:
        """The value of each record."""


@dataclass(frozen=True, kw_only=True)
class ClassifyEncoder(_OfTexts, Labelled):
    """Classification of texts or of pairs of texts."""

    name: ClassVar[Task] = "classify"
    record: ClassVar[str] = "one or two texts and a class"
    kinds: ClassVar[Fields] = {
        "text": FieldKind.TEXT,
        "pair": FieldKind.TEXT,
        "label": FieldKind.LABEL,
    }
    label: str = "label"

    def per_row(self, values: FieldValues) -> dict[str, np.ndarray]:
        """The number of each record's label."""
        return self.numbered(values[self.label])


@dataclass(frozen=True, kw_only=True)
class ScoreEncoder(_OfTexts):
    """Regression of texts or of pairs of texts."""

    name: ClassVar[Task] = "score"
    record: ClassVar[str] = "one or two texts and a number"
    kinds: ClassVar[Fields] = {
        "text": FieldKind.TEXT,
        "pair": FieldKind.TEXT,
        "score": FieldKind.NUMBER,
    }
    score: str = "score"

    def per_row(self, values: FieldValues) -> dict[str, np.ndarray]:
        """The number of each record."""
        return {SCORE: np.array(values[self.score], np.float32)}


@dataclass(frozen=True, kw_only=True)
class TagEncoder(Labelled):
    """Classification of words. The first token of a word has the tag of the word, the other tokens
    have no tag."""

    name: ClassVar[Task] = "tag"
    record: ClassVar[str] = "words and their tags"
    kinds: ClassVar[Fields] = {"tokens": FieldKind.WORDS, "tags": FieldKind.LABELS}
    tokens: str = "tokens"
    tags: str = "tags"

    def template(self, tokenizer: TextTokenizer) -> Template:
        """Return the special tokens around the words of a row, and the text before each word."""
        return replace(super().template(tokenizer), before_word=tokenizer.before_word)

    def texts(self, values: FieldValues) -> list[bytes]:
        """The words, joined."""
        return list(map(b" ".join, values[self.tokens]))

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Return records with more or fewer tags than words, or with a tag without a number."""
        pairs = zip(values[self.tokens], values[self.tags], strict=True)
        return super().unusable(values) | {
            index: f"{len(words):,} word(s), but {len(tags):,} tag(s)"
            for index, (words, tags) in enumerate(pairs)
            if len(words) != len(tags)
        }

    def encode(self, values: FieldValues, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows. A word without a token would lose its tag, and spans beside
        it would merge: such a record is unusable."""
        flat = chain.from_iterable(values[self.tokens])
        words = encode([word and template.before_word + word for word in flat])
        tags = chain.from_iterable(values[self.tags])
        numbers = np.fromiter(map(self.labels.numbers.__getitem__, tags), np.int16, len(words))
        has_tokens = words.lengths > 0
        labels = np.full(len(words.values), IGNORED, np.int16)
        labels[words.offsets[:-1][has_tokens]] = numbers[has_tokens]
        counts = np.fromiter(map(len, values[self.tokens]), np.int64)
        ends = np.cumsum(counts)
        lengths = np.diff(words.offsets[np.append(0, ends)])
        row = np.repeat(np.arange(len(counts)), counts)
        without = np.unique(row[~has_tokens & (lengths[row] > 0)])
        unusable = {
            r: _lost_tag(values[self.tokens][r], has_tokens[ends[r] - counts[r] : ends[r]])
            for r in without.tolist()
        }
        has_text = lengths > 0
        has_text[without] = False
        return Samples(
            {
                INPUT_IDS: template.around(Ragged(words.values, lengths)),
                LABELS: template.labels_around(Ragged(labels, lengths)),
            },
            {},
            has_text,
            unusable,
        )


def _lost_tag(words: list[bytes], has_tokens: np.ndarray) -> str:
    """Return why a record is unusable: its first word without a token has a tag that no token can
    carry."""
    place = int(np.argmin(has_tokens))
    return f"word {place + 1:,} ({words[place].decode()[:_SHOWN]!r}) has no token for its tag"


@dataclass(frozen=True, kw_only=True)
class CompleteEncoder(TaskEncoder):
    """Completion: the loss counts the completion, and not the prompt."""

    name: ClassVar[Task] = "complete"
    record: ClassVar[str] = (
        "a prompt (its separator included) and its completion, each encoded on its own"
    )
    kinds: ClassVar[Fields] = {"prompt": FieldKind.TEXT, "completion": FieldKind.TEXT}
    prompt: str = "prompt"
    completion: str = "completion"

    def texts(self, values: FieldValues) -> list[bytes]:
        """Prompts and completions, joined."""
        pairs = zip(values[self.prompt], values[self.completion], strict=True)
        return list(map(b"\n".join, pairs))

    def encode(self, values: FieldValues, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows. They are encoded apart, so that no token spans both."""
        prompt = encode(values[self.prompt])
        completion = encode(values[self.completion])
        whole = join([prompt, completion])
        return Samples(
            {INPUT_IDS: template.around(whole)},
            {PROMPT_LENGTH: (prompt.lengths + len(template.ids[0])).astype(np.uint32)},
            completion.lengths > 0,
        )


@dataclass(frozen=True, kw_only=True)
class ChatEncoder(TaskEncoder):
    """Conversations, rendered as texts by a template. Each token gets a kind."""

    name: ClassVar[Task] = "chat"
    record: ClassVar[str] = (
        "a conversation: messages, or a prompt and its completion, or a chosen and a rejected one"
    )
    kinds: ClassVar[Fields] = {
        "messages": FieldKind.JSON,
        "prompt": FieldKind.JSON,
        "completion": FieldKind.JSON,
        "chosen": FieldKind.JSON,
        "rejected": FieldKind.JSON,
        "tools": FieldKind.OPTIONAL_JSON,
        "template_arguments": FieldKind.OPTIONAL_JSON,
        "system": FieldKind.OPTIONAL_JSON,
        "input": FieldKind.OPTIONAL_JSON,
        "label": FieldKind.OPTIONAL_JSON,
    }
    layouts: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        {"prompt": "messages", "chosen": "chosen", "rejected": "rejected"},
        {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"},
        {"chosen": "chosen", "rejected": "rejected"},
        {"messages": "messages"},
        {"messages": "conversations"},
        {"prompt": "prompt", "completion": "completion"},
        {"prompt": "instruction", "completion": "output", "input": "input"},
    )
    """Usual names of fields, the first choice first. Pairs are first: they may also have the
    conversation of the chosen answer."""
    extras: ClassVar[dict[str, Any]] = {
        "tools": "tools",
        "template_arguments": "chat_template_kwargs",
        "system": "system",
        "label": "label",
    }
    """Usual names of fields that a record of any layout may have."""
    keeps: ClassVar[bool] = True
    checks_in_encode: ClassVar[bool] = True
    messages: str | None = "messages"
    prompt: str | None = None
    completion: str | None = None
    chosen: str | None = None
    """What follows the prompt in the conversation that a model should prefer; None: no pairs."""
    rejected: str | None = None
    tools: str | None = None
    template_arguments: str | None = None
    system: str | None = None
    """A text that becomes the first message, unless the first message is one of the system."""
    input: str | None = None
    """A text that follows the prompt after a line break, if it is not empty."""
    label: str | None = None
    """False for an answer that a model should not give. Such a record is rejected."""
    chat_template: ChatTemplate | None = None
    """None until the tokenizer is known."""
    splits_special: bool = False
    """Whether special-token text in a message becomes its id. Otherwise the record is rejected."""
    places: TokenPlaces | None = None

    def __post_init__(self) -> None:
        if (self.chosen is None) != (self.rejected is None):
            raise ConfigError("`--field`: expected both chosen and rejected, or none of them.")
        if self.chosen is not None:
            if self.completion is not None:
                raise ConfigError("`--field`: expected completion, or chosen and rejected.")
        elif (self.prompt is None) != (self.completion is None):
            raise ConfigError("`--field`: expected both prompt and completion, or none of them.")
        if self.prompt is not None or self.chosen is not None:
            object.__setattr__(self, "messages", None)

    @classmethod
    def variant(cls, fields: Collection[str]) -> type[TaskEncoder]:
        """Return the class. Reject messages that no layout with the other fields reads."""
        others = [name for name in ("prompt", "completion", "chosen", "rejected") if name in fields]
        if "messages" in fields and others:
            raise ConfigError(
                f"`--field` messages and {others[0]}: expected messages alone, or prompt=NAME for "
                "what precedes the answers."
            )
        return cls

    @classmethod
    def usual_fields(cls) -> Fields:
        """Return the fields of all layouts. A record has some of them."""
        names = chain.from_iterable(layout.values() for layout in (*cls.layouts, cls.extras))
        return dict.fromkeys(names, FieldKind.OPTIONAL_JSON)

    def found(self, can_read: Callable[[Fields], bool]) -> Self:
        """Return the task with the names of the first layout that can be read.

        If no layout can be read, the task stays as it is.

        Args:
            can_read: Returns whether some of the first records of the corpus have some fields.
        """
        layouts = (replace(self, **layout) for layout in self.layouts)
        found = next((task for task in layouts if can_read(task.fields)), self)
        extras = {
            own: name for own, name in self.extras.items() if own != "label" or not found.chosen
        }
        return replace(found, **extras)

    def _name_field(self, missing: str) -> str:
        """Return the options that name the fields of a conversation."""
        return (
            " Name the fields: `--field messages=NAME`, `--field prompt=NAME completion=NAME` or "
            "`--field prompt=NAME chosen=NAME rejected=NAME`."
        )

    @property
    def _endings(self) -> tuple[str, ...]:
        """Fields that end the conversations of a record: one conversation, or a pair."""
        return ("completion",) if self.chosen is None else ("chosen", "rejected")

    def with_tokenizer(self, json_bytes: bytes) -> Self:
        """Return the task with the bytes of each token."""
        return replace(self, places=TokenPlaces(json_bytes))

    def texts(self, values: FieldValues) -> list[bytes]:
        """The records as JSON, without missing values; empty for a record that UTF-8 cannot
        express."""
        records = zip(*(values[name] for name in self.fields), strict=True)
        return [_json_of([value for value in record if value is not None]) for record in records]

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Return records that are not a conversation."""
        reasons = {}
        for row, text in enumerate(self.texts(values)):
            try:
                for ending in self._endings:
                    self._numbers(self._conversation(values, row, ending))
            except Unusable as reason:
                reasons[row] = str(reason)
            if not text:
                reasons.setdefault(row, _SURROGATE)
        return reasons

    def encode(self, values: FieldValues, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows. A pair is one row: the chosen conversation is first."""
        samples = [self._encoded(values, encode, ending) for ending in self._endings]
        if len(samples) == 1:
            return samples[0]
        chosen, rejected = samples
        nothing = np.zeros(len(chosen.has_text), np.int64)
        kinds = rejected.per_token[KINDS]
        rejected.per_token[KINDS] = Ragged(kinds.values | REJECTED, kinds.lengths)
        return Samples(
            {name: join([each.per_token[name] for each in samples]) for name in chosen.per_token},
            {},
            chosen.has_text & rejected.has_text,
            {row: f"rejected: {reason}" for row, reason in rejected.unusable.items()}
            | {row: f"chosen: {reason}" for row, reason in chosen.unusable.items()},
            {
                name: chosen.counts.get(name, nothing) + rejected.counts.get(name, nothing)
                for name in chosen.counts | rejected.counts
            },
        )

    def check_first(self, values: FieldValues) -> None:
        """Compare the texts of the first records with those of `transformers`, if it is installed.

        Raises:
            TokenizerError: A text differs.
        """
        assert self.chat_template
        for row in range(min(_COMPARED, len(next(iter(values.values()), [])))):
            for ending in self._endings:
                with suppress(Unusable, RecursionError):
                    conversation = self._conversation(values, row, ending)
                    self._check_special(conversation)
                    self.chat_template.compare(self.chat_template.with_texts(conversation)[0])

    def _encoded(self, values: FieldValues, encode: Encode, ending: str) -> Samples:
        """Turn R records into R conversations, which end with the given field."""
        assert self.chat_template, "the template is not known"
        assert self.places, "the tokenizer is not known"
        rendered: list[Rendered] = []
        numbers: list[dict[str, list[float]]] = []
        num_rows = len(next(iter(values.values())))
        of_rows = {"unread_arguments": np.zeros(num_rows, np.int64)}
        unusable: dict[int, str] = {}
        reads = functools.cache(self.chat_template.reads)
        known = KnownText()
        for row in range(num_rows):
            rendered.append(Rendered())
            numbers.append({})
            try:
                conversation = self._conversation(values, row, ending)
                self._check_special(conversation)
                of_messages = self._numbers(conversation)
                conversation, num_joined = self.chat_template.with_texts(conversation)
                made = self.chat_template.render(conversation, known)
                is_proved = not made.counts[COUNTS.index("unproved")]
                if not (is_proved or self.splits_special):
                    self._check_joined(conversation)
                if of_messages and not (is_proved and -1 not in made.owners):
                    raise Unusable("it is not certain which tokens belong to which message")
                rendered[-1], numbers[-1] = made, of_messages
                notes = _notes(self.chat_template, conversation, made)
                notes["unread_arguments"] = sum(not reads(name) for name in conversation.arguments)
                notes["joined_parts"] = num_joined
                given = self.label and values[self.label][row]
                notes["unread_labels"] = given is not None and not isinstance(given, bool)
                system = self.system and values[self.system][row]
                is_other = conversation.messages[0].get("content") != system
                notes["unread_systems"] = bool(system) and is_other
                for name, number in notes.items():
                    if number and (name in of_rows or len(of_rows) < _MOST_NOTES):
                        of_rows.setdefault(name, np.zeros(num_rows, np.int64))[row] = number
            except Unusable as reason:
                unusable[row] = str(reason)
            except RecursionError:
                unusable[row] = "is nested too deeply"
        texts = [each.text.encode() for each in rendered]
        ids = encode(texts)
        tokens = TokensOfTexts(rendered, b"".join(texts), *self.places.starts(texts, ids))
        kinds, counts = tokens.kinds(ids.lengths)
        if not self.splits_special:
            added = self.places.added
            names = (each for each in self.chat_template.special_tokens if each in added)
            special, unknown = {added[each]: each for each in names}, self.places.unknown
            found = tokens.overlapping(ids.values, special, unknown)
            for place, name in found.items():
                row = int(np.searchsorted(ids.offsets, place, "right")) - 1
                unusable.setdefault(row, _JOINED.format(name))
        says = sum(counts[f"{kind.label}_tokens"] for kind in Kind if kind >= Kind.TEXT) > 0
        for row in np.flatnonzero(~says & (ids.lengths > 0)).tolist():
            unusable.setdefault(row, _SILENT)
        counts |= of_rows
        has_text = ids.lengths > 0
        has_text[[*unusable]] = False
        per_token = {INPUT_IDS: ids, KINDS: Ragged(kinds, ids.lengths)}
        for column in self.keep:
            kept = tokens.numbers([each.get(column.name, []) for each in numbers])
            per_token[column.name] = Ragged(kept.astype(column.dtype), ids.lengths)
        return Samples(per_token, {}, has_text, unusable, counts)

    def _numbers(self, conversation: Conversation) -> dict[str, list[float]]:
        """Return the kept numbers of each message, by column. Only those of the assistant need one.

        Raises:
            Unusable: Names the message.
        """
        found: dict[str, list[float]] = {}
        for column in self.keep:
            numbers = found[column.name] = []
            for place, message in enumerate(conversation.messages, 1):
                missing = None if message["role"] == "assistant" else 0
                value = message.get(column.name, missing)
                if not isinstance(value, int | float) or not math.isfinite(value):
                    shown = "no number" if value is None else repr(value)[:_SHOWN]
                    raise Unusable(f"message {place} has {shown} in `{column.name}`")
                if reason := _not_of_type(np.array([value], np.float64), column):
                    raise Unusable(f"message {place}: `{column.name}` {reason}")
                numbers.append(float(value))
        return found

    def _conversation(self, values: FieldValues, row: int, ending: str) -> Conversation:
        """Return a record as a conversation.

        Raises:
            Unusable: Names the field and the message.
        """
        messages: list[Any] = []
        prompt_is_text = False
        for own, role in (("messages", None), ("prompt", "user"), (ending, "assistant")):
            if (name := getattr(self, own)) is None:
                continue
            value = values[name][row]
            is_text = isinstance(value, str)
            more_text = values[self.input][row] if own == "prompt" and self.input else None
            if more_text:
                if not (is_text and isinstance(more_text, str)):
                    raise Unusable(f"field `{name}` or `{self.input}` is not a text")
                value = f"{value}\n{more_text}" if value else more_text
            if role and is_text:
                value = [{"role": role, "content": value}]
            elif role and isinstance(value, dict):  # one message
                value = [value]
            elif role and not isinstance(value, list):
                shown = type(value).__name__
                raise Unusable(f"field `{name}` is {shown}, expected a text or a list of messages")
            try:
                more = read_messages(value)
                if is_text and role == "assistant" and not messages:
                    raise Unusable("is a text without a prompt, expected a list of messages")
                # What follows a prompt may be a whole conversation, which has the prompt.
                is_whole = prompt_is_text and more[0]["role"] != "assistant"
                if is_whole and not any(asks(messages[0]["content"], each) for each in more):
                    raise Unusable("begins with another message, but none is the prompt")
            except Unusable as reason:
                raise Unusable(f"field `{name}` {reason}") from None
            messages = more if is_whole or not messages else continued(messages, more)
            prompt_is_text = role == "user" and is_text
        if self.label is not None and values[self.label][row] is False:
            raise Unusable(f"field `{self.label}` is false: an answer that must not be learnt")
        system = None if self.system is None else values[self.system][row]
        if system is not None and not isinstance(system, str):
            raise Unusable(f"field `{self.system}` is {type(system).__name__}, expected a text")
        if system and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
        tools, arguments = (
            None if name is None else _parsed(values[name][row], name)
            for name in (self.tools, self.template_arguments)
        )
        if tools is not None and not isinstance(tools, list):
            raise Unusable(f"field `{self.tools}` is {type(tools).__name__}, expected a list")
        if arguments is not None and not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise Unusable(f"field `{self.template_arguments}` is {kind}, expected an object")
        return Conversation(messages, tools or None, arguments or {})

    def _check_special(self, conversation: Conversation) -> None:
        """Reject text of special tokens: the template writes such text for its own tokens.

        Raises:
            Unusable: Names the message.
        """
        messages, tools, arguments = (
            conversation.messages,
            conversation.tools,
            conversation.arguments,
        )
        if not self._problem((messages, tools, arguments)):
            return
        named = [(f"message {number}", message) for number, message in enumerate(messages, 1)]
        parts = [("the list of tools", tools), *named, ("a template argument", arguments)]
        for name, part in parts:
            if problem := self._problem(part):
                raise Unusable(f"{name} {problem}")

    def _check_joined(self, conversation: Conversation) -> None:
        """Reject contents that may form a special token together, if their places are unknown.

        Raises:
            Unusable: A content is a list of parts, or has a part of a special token at its
                beginning or end.
        """
        assert self.chat_template
        for number, message in enumerate(conversation.messages, 1):
            content = message.get("content") or ""
            if isinstance(content, list) or self.chat_template.has_half(content):
                raise Unusable(
                    f"message {number} may form a special token with other texts, because its "
                    "place in the rendered text is not certain; see --special-tokens-in-text"
                )

    def _problem(self, part: Any) -> str:
        """Return why a value of JSON cannot be rendered; empty if it can."""
        assert self.chat_template
        try:
            json_bytes = msgspec.json.encode(part)
        except UnicodeEncodeError:
            return _SURROGATE
        except RecursionError:
            return "is nested too deeply"
        if b"\\u001" in json_bytes and UNLIKE_SPACE.search(json_bytes.decode()):
            return "begins or ends a text with a control character (U+001C to U+001F)"
        if self.splits_special:
            return ""
        found = self.chat_template.special.search(json_bytes.decode())
        if found is None:
            return ""
        return f"has the text of the special token {found[0]!r}; see --special-tokens-in-text"


_SURROGATE = "has a lone surrogate: no UTF-8 can express it"
_JOINED = "has texts that form the special token {!r} together; see --special-tokens-in-text"
_SILENT = "has nothing to learn: the assistant says nothing, or only messages of weight 0"
_COMPARED = 100
"""Records that `transformers` renders too."""
_MOST_NOTES = 100
"""Different counts, most of them of keys of messages."""


def _notes(
    template: ChatTemplate, conversation: Conversation, rendered: Rendered
) -> dict[str, int]:
    """Count what a template does not write as users may expect."""
    notes: dict[str, int] = Counter()
    if conversation.tools and not template.reads_tools:
        notes["unread_tools"] = 1
    for message in conversation.messages:
        if len(message) == 2 and "content" in message:
            continue
        for key in template.unread_keys(message):
            notes[UNREAD_KEY + key[:_SHOWN]] += 1
        weight = message.get("weight", 1)
        notes["zero_weights"] += not is_learnt(message)
        notes["weights"] += is_learnt(message) and weight != 1
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else {}
            given = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(given, str) and given:
                notes["text_arguments"] += to_json(given) in rendered.text
    return notes


def _parsed(value: Any, name: str) -> Any:
    """A value that may be written as a text of JSON."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except (ValueError, RecursionError):
        raise Unusable(f"field `{name}` is a text that is not JSON") from None


def _json_of(record: list[Any]) -> bytes:
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return b""


TaskName = Literal["lm", "classify", "score", "tag", "complete", "chat", "ids"]
"""The values of `--task`."""

_CLASSES: tuple[type[TaskEncoder], ...] = (
    *(LmEncoder, ClassifyEncoder, ScoreEncoder, TagEncoder, CompleteEncoder, ChatEncoder),
    IdsEncoder,
)
TASK_CLASSES: dict[str, type[TaskEncoder]] = {task.option or task.name: task for task in _CLASSES}
"""The tasks by the value of `--task`."""
