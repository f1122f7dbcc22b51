"""Tasks: what each makes of records. Fields in, rows with their columns out, a batch at a time.

    lm        a text                      -> ids
    classify  a text, or two, and a label -> ids, label
    tag       words and their tags        -> ids, a label a token
    complete  a prompt and a completion   -> ids, prompt_length

A record whose texts give no token at all becomes an empty row, which is counted and not written.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from tokenfeed.pipeline.format.ragged import Ragged, join
from tokenfeed.pipeline.format.schema import (
    IGNORED,
    INPUT_IDS,
    LABEL,
    LABELS,
    PROMPT_LENGTH,
    TOKEN_TYPE_IDS,
    Column,
    task_columns,
)
from tokenfeed.pipeline.format.schema import Task as TaskName
from tokenfeed.tools.corpus.records import Fields, Kind
from tokenfeed.tools.encoding.labels import Labels
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

__all__ = [
    "ENDING_TASKS",
    "Classify",
    "Complete",
    "Encode",
    "Labelled",
    "Lm",
    "Samples",
    "Tag",
    "Task",
]

ENDING_TASKS: tuple[TaskName, ...] = ("lm", "complete")
"""Tasks whose rows end with the end id: the others predict nothing that follows."""

FieldValues = dict[str, list[Any]]


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
    """Which rows have a token of their own, beside the frame, shape (R,), bool."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What a task reads and writes. A subclass says which fields; `add_special_tokens` and the end
    id decide what stands around its texts."""

    add_special_tokens: bool = False

    @property
    @abstractmethod
    def name(self) -> TaskName:
        """As `--task` has it."""

    @property
    @abstractmethod
    def fields(self) -> Fields:
        """The fields it needs of each record."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns it adds to the ids."""
        return task_columns(self.name)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Its labels in the order of their numbers, if it has any."""
        return ()

    def frame(self, tokenizer: TextTokenizer) -> Template:
        """What stands around the texts of a row."""
        return Template.from_tokenizer(
            tokenizer,
            num_texts=1,
            special=self.add_special_tokens,
            end_id=tokenizer.end_id,
        )

    @abstractmethod
    def texts(self, values: FieldValues) -> list[bytes]:
        """A text for each record that tells it from others: to hash, and to compare engines by."""

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Records whose fields do not fit together, and why."""
        return {}

    @abstractmethod
    def encode(self, values: FieldValues, encode: Encode, frame: Template) -> Samples:
        """Turn R records into R rows."""


@dataclass(frozen=True, kw_only=True)
class Lm(Task):
    """Language modelling: a document is a row."""

    text_field: str

    @property
    def name(self) -> TaskName:
        """As `--task` has it."""
        return "lm"

    @property
    def fields(self) -> Fields:
        """The fields it needs of each record."""
        return {self.text_field: Kind.TEXT}

    def texts(self, values: FieldValues) -> list[bytes]:
        """The documents."""
        return values[self.text_field]

    def encode(self, values: FieldValues, encode: Encode, frame: Template) -> Samples:
        """Turn R records into R rows."""
        ids = encode(values[self.text_field])
        return Samples({INPUT_IDS: frame.around(ids)}, {}, ids.lengths > 0)


@dataclass(frozen=True, kw_only=True)
class Labelled(Task):
    """A task with labels, which are numbered in the data set as a whole."""

    label_field: str
    labels: Labels = field(default_factory=Labels)
    """Every label there is; known when the corpus has been read."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Its labels in the order of their numbers."""
        return self.labels.names

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Records that have a label without a number, once there are numbers: see `Labels`."""
        numbers = self.labels.numbers
        labels = values[self.label_field]
        of_records = (
            labels if self.fields[self.label_field] is Kind.LABELS else [*zip(labels, strict=True)]
        )
        if not numbers or numbers.keys() >= set(chain.from_iterable(of_records)):
            return {}
        unlike = "a whole number" if self.labels.are_numbers else "a label of the others"
        return {
            index: f"field `{self.label_field}` has {unknown[0][:40]!r}, expected {unlike}"
            for index, of_record in enumerate(of_records)
            if (unknown := [label for label in of_record if label not in numbers])
        }


@dataclass(frozen=True, kw_only=True)
class Classify(Labelled):
    """Classification of texts or of pairs of texts."""

    text_field: str
    pair_field: str | None = None

    @property
    def name(self) -> TaskName:
        """As `--task` has it."""
        return "classify"

    @property
    def fields(self) -> Fields:
        """The fields it needs of each record."""
        pair = {self.pair_field: Kind.TEXT} if self.pair_field else {}
        return {self.text_field: Kind.TEXT} | pair | {self.label_field: Kind.LABEL}

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns it adds to the ids."""
        return task_columns(self.name, pairs=self.pair_field is not None)

    def frame(self, tokenizer: TextTokenizer) -> Template:
        """What stands around the texts of a row: no end, for nothing is to follow."""
        return Template.from_tokenizer(
            tokenizer,
            num_texts=2 if self.pair_field else 1,
            special=self.add_special_tokens,
            end_id=None,
        )

    def texts(self, values: FieldValues) -> list[bytes]:
        """The texts, pairs joined."""
        if not self.pair_field:
            return values[self.text_field]
        pairs = zip(values[self.text_field], values[self.pair_field], strict=True)
        return list(map(b"\n".join, pairs))

    def encode(self, values: FieldValues, encode: Encode, frame: Template) -> Samples:
        """Turn R records into R rows."""
        names = (self.text_field, self.pair_field) if self.pair_field else (self.text_field,)
        texts = [encode(values[name]) for name in names]
        per_token = {INPUT_IDS: frame.around(*texts)}
        if self.pair_field:
            per_token[TOKEN_TYPE_IDS] = frame.types_around(*texts)
        numbers = map(self.labels.numbers.__getitem__, values[self.label_field])
        label = np.fromiter(numbers, np.int32, len(texts[0]))
        has_text = np.add.reduce([text.lengths for text in texts]) > 0
        return Samples(per_token, {LABEL: label}, has_text)


@dataclass(frozen=True, kw_only=True)
class Tag(Labelled):
    """Classification of words: the first token of a word has its tag, the others have none."""

    tokens_field: str

    @property
    def name(self) -> TaskName:
        """As `--task` has it."""
        return "tag"

    @property
    def fields(self) -> Fields:
        """The fields it needs of each record."""
        return {self.tokens_field: Kind.WORDS, self.label_field: Kind.LABELS}

    def frame(self, tokenizer: TextTokenizer) -> Template:
        """What stands around the words of a row: no end, for nothing is to follow."""
        frame = Template.from_tokenizer(
            tokenizer, num_texts=1, special=self.add_special_tokens, end_id=None
        )
        return replace(frame, before_word=tokenizer.before_word)

    def texts(self, values: FieldValues) -> list[bytes]:
        """The words, joined."""
        return list(map(b" ".join, values[self.tokens_field]))

    def unusable(self, values: FieldValues) -> dict[int, str]:
        """Records that have not as many tags as words, or a tag without a number."""
        pairs = zip(values[self.tokens_field], values[self.label_field], strict=True)
        return super().unusable(values) | {
            index: f"{len(words):,} word(s), but {len(tags):,} tag(s)"
            for index, (words, tags) in enumerate(pairs)
            if len(words) != len(tags)
        }

    def encode(self, values: FieldValues, encode: Encode, frame: Template) -> Samples:
        """Turn R records into R rows. A word without a token of its own loses its tag."""
        flat = chain.from_iterable(values[self.tokens_field])
        words = encode([word and frame.before_word + word for word in flat])
        tags = chain.from_iterable(values[self.label_field])
        numbers = np.fromiter(map(self.labels.numbers.__getitem__, tags), np.int16, len(words))
        has_tokens = words.lengths > 0
        labels = np.full(len(words.values), IGNORED, np.int16)
        labels[words.offsets[:-1][has_tokens]] = numbers[has_tokens]
        counts = np.fromiter(map(len, values[self.tokens_field]), np.int64)
        lengths = np.diff(words.offsets[np.append(0, np.cumsum(counts))])
        return Samples(
            {
                INPUT_IDS: frame.around(Ragged(words.values, lengths)),
                LABELS: frame.labels_around(Ragged(labels, lengths)),
            },
            {},
            lengths > 0,
        )


@dataclass(frozen=True, kw_only=True)
class Complete(Task):
    """Completion: the model is to learn what follows the prompt, and not the prompt."""

    prompt_field: str
    completion_field: str

    @property
    def name(self) -> TaskName:
        """As `--task` has it."""
        return "complete"

    @property
    def fields(self) -> Fields:
        """The fields it needs of each record."""
        return {self.prompt_field: Kind.TEXT, self.completion_field: Kind.TEXT}

    def texts(self, values: FieldValues) -> list[bytes]:
        """Prompts and completions, joined."""
        pairs = zip(values[self.prompt_field], values[self.completion_field], strict=True)
        return list(map(b"\n".join, pairs))

    def encode(self, values: FieldValues, encode: Encode, frame: Template) -> Samples:
        """Turn R records into R rows. They are encoded apart, so that no token spans both."""
        prompt = encode(values[self.prompt_field])
        completion = encode(values[self.completion_field])
        whole = join([prompt, completion])
        return Samples(
            {INPUT_IDS: frame.around(whole)},
            {PROMPT_LENGTH: (prompt.lengths + len(frame.ids[0])).astype(np.uint32)},
            completion.lengths > 0,
        )
