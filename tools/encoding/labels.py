"""Number the labels of a corpus before any is written: units know nothing of each other.

Whole numbers stay what they are, with the class names stored in the files (ClassLabel) if there are
any; names are numbered in sorted order. Where both occur, what 99 in 100 labels are decides: with
whole numbers, a record that has another label is rejected; with names, a number is a name like
them; and where neither is so many, the run ends. Digits behind a zero, like 007, make names of all.

One pass over the label field alone, and one over all fields that ends as soon as each label was
seen in a usable record: a label without one is no class.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.kinds import Fields, Kind
from tokenfeed.tools.corpus.parts import InputFile
from tokenfeed.tools.corpus.reader import read_records
from tokenfeed.tools.corpus.units import Unit

__all__ = ["Labels", "find_labels"]

_WHOLE_NUMBER, _CODE = re.compile("0|[1-9][0-9]*"), re.compile("0[0-9]+")
_FEW = 100
"""One in so many labels may be unlike the others."""
_MOST_LABELS = 1 << 15
"""A tag is stored in 16 bits."""


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


def find_labels(
    units: tuple[Unit, ...],
    fields: Fields,
    field: str,
    unusable: Callable[[dict[str, list[Any]]], dict[int, str]],
    *,
    own: str,
) -> Labels:
    """Find every label of the corpus.

    Args:
        units: The corpus.
        fields: What is needed of each record.
        field: The one that holds its label or labels.
        unusable: Tells which records have fields that do not fit together.
        own: The task's own name for that field, for an error.

    Raises:
        CorpusError: There is no label, there are too many to be classes, or they are neither whole
            numbers nor names.
    """
    counts = _count(units, field, fields[field])
    if not counts:
        raise CorpusError(
            f"no record has a label in field `{field}`. Name the field that holds it with `--field "
            f"{own}=NAME`."
        )
    unused = _unused(units, fields, field, unusable, set(counts))
    if len(unused) < len(counts):
        counts = Counter({label: counts[label] for label in counts.keys() - unused})
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


def _count(units: tuple[Unit, ...], field: str, kind: Kind) -> Counter[str]:
    """How often each label stands in the corpus."""
    counts: Counter[str] = Counter()
    for part in (part for unit in units for part in unit.parts):
        for records in read_records(part, {field: kind}):
            labels = records.fields[field]
            counts.update(chain.from_iterable(labels) if kind is Kind.LABELS else labels)
            if len(counts) > _MOST_LABELS:
                raise _too_many(field, f"has more than {_MOST_LABELS:,} different labels")
    return counts


def _unused(
    units: tuple[Unit, ...],
    fields: Fields,
    field: str,
    unusable: Callable[[dict[str, list[Any]]], dict[int, str]],
    labels: set[str],
) -> set[str]:
    """Those of `labels` that stand in no usable record."""
    left = set(labels)
    for part in (part for unit in units for part in unit.parts):
        for records in read_records(part, fields):
            bad = unusable(records.fields)
            values = records.fields[field]
            usable = [value for index, value in enumerate(values) if index not in bad]
            left.difference_update(
                chain.from_iterable(usable) if fields[field] is Kind.LABELS else usable
            )
            if not left:
                return left
    return left


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
        f"class-{numbers[0]}."
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
