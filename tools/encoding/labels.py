"""Number the labels of a corpus before any is written: units know nothing of each other.

One pass over the label field alone. Whole numbers stay what they are; names are numbered in sorted
order; what a saved data set calls its numbered classes is believed.
"""

import json
import re
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.reader import read_records
from tokenfeed.tools.corpus.records import Kind
from tokenfeed.tools.corpus.sources import Source
from tokenfeed.tools.corpus.units import Unit, table_schema

__all__ = ["Labels", "find_labels"]

_WHOLE_NUMBER = re.compile("0|[1-9][0-9]*")
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


def find_labels(units: tuple[Unit, ...], field: str, kind: Kind) -> Labels:
    """Find every label of the corpus.

    Args:
        units: The corpus.
        field: Holds a record's label or labels.
        kind: Which of the two.

    Raises:
        CorpusError: There is no label, or there are too many to be classes.
    """
    found: set[str] = set()
    for part in (part for unit in units for part in unit.parts):
        for records in read_records(part, {field: kind}):
            labels = records.fields[field]
            found.update(chain.from_iterable(labels) if kind is Kind.LABELS else labels)
            if len(found) > _MOST_LABELS:
                raise _too_many(field, f"has more than {_MOST_LABELS:,} different labels")
    if not found:
        raise CorpusError(
            f"no record has a label in field `{field}`. Name the field that holds it with "
            f"`--{'tags' if kind is Kind.LABELS else 'label'}-field`."
        )
    if not all(map(_WHOLE_NUMBER.fullmatch, found)):
        return Labels(tuple(sorted(found)))
    longest = max(found, key=lambda label: (len(label), label))
    if len(longest) > len(str(_MOST_LABELS)) or int(longest) >= _MOST_LABELS:
        raise _too_many(field, f"has label {longest[:40]}")
    names = _saved_names([part.source for unit in units for part in unit.parts], field)
    if len(names) <= int(longest):
        names = tuple(map(str, range(int(longest) + 1)))
    return Labels(names, are_numbers=True)


def _too_many(field: str, what: str) -> CorpusError:
    return CorpusError(
        f"field `{field}` {what}, where at most {_MOST_LABELS:,} classes can be numbered. Is it "
        "the field with the labels?"
    )


def _saved_names(sources: list[Source], field: str) -> tuple[str, ...]:
    """The class names that `datasets` left in the files' schemas, if all agree."""
    names = {_names_in(source, field) for source in sources}
    return names.pop() if len(names) == 1 else ()


def _names_in(source: Source, field: str) -> tuple[str, ...]:
    if source.format not in ("parquet", "arrow"):
        return ()
    try:
        metadata = table_schema(source).metadata or {}
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][field]
        feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        return tuple(map(str, feature["names"]))
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return ()
