"""Number the labels of a corpus before units are encoded, because units are encoded independently.

Labels that are whole numbers keep their value. Class names in the files (ClassLabel) are stored.
Labels that are names are numbered in sorted order. If a corpus has both, the kind of 99 in 100
labels decides. If whole numbers win, records with other labels are rejected. If names win, numbers
are names too. If neither wins, the run ends. If a number begins with a zero, like 007, all labels
are names.

Units are counted by any process, in any order. Labels of records that cannot be used do not count.
"""

import json
import logging
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.text import count_of
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.input_files import InputFile
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.units import Unit, fetched_ahead, first_reject, read_records

if TYPE_CHECKING:
    from tokenfeed.tools.encoding.tasks.base import TaskEncoder

logger = logging.getLogger(__name__)

_WHOLE_NUMBER, _CODE = re.compile("0|[1-9][0-9]*"), re.compile("0[0-9]+")
_FLOAT = re.compile(r" is (?:-?[0-9]+\.[0-9]+|nan|half_?float|float|double),")
"""Matches the reason for rejecting a number that is not whole, as pandas makes beside NaN."""
_FEW = 100
"""One in this many labels may be of the other kind."""
_MOST_LABELS = 1 << 15
"""A tag is stored in 16 bits."""
_MORE_LABELS = f"has more than {_MOST_LABELS:,} different labels"


@dataclass(frozen=True, slots=True)
class Labels:
    """Every label of a corpus."""

    names: tuple[str, ...] = ()
    """Names of the labels, by number."""
    are_numbers: bool = False
    """Whether the labels of records are numbers. If not, they are names."""

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each label, by the label in records."""
        held = map(str, range(len(self.names))) if self.are_numbers else self.names
        return {label: number for number, label in enumerate(held)}


@dataclass(frozen=True, slots=True)
class CountLabels:
    """A task for this process or for workers: count the labels of units."""

    task: "TaskEncoder"

    def begin(self, _: Callable[[float, int, str], None]) -> Callable[[Unit], Counter[str]]:
        """Return the function that counts the labels of a unit."""
        return self.of_unit

    def of_unit(self, unit: Unit) -> Counter[str]:
        """Count how often usable records of a unit have each label.

        Raises:
            CorpusError: There are too many different labels.
        """
        task, own, counts = self.task, self.task.label_field, Counter[str]()
        for part in fetched_ahead(unit.parts):
            for records in read_records(part, task.fields):
                values = task.values_of(records)
                bad = task.unusable(values)
                labels = [value for row, value in enumerate(values[own]) if row not in bad]
                is_list = task.kinds[own] is FieldKind.LABELS
                counts.update(chain.from_iterable(labels) if is_list else labels)
                if len(counts) > _MOST_LABELS:
                    raise _too_many(task.names[own], _MORE_LABELS)
        return counts


def find_labels(
    units: tuple[Unit, ...],
    task: "TaskEncoder",
    counted: Iterable[Counter[str]],
) -> Labels:
    """Find every label of the corpus.

    Args:
        units: The corpus.
        task: The task, whose labels have no numbers yet.
        counted: The labels of the units, in any order.

    Raises:
        CorpusError: There is no label, there are too many different labels, or labels are of both
            kinds.
    """
    own, counts = task.label_field, Counter[str]()
    field = task.names[own]
    for found in counted:
        counts.update(found)
        if len(counts) > _MOST_LABELS:
            raise _too_many(field, _MORE_LABELS)
    if not counts:
        where, reason = first_reject((part for unit in units for part in unit.parts), task.fields)
        way_on, lacks = task.remedy(reason), ""
        if not reason or f"`{field}`" in reason:  # else another field has the fault
            other = f" Name another field with `--field {own}=NAME`."
            if _FLOAT.search(reason):
                other = " Turn the labels into whole numbers, or learn numbers by `--task score`."
            way_on = way_on or other
            lacks = f" has a label in field `{field}`"
        raise CorpusError(f"no usable record{lacks}{where}{reason}.{way_on}")
    numbers = _whole_numbers(counts, field)
    if not numbers:
        _warn_of_alike(counts, field)
        return Labels(tuple(sorted(counts)))
    longest = max(numbers, key=lambda label: (len(label), label))
    if len(longest) > len(str(_MOST_LABELS)) or int(longest) >= _MOST_LABELS:
        raise _too_many(field, f"has label {longest[:40]}")
    names = _saved_names([part.source for unit in units for part in unit.parts], field)
    if len(names) <= int(longest):
        names = tuple(map(str, range(int(longest) + 1)))
    return Labels(names, are_numbers=True)


def _whole_numbers(counts: Counter[str], field: str) -> list[str]:
    """Return the labels that are whole numbers; none if numbers are names (see the module)."""
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


def _warn_of_alike(counts: Counter[str], field: str) -> None:
    """Warn of labels that a reader takes for one label."""
    alike = defaultdict(list)
    for label in sorted(counts, key=lambda label: (-counts[label], label)):
        folded = unicodedata.normalize("NFKC", label).casefold()
        alike[" ".join(folded.split())].append(f"{label[:40]!r} ({counts[label]:,})")
    groups = [labels for labels in alike.values() if len(labels) > 1]
    if groups:
        logger.warning(
            "field `%s` has labels that differ only in case, white space or Unicode form, and each "
            "becomes a class: %s%s. Write them alike if they mean the same",
            *(field, ", ".join(groups[0][:5])),
            f", and {count_of(len(groups) - 1, 'more such group')}" if len(groups) > 1 else "",
        )


def _too_many(field: str, what: str) -> CorpusError:
    return CorpusError(
        f"field `{field}` {what}, where at most {_MOST_LABELS:,} classes can be numbered. Is it "
        "the field with the labels?"
    )


def _saved_names(sources: list[InputFile], field: str) -> tuple[str, ...]:
    """Return the class names in the schemas of the files, by `datasets`, if all have them.

    Raises:
        CorpusError: Two files name the classes differently, so a number has two meanings.
    """
    names = {_names_in(source, field): source.name for source in sources}
    named = [*filter(None, names)]
    if len(named) > 1:
        first, second = (f"{names[each]} has {', '.join(each)[:200]}" for each in named[:2])
        raise CorpusError(
            f"the numbers of field `{field}` mean other classes in other files: {first}; {second}. "
            "Cast both to the same ClassLabel by `datasets`, or turn the numbers into names."
        )
    return named[0] if len(names) == len(named) else ()


def _names_in(source: InputFile, field: str) -> tuple[str, ...]:
    if source.class_names:
        return dict(source.class_names).get(field, ())
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
