"""Number the labels of a corpus before any is written: units know nothing of each other.

Whole numbers stay what they are, with the class names stored in the files (ClassLabel) if there are
any; names are numbered in sorted order. Where both occur, what 99 in 100 labels are decides: with
whole numbers, a record that has another label is rejected; with names, a number is a name like
them; and where neither is so many, the run ends. Digits behind a zero, like 007, make names of all.

Each unit is read twice, by any process: the label field alone, to count, then all fields until each
label of the unit was seen in a usable record. A label without a usable record is no class.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.input_files import InputFile
from tokenfeed.tools.corpus.read_records import fetched_ahead, read_records
from tokenfeed.tools.corpus.records import FieldKind, Fields
from tokenfeed.tools.corpus.units import Unit

__all__ = ["CountLabels", "LabelCounts", "Labels", "find_labels"]

_WHOLE_NUMBER, _CODE = re.compile("0|[1-9][0-9]*"), re.compile("0[0-9]+")
_FEW = 100
"""One in so many labels may be unlike the others."""
_MOST_LABELS = 1 << 15
"""A tag is stored in 16 bits."""
_MORE_LABELS = f"has more than {_MOST_LABELS:,} different labels"


@dataclass(frozen=True, slots=True)
class Labels:
    """Every label of a corpus."""

    names: tuple[str, ...] = ()
    """In the order of their numbers."""
    are_numbers: bool = False
    """Whether records hold the numbers themselves; else they hold the names."""

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each label as records have it."""
        held = map(str, range(len(self.names))) if self.are_numbers else self.names
        return {label: number for number, label in enumerate(held)}


class LabelCounts(NamedTuple):
    """The labels of a unit."""

    counts: Counter[str]
    """How often each occurs."""
    usable: set[str]
    """Labels of usable records."""


@dataclass(frozen=True, slots=True)
class CountLabels:
    """Count the labels of units: work for this process or a crew."""

    fields: Fields
    """What is needed of each record."""
    field: str
    """The field that holds its label or labels."""
    unusable: Callable[[dict[str, list[Any]]], dict[int, str]]
    """Finds records whose fields do not fit together."""

    def begin(self, _: Callable[[float, int, str], None]) -> Callable[[Unit], LabelCounts]:
        """Return the function that counts the labels of a unit."""
        return self.of_unit

    def of_unit(self, unit: Unit) -> LabelCounts:
        """Count the labels of a unit.

        Raises:
            CorpusError: There are too many labels to be classes.
        """
        kind = self.fields[self.field]
        counts: Counter[str] = Counter()
        for part in fetched_ahead(unit.parts):
            for records in read_records(part, {self.field: kind}):
                counts.update(self._flat(records.fields[self.field]))
                if len(counts) > _MOST_LABELS:
                    raise _too_many(self.field, _MORE_LABELS)
        return LabelCounts(counts, self._usable(unit, set(counts)))

    def _usable(self, unit: Unit, labels: set[str]) -> set[str]:
        """Return which of `labels`, all of the unit, occur in usable records."""
        found: set[str] = set()
        for part in fetched_ahead(unit.parts if labels else ()):
            for records in read_records(part, self.fields):
                bad = self.unusable(records.fields)
                values = enumerate(records.fields[self.field])
                found.update(self._flat([value for index, value in values if index not in bad]))
                if found >= labels:
                    return found
        return found

    def _flat(self, labels: list[Any]) -> Iterable[str]:
        is_list = self.fields[self.field] is FieldKind.LABELS
        return chain.from_iterable(labels) if is_list else labels


def find_labels(
    units: tuple[Unit, ...],
    fields: Fields,
    field: str,
    unusable: Callable[[dict[str, list[Any]]], dict[int, str]],
    *,
    own: str,
    counted_by: Callable[[CountLabels, tuple[Unit, ...]], Iterable[LabelCounts]] | None = None,
) -> Labels:
    """Find every label of the corpus.

    Args:
        units: The corpus.
        fields: What is needed of each record.
        field: The field that holds its label or labels.
        unusable: Finds records whose fields do not fit together.
        own: The task's own name for that field, for an error.
        counted_by: Counts the labels of units in any order; None for this process.

    Raises:
        CorpusError: There is no label, there are too many to be classes, or they are neither whole
            numbers nor names.
    """
    work = CountLabels(fields, field, unusable)
    counts: Counter[str] = Counter()
    usable: set[str] = set()
    for found in counted_by(work, units) if counted_by else map(work.of_unit, units):
        counts.update(found.counts)
        usable |= found.usable
        if len(counts) > _MOST_LABELS:
            raise _too_many(field, _MORE_LABELS)
    if not counts:
        raise CorpusError(
            f"no record has a label in field `{field}`: a label is {FieldKind.LABEL.value}, "
            "so 1.0 is not a label. Change the values, or name another field with `--field "
            f"{own}=NAME`."
        )
    if usable:
        counts = Counter({label: counts[label] for label in counts.keys() & usable})
    numbers = _whole_numbers(counts, field)
    if not numbers:
        return Labels(tuple(sorted(counts)))
    longest = max(numbers, key=lambda label: (len(label), label))
    if len(longest) > len(str(_MOST_LABELS)) or int(longest) >= _MOST_LABELS:
        raise _too_many(field, f"has label {longest[:40]}")
    names = _saved_names([part.source for unit in units for part in unit.parts], field)
    if len(names) <= int(longest):
        names = tuple(map(str, range(int(longest) + 1)))
    return Labels(names, are_numbers=True)


def _whole_numbers(counts: Counter[str], field: str) -> list[str]:
    """The labels that are whole numbers; none where numbers are names too (see the module)."""
    numbers = list(filter(_WHOLE_NUMBER.fullmatch, counts))
    others = counts.keys() - numbers
    total, num_others = counts.total(), sum(counts[label] for label in others)
    if num_others * _FEW <= total:
        return numbers
    if (total - num_others) * _FEW <= total or any(map(_CODE.fullmatch, others)):
        return []
    shown = min(others, key=lambda label: (counts[label], label))
    raise CorpusError(
        f"field `{field}` mixes whole numbers with other labels, like {shown[:40]!r}: "
        f"{num_others:,} of {total:,}. Correct these, or turn the numbers into names, like "
        f"class-{min(numbers)}."
    )


def _too_many(field: str, what: str) -> CorpusError:
    return CorpusError(
        f"field `{field}` {what}, where at most {_MOST_LABELS:,} classes can be numbered. Is it "
        "the field with the labels?"
    )


def _saved_names(sources: list[InputFile], field: str) -> tuple[str, ...]:
    """The class names that `datasets` left in the files' schemas, if all agree."""
    names = {_names_in(source, field) for source in sources}
    return names.pop() if len(names) == 1 else ()


def _names_in(source: InputFile, field: str) -> tuple[str, ...]:
    schema = FORMATS[source.format].schema
    if schema is None:
        return ()
    try:
        metadata = schema(source.path).metadata or {}
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][field]
        feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        return tuple(map(str, feature["names"]))
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return ()
