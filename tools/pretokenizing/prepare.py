"""Prepare a run: read what takes a pass over the corpus, and train a tokenizer if none is given.

The plan has the units, the labels and the share for validation. It is made once per run: other
parts, and the same command after a kill, read the plan instead of the corpus.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import xxhash

from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE
from tokenfeed.pipeline.format.schema import is_labelled
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.sources import Corpus, Known
from tokenfeed.tools.corpus.units import Unit, cut_units, read_records, read_texts
from tokenfeed.tools.encoding.audit import Audit
from tokenfeed.tools.encoding.engines import ReferenceEngine
from tokenfeed.tools.encoding.fast.engine import FastEngine
from tokenfeed.tools.encoding.labels import CountLabels, Labels, find_labels
from tokenfeed.tools.encoding.limit import TRAIN, VALIDATION, FindLeast, Mark, find_last
from tokenfeed.tools.encoding.tasks.base import TaskEncoder
from tokenfeed.tools.encoding.tasks.complete import CompleteEncoder
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.encoding.training import train_tokenizer_json
from tokenfeed.tools.encoding.unit import EncodeSettings
from tokenfeed.tools.jobs.crew import Work, local_crew
from tokenfeed.tools.jobs.executors import SMALL_BYTES
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.jobs.run_records import check_recipe, kept_plan, state_of
from tokenfeed.tools.pretokenizing.inputs import Inputs, check_usable, load_tokenizer, share_of
from tokenfeed.tools.pretokenizing.options import Options

logger = logging.getLogger(__name__)

_ADVISED_TEXTS, _ADVISED_BYTES, _MANY_UNKNOWN = 100, 1000, 0.01
"""Texts and bytes of each in which unknown tokens are counted, and the share for a warning."""
COUNTED_ALONE_BYTES = 32_000_000
"""Largest input in bytes that this process reads alone before workers would start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared(Inputs):
    """A run that can begin: its inputs, and what takes a pass over the corpus. It is the same on
    every machine with the same input."""

    tokenizer: TextTokenizer
    plan: dict[str, Any]
    has_kept_plan: bool
    """Whether the plan was read from the output."""
    units: tuple[Unit, ...]
    """All units, also those of other parts."""
    encoding: EncodeSettings
    """What the workers get: the task and the settings of all units, with the engine that is tried
    first."""
    audit: Audit
    """The comparison of the engines, if the settings have one."""
    tokenizer_seconds: float
    """Seconds spent on training a tokenizer."""

    @property
    def splits(self) -> set[str]:
        """Names of all splits that the units may have."""
        named = (source.split for source in self.corpus.sources)
        return {TRAIN, VALIDATION, *filter(None, named)}

    @property
    def is_fast(self) -> bool:
        """Whether the fast engine makes the ids."""
        return self.encoding.engine != ReferenceEngine.name


def is_small(units: Iterable[Unit]) -> bool:
    """Return whether this process encodes the units faster than workers would."""
    return sum(unit.weight_bytes for unit in units) <= SMALL_BYTES


def prepare(inputs: Inputs) -> Prepared:
    """Plan the run and train a tokenizer, or read the plan of the unfinished run in the output.

    The reference encodes small inputs, and any input if the options say so.

    Raises:
        ConfigError: The unfinished run has another command or input.
        CorpusError: There are no labels, or no usable records at the beginnings of files.
        TokenizerError: The tokenizer has no template for the task.
    """
    options, output, kept = inputs.options, inputs.output, None
    if state_of(output) != "new":
        kept = inputs.plan or kept_plan(output)
        changed = _changed_file(inputs.corpus, kept) if kept else ""
        check_recipe(output, inputs.recipe, changed)
    plan = kept or _plan(inputs)
    task, units = inputs.task, _units_of(plan, inputs.corpus)
    if task.label_field:
        labels = Labels(tuple(plan["labels"]), plan["labels are numbers"])
        task = replace(task, labels=labels)
    started = time.perf_counter()
    tokenizer = inputs.tokenizer or _trained_tokenizer(inputs, units, kept)
    tokenizer_seconds = time.perf_counter() - started
    _advise(options, task, units, tokenizer)
    is_reference = (
        options.engine == ReferenceEngine.name or options.task == "ids" or is_small(units)
    )
    encoding = EncodeSettings(
        output=output,
        task=task,
        engine=ReferenceEngine.name if is_reference else FastEngine.name,
        vocabulary_size=tokenizer.vocabulary_size,
        template=task.template(tokenizer),
        validation=plan["validation"],
        splits_special=tokenizer.splits_special,
        max_rejects=options.max_rejects,
        audits=not is_reference,
    )
    if kept is None:
        last = _last_of_limit(options, encoding, units, tokenizer)
        plan |= {"tokenizer": tokenizer.xxh3, "last": last}
    if plan.get("last"):
        encoding = replace(encoding, last=Mark(*plan["last"]))
    sample_seed = 0 if options.tokenizer else options.seed  # another order is no other sample
    known = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return Prepared(
        **known | {"task": task, "tokenizer": tokenizer, "plan": plan},
        has_kept_plan=kept is not None,
        units=units,
        encoding=encoding,
        audit=Audit(tokenizer, units, task.fields, sample_seed),
        tokenizer_seconds=tokenizer_seconds,
    )


def _plan(inputs: Inputs) -> dict[str, Any]:
    """Cut the files into units and number the labels, as values of JSON. Read only the records
    that this needs."""
    task, sources = inputs.task, inputs.corpus.sources
    if inputs.options.max_rejects is None:
        check_usable(sources, task)
    units, labels = cut_units(sources, inputs.shard_bytes), Labels()
    if task.label_field:
        counted = done_by(CountLabels(task), units, inputs.options.num_workers)
        labels = find_labels(units, task, counted)
    validation = inputs.validation
    return {
        "units": [
            [
                (part.source.index, part.start, part.stop, part.first_record, part.weight_bytes)
                for part in unit.parts
            ]
            for unit in units
        ],
        "labels": labels.names,
        "labels are numbers": labels.are_numbers,
        "files": inputs.corpus.known,
        "validation": share_of(sources, task.fields) if validation is None else validation,
    }


def _units_of(plan: dict[str, Any], corpus: Corpus) -> tuple[Unit, ...]:
    """Return the units of a plan that was made from the same files."""
    return tuple(
        Unit(
            number=number,
            parts=tuple(
                FilePart(
                    source=corpus.sources[index],
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


def _changed_file(corpus: Corpus, plan: dict[str, Any]) -> str:
    """Return the first file that differs from the files of a plan; empty if all are equal."""
    files = [Known(*file) for file in plan["files"]]
    was = {file.name: file for file in files if file.format}
    for source in corpus.sources:
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


def _trained_tokenizer(
    inputs: Inputs, units: tuple[Unit, ...], kept: dict[str, Any] | None
) -> TextTokenizer:
    """Train a tokenizer, or return the tokenizer that this run trained before.

    Raises:
        TokenizerError: Training gives another tokenizer than before.
    """
    options, output, task = inputs.options, inputs.output, inputs.task
    origin = output.path(TOKENIZER_FILE)
    if kept and output.exists(TOKENIZER_FILE):
        json_bytes = output.read(TOKENIZER_FILE)
        if xxhash.xxh3_64_hexdigest(json_bytes) == kept["tokenizer"]:
            return load_tokenizer(options, json_bytes, origin)
    logger.info("training a tokenizer on a sample of the corpus")
    json_bytes = train_tokenizer_json(
        units,
        fields=task.fields,
        vocabulary_size=options.vocab_size,
        seed=options.seed,
        remedy=task.remedy,
    )
    tokenizer = load_tokenizer(options, json_bytes, origin)
    if kept and tokenizer.xxh3 != kept["tokenizer"]:
        raise TokenizerError(
            f"{origin}: is lost or damaged, and training does not give it again. Delete {output} "
            "and start again."
        )
    return tokenizer


def _advise(
    options: Options, task: TaskEncoder, units: tuple[Unit, ...], tokenizer: TextTokenizer
) -> None:
    """Log what a user may have forgotten about the tokens around texts."""
    if task.has_end and tokenizer.end_problem:
        logger.warning("%s", tokenizer.end_problem)
    for problem in tokenizer.text_problems if task.has_texts else ():
        logger.warning("%s", problem)
    if task.has_texts and (share := _unknown_share(task, units, tokenizer)) >= _MANY_UNKNOWN:
        logger.warning(
            "%.0f%% of the tokens of the first records are %s, because the tokenizer lacks their "
            "characters. Use a tokenizer of this language",
            *(100 * share, tokenizer.unknown_token),
        )
    if isinstance(task, CompleteEncoder) and _lacks_separator(task, units):
        logger.warning(
            "nothing separates prompts from completions: no white space, and no end that all "
            "prompts have. Add a line break or a marker at the end of each prompt"
        )
    is_bare = is_labelled(task.name) and not options.add_special_tokens
    if is_bare and tokenizer.has_template:
        logger.info(
            "the tokenizer has a template for its special tokens, which is left out "
            "(see --add-special-tokens)"
        )


def _lacks_separator(task: CompleteEncoder, units: tuple[Unit, ...]) -> bool:
    """Return whether each completion directly follows its prompt, in the first records of the
    corpus. A common end of all prompts counts as a separator, unless it is one character."""
    first = next((part for unit in units for part in unit.parts), None)
    if first is None:
        return False
    records = next(read_records(first, task.fields, in_one_pass=True), None)
    values = task.values_of(records) if records else {"prompt": [], "completion": []}
    prompts, completions = values["prompt"], values["completion"]
    is_apart = any(
        prompt[-1:].isspace() or completion[:1].isspace()
        for prompt, completion in zip(prompts, completions, strict=True)
    )
    endings = {prompt[-2:] for prompt in prompts}
    return len(endings) > 1 and not is_apart


def _unknown_share(task: TaskEncoder, units: tuple[Unit, ...], tokenizer: TextTokenizer) -> float:
    """Return the share of unknown tokens in the beginnings of the first texts of the corpus."""
    first = next((part for unit in units for part in unit.parts), None)
    unknown = tokenizer.tokenizer.token_to_id(tokenizer.unknown_token)
    if first is None or unknown is None:
        return 0.0
    ids: list[int] = []
    for text in islice(read_texts(first, task.fields), _ADVISED_TEXTS):
        with contextlib.suppress(Exception):  # a tokenizer may raise, which becomes a reject
            beginning = text[:_ADVISED_BYTES].decode(errors="ignore")
            ids += tokenizer.tokenizer.encode(beginning, add_special_tokens=False).ids
    return ids.count(unknown) / max(len(ids), 1)


def _last_of_limit(
    options: Options,
    encoding: EncodeSettings,
    units: tuple[Unit, ...],
    tokenizer: TextTokenizer,
) -> Mark | None:
    """Return the last record of `--limit`; None if all records are kept."""
    if options.limit is None:
        return None
    work = FindLeast(settings=encoding, json_bytes=tokenizer.json_bytes, most=options.limit)
    workers = options.num_workers
    return find_last(work, options.limit, lambda work: done_by(work, units, workers))


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
