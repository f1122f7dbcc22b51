"""Find the input of a command: its files, its task, and the tokenizer that it names.

Only the beginnings of files are read. `prepare` reads the corpus. The recipe, which is known here,
decides whether a finished or unfinished output was made by the same command.
"""

import contextlib
import dataclasses
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import xxhash

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenizerError
from tokenfeed.pipeline.format.manifest import FEW_ROWS
from tokenfeed.pipeline.format.schema import is_labelled, token_dtype
from tokenfeed.pipeline.format.store import LocalStore, Place, local_path, open_place
from tokenfeed.pipeline.text import public
from tokenfeed.tools.corpus.field_paths import columns_of, nested, possible_columns
from tokenfeed.tools.corpus.formats.registry import FALLBACK, FORMATS
from tokenfeed.tools.corpus.input_files import FilePart, IdFacts, InputFile, whole
from tokenfeed.tools.corpus.records import NO_FIELD, FieldKind, Fields, Records, Unusable
from tokenfeed.tools.corpus.sources import Corpus, Known, find_corpus
from tokenfeed.tools.corpus.spool import NAMED_RECORDS, Spool
from tokenfeed.tools.corpus.units import (
    UnverifiedError,
    auto_shard_bytes,
    fetched_ahead,
    read_records,
)
from tokenfeed.tools.encoding.chat import ChatTemplate, tokens_set_by
from tokenfeed.tools.encoding.chat_renderer import texts_written
from tokenfeed.tools.encoding.engines import preload
from tokenfeed.tools.encoding.limit import TRAIN, VALIDATION
from tokenfeed.tools.encoding.tasks.base import TaskEncoder
from tokenfeed.tools.encoding.tasks.chat import ChatEncoder
from tokenfeed.tools.encoding.tasks.ids import IdsEncoder
from tokenfeed.tools.encoding.tokenizer import ModelFiles, TextTokenizer, fetch_tokenizer_json
from tokenfeed.tools.jobs.executors import prepare_early
from tokenfeed.tools.jobs.run_records import State, kept_plan, state_of
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
_NAMED_FILES = 4
"""Files whose fields are named if they are not read."""
_TOKEN = re.compile(r"<\|\w+\|>")
"""Matches special tokens as most chat templates write them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The input of a command, before the corpus is read."""

    options: Options
    output: Place
    state: State
    """The state of the output."""
    corpus: Corpus
    task: TaskEncoder
    """The task with its fields and its chat template. Its labels have no numbers yet."""
    tokenizer: TextTokenizer | None
    """The tokenizer that `--tokenizer` names; None to train one."""
    shard_bytes: int
    validation: float | None
    """The share of the records for validation; None if the number of records decides."""
    plan: dict[str, Any] | None
    """The plan of the unfinished run in the output, by this or another command."""
    recipe: dict[str, Any]
    """Everything that the output depends on, in words that a user can compare."""


def find_inputs(options: Options, spool: Spool = tuple) -> Inputs:
    """List the input files, and load the tokenizer that is given.

    Args:
        options: The options of the command.
        spool: Returns records of this process, instead of the files of the options.

    Raises:
        CorpusError: There are no files.
        ConfigError: The input is in the output folder, or the output has other files.
        TokenizerError: The tokenizer or the chat template is invalid.
    """
    output = open_place(options.paths[-1])
    state = state_of(output)
    tokenizer, files = None, ModelFiles()
    if options.tokenizer:
        json_bytes = fetch_tokenizer_json(options.tokenizer)
        files = ModelFiles.read(options.tokenizer)
        tokenizer = load_tokenizer(options, json_bytes, public(options.tokenizer), files)
        special, vocabulary = tokenizer.splits_special, tokenizer.vocabulary_size
        if options.task != "ids":
            prepare_early(partial(preload, options.tokenizer, vocabulary, splits_special=special))
    plan = kept_plan(output) if state == "unfinished" else None
    task, ids, spooled = options.make_task(), None, spool()
    if tokenizer and isinstance(task, IdsEncoder):
        task = dataclasses.replace(task, vocabulary_size=tokenizer.vocabulary_size)
        ids = IdFacts(token_dtype(tokenizer.vocabulary_size).str, tokenizer.end_id)
    corpus = find_corpus(
        () if spooled else options.corpus,
        out=output.folder if isinstance(output, LocalStore) else None,
        field=next(iter(possible_columns(task.fields))),
        exclude=options.exclude,
        splits=options.splits,
        max_record_bytes=options.max_record,
        encoding=options.encoding,
        known=[Known(*file) for file in plan["files"]] if plan else (),
        spooled=spooled,
        ids=ids,
    )
    task = _with_found_fields(task, options, corpus.sources)
    if isinstance(task, ChatEncoder):
        assert tokenizer, "`Options` asks for one"
        task = dataclasses.replace(task, chat_template=chat_template_of(options, tokenizer, files))
    shard_bytes = options.shard_size
    if shard_bytes == "auto":
        shard_bytes = auto_shard_bytes(corpus.sources)
    return Inputs(
        options=options,
        output=output,
        state=state,
        corpus=corpus,
        task=task,
        tokenizer=tokenizer,
        shard_bytes=shard_bytes,
        validation=_share_by_splits(options, task, corpus.sources),
        plan=plan,
        recipe=_recipe(options, corpus, task, tokenizer, shard_bytes),
    )


def load_tokenizer(
    options: Options, json_bytes: bytes, origin: object, files: ModelFiles | None = None
) -> TextTokenizer:
    """Load a tokenizer as the options ask."""
    return TextTokenizer.load(
        json_bytes,
        origin=origin,
        end_token=options.end_token,
        splits_special=options.special_tokens_in_text == "split" or options.task == "chat",
        files=files,
    )


def _with_found_fields(
    task: TaskEncoder, options: Options, sources: Sequence[InputFile]
) -> TaskEncoder:
    """Return the task with the fields that the first records have."""
    for own, name in task.names.items():
        if nested(name) and not _can_read(sources, {name: FieldKind.ANY}):
            task = dataclasses.replace(task, names={**task.names, own: nested(name)})
    is_bare = isinstance(task, IdsEncoder) and not options.field
    if is_bare and _can_read(sources, {"attention_mask": FieldKind.NUMBERS}):
        names = {**task.names, "attention_mask": "attention_mask"}
        return dataclasses.replace(task, names=names)
    if not isinstance(task, ChatEncoder):
        return task
    if not options.field:
        return task.found(partial(_can_read, sources))
    for own in task.extras.keys() & options.fields.keys():
        name = task.names[own]
        if not _can_read(sources, {name: FieldKind.JSON}):
            logger.warning("`--field` %s=%s: the first records have no field `%s`", own, name, name)
    return task


def _share_by_splits(
    options: Options, task: TaskEncoder, sources: Sequence[InputFile]
) -> float | None:
    """Return the share for validation; None if the number of records decides."""
    if options.validation is not None:
        return options.validation
    splits = {source.split for source in sources} - {None}
    has_labels = is_labelled(task.name)
    is_chosen = bool(options.split) or TRAIN in splits
    if VALIDATION in splits or (is_chosen and not has_labels):
        return 0.0
    return _MOST_VALIDATION if has_labels else None


def _recipe(
    options: Options,
    corpus: Corpus,
    task: TaskEncoder,
    tokenizer: TextTokenizer | None,
    shard_bytes: int,
) -> dict[str, Any]:
    """Return all that the output depends on, in words that a user can compare."""
    states = [(file.name, file.bytes, file.state, file.split) for file in corpus.sources]
    chat = task.chat_template if isinstance(task, ChatEncoder) else None
    return {
        "CORPUS": list(map(public, options.corpus)),
        "--exclude": list(map(public, options.exclude)),
        "--split": list(map(public, options.split)),
        "--task": options.task,
        "the fields": list(task.fields),
        "--keep": list(options.keep) or None,
        "--fim-rate, --fim-spm-rate and --seed": (
            [options.fim_rate, options.fim_spm_rate, options.seed] if options.fim_rate else None
        ),
        "--validation": options.validation,
        "--limit": options.limit,
        "--shard-size": shard_bytes,
        "--encoding": options.encoding,
        "--max-record": options.max_record,
        "--tokenizer": options.tokenizer and public(options.tokenizer),
        "--vocab-size and --seed": (
            None if options.tokenizer else [options.vocab_size, options.seed]
        ),
        "--end-token": tokenizer.end_token if tokenizer else options.end_token,
        "--add-special-tokens": options.add_special_tokens,
        "--special-tokens-in-text": options.special_tokens_in_text,
        "the tokenizer's checksum": tokenizer.xxh3 if tokenizer else None,
        "--engine": options.engine,
        "the chat template": (
            [xxhash.xxh3_64_hexdigest(chat.source.encode()), chat.variables] if chat else None
        ),
        "the number of input files": len(states),
        "the bytes of the input": sum(file.bytes for file in corpus.sources),
        "the names, sizes and times of the input files": xxhash.xxh3_64_hexdigest(
            repr(states).encode()
        ),
    }


def chat_template_of(options: Options, tokenizer: TextTokenizer, files: ModelFiles) -> ChatTemplate:
    """Return the chat template with its variables.

    Raises:
        TokenizerError: There is no template, or the template is invalid.
    """
    source = files.chat_templates.get("default")
    if options.chat_template:
        path = local_path(options.chat_template)
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"`--chat-template` {options.chat_template}: cannot be read ({why}). Give the file "
                "of a template."
            ) from None
        if _is_json(source):
            raise ConfigError(
                f"`--chat-template` {options.chat_template}: is JSON. Write its value "
                "`chat_template` to a file, or give the folder of the model as --tokenizer."
            )
    elif source is not None and (with_tools := files.chat_templates.get("tool_use")):
        text, other = (each.removesuffix("\n") for each in (with_tools, source))  # as Jinja does
        # `+` keeps the white space beside a tag
        source = f"{{% if tools is not none +%}}{text}{{%+ else +%}}{other}{{%+ endif %}}"
    if source is None:
        raise TokenizerError(
            f"{options.tokenizer}: has no chat template. Give a folder with tokenizer_config.json "
            "or chat_template.jinja beside tokenizer.json, or --chat-template FILE."
        )
    arguments = options.template_arguments
    if (date := arguments.pop("strftime_now", None)) is not None:
        source = f"{{% macro strftime_now(format) %}}{date}{{% endmacro %}}\n{source}"
    variables: dict[str, Any] = dict(files.tokens)
    variables |= tokens_set_by(source)
    added = tokenizer.tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special} | {*variables.values()}
    known = (text for text in special if tokenizer.tokenizer.token_to_id(text) is not None)
    template = ChatTemplate(
        source=source,
        special_tokens=tuple(sorted(known)),
        variables=variables | arguments,
    )
    try:
        template.check()
    except Unusable as reason:
        name = options.chat_template or options.tokenizer
        raise TokenizerError(f"{name}: the chat template {reason}. Correct it.") from None
    written = texts_written(source)
    given = (*files.added, *files.tokens.values())
    named = {*_TOKEN.findall(written)} | {*filter(written.__contains__, given)}
    named |= {text for name, text in template.tokens.items() if template.reads(name)}
    if unknown := [each for each in sorted(named) if not tokenizer.is_token(each)]:
        logger.warning(
            "the chat template writes %s, but the tokenizer has no such token: a model learns the "
            "characters. Use the template of the tokenizer, or add the token",
            ", ".join(unknown[:3]),
        )
    for name in template.missing_tokens:
        logger.warning(
            "the chat template names %s, but no file beside the tokenizer has it: conversations "
            "lack this token. Give the folder of the model as --tokenizer, or --template-argument "
            "%s=TOKEN",
            *(name, name),
        )
    if unread := [name for name in options.template_arguments if not template.reads(name)]:
        raise ConfigError(
            f"`--template-argument` {unread[0]}: has no effect, because the chat template has no "
            "variable with this name. Correct the name, or leave it out."
        )
    return template


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def unread_fields(corpus: Corpus, task: TaskEncoder) -> dict[str, str]:
    """Return the fields of first records that the task does not read, each with its share."""
    read = columns_of(task.fields).keys()
    shares: dict[str, str] = {}
    counts: Counter[str] = Counter()
    total = 0
    for source in corpus.sources[:_NAMED_FILES]:
        for records in islice(_first_records({NO_FIELD: FieldKind.TEXT}, source), 1):
            for reject in islice(records.rejects, NAMED_RECORDS):
                begin, _, names = reject.reason.partition(f" `{NO_FIELD}`; it has: ")
                unread = [n for n in json.loads(names or "[]") if n not in read]
                if begin == "no column":
                    shares |= dict.fromkeys(unread, "a column")
                else:
                    counts.update(unread)
                total += begin == "no field"
    return shares | {n: f"{count:,} of {total:,} records" for n, count in counts.items()}


def check_usable(sources: Sequence[InputFile], task: TaskEncoder) -> None:
    """Check that the corpus has a usable record.

    Reads the beginnings of files from all parts of the corpus, until a record is usable.

    Raises:
        CorpusError: The first 10,000 records are rejected.
    """
    each = max(_PROBED_RECORDS // len(sources), _PROBED_RECORDS // _PROBED_FILES)
    stride = ceil_div(len(sources), _PROBED_FILES)
    first, num_rejects = "", 0
    for source in chain.from_iterable(sources[start::stride] for start in range(stride)):
        for record, reason in islice(_rejects(source, task), each):
            if not reason:
                return
            first = first or f"{source.name}, record {record}: {reason}.{task.remedy(reason)}"
            num_rejects += 1
        if num_rejects >= _PROBED_RECORDS:
            raise CorpusError(
                f"no usable document: the first {num_rejects:,} records are all rejected, like "
                f"{first}"
            )


def _rejects(source: InputFile, task: TaskEncoder) -> Iterator[tuple[int, str]]:
    """Yield the numbers and reasons of rejected records from the beginning of a file. The reason
    is empty if a record is usable."""
    for records in _first_records(task.fields, source):
        unusable = task.unusable(task.values_of(records))
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


def share_of(sources: Sequence[InputFile], fields: Fields) -> float:
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
