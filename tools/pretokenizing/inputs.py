"""The inputs of a run: the files, their units, and the task.

Listing the files reads no records. The plan (units and labels) does. It is made once per run: other
parts, and the same command after a kill, read the plan instead of the corpus.
"""

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Self

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.format.manifest import FEW_ROWS
from tokenfeed.pipeline.format.schema import token_dtype
from tokenfeed.pipeline.format.store import LocalStore
from tokenfeed.tools.corpus.field_paths import columns_of, nested, possible_columns
from tokenfeed.tools.corpus.formats.registry import FALLBACK, FORMATS
from tokenfeed.tools.corpus.input_files import FilePart, IdFacts, InputFile, whole
from tokenfeed.tools.corpus.records import FieldKind, Fields, Records
from tokenfeed.tools.corpus.sources import Corpus, Known, find_corpus
from tokenfeed.tools.corpus.spool import NAMED_RECORDS, Spooled
from tokenfeed.tools.corpus.units import (
    Unit,
    UnverifiedError,
    auto_shard_bytes,
    cut_units,
    fetched_ahead,
    read_records,
)
from tokenfeed.tools.encoding.labels import CountLabels, Labels, find_labels
from tokenfeed.tools.encoding.limit import TRAIN, VALIDATION
from tokenfeed.tools.encoding.tasks import ChatEncoder, IdsEncoder, Labelled, TaskEncoder
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.jobs.crew import Work, local_crew
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.pretokenizing.options import Options

logger = logging.getLogger(__name__)

_LEAST_VALIDATION, _MOST_VALIDATION = 0.01, 0.1
"""Shares of the records for validation. Validation on labels decides when a training ends, so it is
always the larger one. A corpus of few records has a share for about `FEW_ROWS` rows, within these
bounds. This share depends on the number of records alone, so a corpus can be packed in another
format. With fewer than `FEW_ROWS` records, the share is the least one. With so many, it is the
largest, and it falls as the corpus grows. So rows of train become rows of validation only when the
corpus grows to `FEW_ROWS` records."""
_PROBED_RECORDS, _PROBED_FILES, _PROBED_BYTES = 10_000, 16, 1 << 24
_NAMED_FILES, _NO_FIELD = 4, "\0"
"""Files whose fields are named if they are not read; and a field that none has."""
COUNTED_ALONE_BYTES = 32_000_000
"""Largest input in bytes that this process reads alone before workers would start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The files, task and units of a run, before a tokenizer is known."""

    corpus: Corpus
    shard_bytes: int
    validation: float | None
    """The share of the records for validation; None until the inputs are planned, if the number of
    records decides."""
    task: TaskEncoder
    """The task. Its labels are numbered when the inputs are planned."""
    units: tuple[Unit, ...] = ()
    """Empty until the inputs are planned."""

    @classmethod
    def listed(
        cls,
        options: Options,
        plan: dict[str, Any] | None = None,
        spooled: Sequence[Spooled] = (),
        tokenizer: TextTokenizer | None = None,
    ) -> Self:
        """List the input files. Only for conversations, read first records to find their fields.

        Args:
            options: The options of the command.
            plan: A plan of the same run. Its files are not opened if they are unchanged.
            spooled: Records of this process, instead of the files of the options.
            tokenizer: What made the ids, for the task `ids`.

        Raises:
            CorpusError: There are no files.
            ConfigError: The input is in the output folder.
        """
        task, output, ids = options.make_task(), options.output, None
        if tokenizer and isinstance(task, IdsEncoder):
            task = dataclasses.replace(task, vocabulary_size=tokenizer.vocabulary_size)
            ids = IdFacts(token_dtype(tokenizer.vocabulary_size).str, tokenizer.end_id)
        corpus = find_corpus(
            () if spooled else options.corpus,
            out=output.folder if isinstance(output, LocalStore) else None,
            field=next(iter(possible_columns(task.fields))),
            exclude=options.exclude,
            splits=options.splits,
            max_record_bytes=options.max_record_bytes,
            encoding=options.encoding,
            known=[Known(*file) for file in plan["files"]] if plan else (),
            spooled=spooled,
            ids=ids,
        )
        for own, name in task.named.items():
            if nested(name) and not _can_read(corpus.sources, {name: FieldKind.ANY}):
                inside: dict[str, Any] = {own: nested(name)}
                task = dataclasses.replace(task, **inside)
        is_bare = isinstance(task, IdsEncoder) and not options.field
        if is_bare and _can_read(corpus.sources, {"attention_mask": FieldKind.NUMBERS}):
            task = dataclasses.replace(task, attention_mask="attention_mask")  # type: ignore[call-arg]
        if isinstance(task, ChatEncoder) and options.field:
            for own in task.extras.keys() & options.fields.keys():
                name = task.named[own]
                if not _can_read(corpus.sources, {name: FieldKind.JSON}):
                    logger.warning(
                        "`--field` %s=%s: the first records have no field `%s`", own, name, name
                    )
        elif isinstance(task, ChatEncoder):
            task = task.found(partial(_can_read, corpus.sources))
        validation = options.validation
        if validation is None:
            splits = {source.split for source in corpus.sources} - {None}
            is_labelled = task.name in ("classify", "score", "tag")
            is_chosen = bool(options.split) or TRAIN in splits
            has_one = VALIDATION in splits or (is_chosen and not is_labelled)
            default = _MOST_VALIDATION if is_labelled else None
            validation = 0.0 if has_one else default
        shard_bytes = options.shard_bytes or auto_shard_bytes(corpus.sources)
        return cls(corpus=corpus, shard_bytes=shard_bytes, validation=validation, task=task)

    def planned(self, options: Options) -> Self:
        """Cut the files into units and number the labels. Read only the records that this needs.

        Raises:
            CorpusError: There are no labels, or no usable records at the beginnings of files.
        """
        if options.allowed_rejects is None:
            self._check_usable()
        task, units = self.task, cut_units(self.corpus.sources, self.shard_bytes)
        if isinstance(task, Labelled):
            work = CountLabels(task.fields, task.label_field, task.unusable)
            counted = done_by(work, units, options.num_workers)
            labels = find_labels(
                units, work, own=task.own_label_field, remedy=task.remedy, counted=counted
            )
            task = dataclasses.replace(task, labels=labels)
        validation = self.validation
        if validation is None:
            validation = _share_of(self.corpus.sources, task.fields)
        return dataclasses.replace(self, units=units, task=task, validation=validation)

    @property
    def plan(self) -> dict[str, Any]:
        """Return the plan as values of JSON; see `as_planned`."""
        labels = self.task.labels if isinstance(self.task, Labelled) else Labels()
        return {
            "units": [
                [
                    (part.source.index, part.start, part.stop, part.first_record, part.weight_bytes)
                    for part in unit.parts
                ]
                for unit in self.units
            ],
            "labels": labels.names,
            "labels are numbers": labels.are_numbers,
            "files": self.corpus.known,
            "validation": self.validation,
        }

    def as_planned(self, plan: dict[str, Any]) -> Self:
        """Return the inputs with a plan that was made from the same files and options."""
        sources = self.corpus.sources
        units = tuple(
            Unit(
                number=number,
                parts=tuple(
                    FilePart(
                        source=sources[index],
                        start=start,
                        stop=stop,
                        first_record=first_record,
                        weight_bytes=weight_bytes,
                    )
                    for index, start, stop, first_record, weight_bytes in parts
                ),
            )
            for number, parts in enumerate(plan["units"])
        )
        task = self.task
        if isinstance(task, Labelled):
            labels = Labels(tuple(plan["labels"]), plan["labels are numbers"])
            task = dataclasses.replace(task, labels=labels)
        share: float = plan["validation"]
        return dataclasses.replace(self, units=units, task=task, validation=share)

    def changed_file(self, plan: dict[str, Any]) -> str:
        """Return the first file that differs from the files of a plan; empty if all are equal."""
        files = [Known(*file) for file in plan["files"]]
        was = {file.name: file for file in files if file.format}
        for source in self.corpus.sources:
            before = was.pop(source.name, None)
            if before is None:
                return f"; the first is {source.name}, which is new"
            if before.bytes != source.bytes:
                return (
                    f"; the first is {source.name}, which had {before.bytes:,} bytes and has "
                    f"{source.bytes:,}"
                )
            if before.state != source.state:
                return f"; the first is {source.name}, which was written at another time"
        return f"; the first is {next(iter(was))}, which is missing" if was else ""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of all splits."""
        given = {source.split for source in self.corpus.sources if source.split is not None}
        return tuple(sorted({TRAIN, VALIDATION} | given))

    @property
    def unread(self) -> dict[str, str]:
        """The fields of first records that the task does not read, each with its share."""
        read = columns_of(self.task.fields).keys()
        shares: dict[str, str] = {}
        counts: Counter[str] = Counter()
        total = 0
        for source in self.corpus.sources[:_NAMED_FILES]:
            for records in islice(_first_records({_NO_FIELD: FieldKind.TEXT}, source), 1):
                for reject in islice(records.rejects, NAMED_RECORDS):
                    begin, _, names = reject.reason.partition(f" `{_NO_FIELD}`; it has: ")
                    unread = [n for n in names.removesuffix("...").split(", ") if n not in read]
                    if begin == "no column":
                        shares |= dict.fromkeys(unread, "a column")
                    elif names and names != "no fields":
                        counts.update(unread)
                    total += begin == "no field"
        return shares | {n: f"{count:,} of {total:,} records" for n, count in counts.items()}

    def _check_usable(self) -> None:
        """Check that the corpus has a usable record.

        Reads the beginnings of files from all parts of the corpus, until a record is usable.

        Raises:
            CorpusError: The first 10,000 records are rejected.
        """
        sources = self.corpus.sources
        each = max(_PROBED_RECORDS // len(sources), _PROBED_RECORDS // _PROBED_FILES)
        stride = ceil_div(len(sources), _PROBED_FILES)
        first, num_rejects = "", 0
        for source in chain.from_iterable(sources[start::stride] for start in range(stride)):
            for record, reason in islice(self._rejects(source), each):
                if not reason:
                    return
                remedy = self.task.remedy(reason)
                first = first or f"{source.name}, record {record}: {reason}.{remedy}"
                num_rejects += 1
            if num_rejects >= _PROBED_RECORDS:
                raise CorpusError(
                    f"no usable document: the first {num_rejects:,} records are all rejected, like "
                    f"{first}"
                )

    def _rejects(self, source: InputFile) -> Iterator[tuple[int, str]]:
        """Yield the numbers and reasons of rejected records from the beginning of a file. The
        reason is empty if a record is usable."""
        for records in _first_records(self.task.fields, source):
            unusable = self.task.unusable(records.fields)
            if len(unusable) < len(records):
                yield 0, ""
            yield from records.rejects
            yield from ((int(records.numbers[at]), reason) for at, reason in unusable.items())


def _first_records(fields: Fields, *sources: InputFile) -> Iterator[Records]:
    """Yield the records of files, of each from its beginning, up to damage of an archive."""
    for part in fetched_ahead(chain.from_iterable(map(_first_parts, sources))):
        with contextlib.suppress(UnverifiedError):
            yield from read_records(part, fields, in_one_pass=True)


def _first_parts(source: InputFile) -> Iterable[FilePart]:
    format_ = FORMATS[source.format]
    cut = format_.cut if format_.schema else whole  # to cut lines would count them
    return cut(source, _PROBED_BYTES)


def _share_of(sources: Sequence[InputFile], fields: Fields) -> float:
    """Return the share of the records for validation. Read the beginning of the corpus, until it
    has so many records that the share is the least one."""
    enough = round(FEW_ROWS / _LEAST_VALIDATION)
    chosen = [source for source in sources if source.split is None]
    tables = [source for source in chosen if source.format != FALLBACK.name]
    count = len(chosen) - len(tables)  # a text is one record
    for records in _first_records(fields, *tables):
        if count >= enough:
            break
        count += len(records) + len(records.rejects)
    if not FEW_ROWS <= count < enough:
        return _LEAST_VALIDATION
    return min(FEW_ROWS / count, _MOST_VALIDATION)


def _can_read(sources: Sequence[InputFile], fields: Fields) -> bool:
    """Return whether records at the beginning of the first file that has some have some fields."""
    for source in sources[:_PROBED_FILES]:
        for records in _first_records(fields, source):
            if len(records):
                return True
            break  # such as a README
    return False


def done_by(work: Work, units: tuple[Unit, ...], num_workers: int) -> Iterator[Any]:
    """Do work on all units, in any order, by workers if there is much to read."""
    num_workers = min(num_workers, len(units))
    sizes = [unit.weight_bytes for unit in units]
    if num_workers < 2 or sum(sizes) <= COUNTED_ALONE_BYTES:
        yield from map(work.begin(lambda *_: None), units)
        return
    with Bar(sizes) as bar, local_crew(work, units, num_workers, bar.advance) as crew:
        for result in crew:
            bar.count_unit()
            yield result
