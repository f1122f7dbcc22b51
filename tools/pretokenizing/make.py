"""Make a data set, or with `--part I/N` every Nth unit of it.

Find the input, cut it into units, load or train the tokenizer, encode the units, and write the
manifest. The output depends only on the input and the options. Records of the run are written first
and the manifest last, so an output is always new, unfinished or finished.
"""

import contextlib
import json
import logging
import re
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import xxhash

from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenizerError
from tokenfeed.pipeline.format.manifest import (
    TOKENIZER_FILE,
    Manifest,
    read_checked,
)
from tokenfeed.pipeline.format.store import Place, local_path
from tokenfeed.pipeline.text import public
from tokenfeed.tools.corpus.records import Unusable
from tokenfeed.tools.corpus.spool import Spool
from tokenfeed.tools.corpus.units import read_records
from tokenfeed.tools.encoding.audit import Audit
from tokenfeed.tools.encoding.chat import ChatTemplate, tokens_set_by
from tokenfeed.tools.encoding.chat_messages import UNREAD_KEY
from tokenfeed.tools.encoding.chat_renderer import texts_written
from tokenfeed.tools.encoding.engines import FastEngine, ReferenceEngine, preload
from tokenfeed.tools.encoding.limit import FindLeast, Mark, find_last
from tokenfeed.tools.encoding.record_blocks import UnitResult
from tokenfeed.tools.encoding.tasks import ChatEncoder, CompleteEncoder
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import (
    ModelFiles,
    TextTokenizer,
    fetch_tokenizer_json,
)
from tokenfeed.tools.encoding.training import train_tokenizer_json
from tokenfeed.tools.encoding.unit import EncodeSettings
from tokenfeed.tools.jobs.claim import State, recognise, remember, state_of, withdraw
from tokenfeed.tools.jobs.executors import prepare_early
from tokenfeed.tools.jobs.run_records import (
    JobPart,
    RunRecords,
    check_recipe,
    is_begun,
    kept_plan,
    planning_alone,
    remove_records,
)
from tokenfeed.tools.pretokenizing.commit import commit
from tokenfeed.tools.pretokenizing.inputs import Inputs, done_by
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.runner import Run, is_small, run_units
from tokenfeed.tools.pretokenizing.summary import Figures, PartSummary, Summary

_TOKEN = re.compile(r"<\|\w+\|>")
"""Matches special tokens as most chat templates write them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A command and its input files, before any record is read."""

    options: Options
    inputs: Inputs
    """The inputs without a plan."""
    tokenizer: TextTokenizer | None
    """The tokenizer that `--tokenizer` names; None to train one."""
    recipe: dict[str, Any]
    """Everything that the output depends on, in words that a user can compare."""
    plan: dict[str, Any] | None
    """The plan of the unfinished run in the output, by this or another command."""

    @classmethod
    def from_options(
        cls,
        options: Options,
        state: State,
        spool: Spool = tuple,
    ) -> Self:
        """List the input files and load the tokenizer that is given.

        Args:
            options: The options of the command.
            state: The state of the output.
            spool: Returns records of this process, instead of the files of the options.
        """
        tokenizer, files = None, ModelFiles()
        if options.tokenizer:
            json_bytes = fetch_tokenizer_json(options.tokenizer)
            files = ModelFiles.read(options.tokenizer)
            tokenizer = _load(options, json_bytes, public(options.tokenizer), files)
            special = tokenizer.splits_special
            vocabulary = tokenizer.vocabulary_size
            if options.task != "ids":
                prepare_early(
                    partial(preload, options.tokenizer, vocabulary, splits_special=special)
                )
        plan = kept_plan(options.output) if state == "unfinished" else None
        inputs = Inputs.listed(options, plan, spool(), tokenizer)
        if isinstance(inputs.task, ChatEncoder):
            assert tokenizer, "`Options.check` asks for one"
            task = replace(inputs.task, chat_template=chat_template_of(options, tokenizer, files))
            inputs = replace(inputs, task=task)
        return cls(
            options=options,
            inputs=inputs,
            tokenizer=tokenizer,
            recipe=_recipe(options, inputs, tokenizer),
            plan=plan,
        )

    def finished_tokenizer(self) -> TextTokenizer:
        """Return the tokenizer of the finished data set in the output."""
        if self.tokenizer:
            return self.tokenizer
        output = self.options.output
        info = Manifest.read(output).tokenizer
        return _load(self.options, read_checked(output, info), output.path(info.file))


def prepared(listed: Listed) -> Run:
    """Plan the run and train a tokenizer, or read the plan of the unfinished run in the output.

    The reference encodes small inputs, and any input if the options say so.

    Raises:
        ConfigError: The unfinished run has another command or input.
        TokenizerError: The tokenizer has no template for the task.
    """
    options, inputs, kept = listed.options, listed.inputs, None
    output = options.output
    if is_begun(output):
        kept = listed.plan or kept_plan(output)
        check_recipe(output, listed.recipe, inputs.changed_file(kept) if kept else "")
    inputs = inputs.as_planned(kept) if kept else inputs.planned(options)
    started = time.perf_counter()
    tokenizer = listed.tokenizer or _trained_tokenizer(options, inputs, output, kept)
    tokenizer_seconds = time.perf_counter() - started
    if inputs.task.has_end and tokenizer.end_problem:
        logger.warning("%s", tokenizer.end_problem)
    if _lacks_separator(inputs):
        logger.warning(
            "nothing separates prompts from completions: no white space, and no end that all "
            "prompts have. Add a line break or a marker at the end of each prompt"
        )
    is_bare = options.task in ("classify", "score", "tag") and not options.add_special_tokens
    if is_bare and tokenizer.has_template:
        logger.info(
            "the tokenizer has a template for its special tokens, which is left out "
            "(see --add-special-tokens)"
        )
    is_reference = (
        options.engine == ReferenceEngine.name or options.task == "ids" or is_small(inputs.units)
    )
    template = inputs.task.template(tokenizer)
    assert inputs.validation is not None, "a plan has it"
    last = _last(options, inputs, tokenizer, template, kept)
    settings = EncodeSettings(
        output=output,
        task=inputs.task,
        engine=ReferenceEngine.name if is_reference else FastEngine.name,
        vocabulary_size=tokenizer.vocabulary_size,
        template=template,
        validation=inputs.validation,
        last=last,
        splits=inputs.splits,
        splits_special=tokenizer.splits_special,
        max_rejects=options.allowed_rejects,
        audits=not is_reference,
    )
    sample_seed = 0 if options.tokenizer else options.seed  # another order is no other sample
    return Run(
        options=options,
        inputs=inputs,
        settings=settings,
        tokenizer=tokenizer,
        audit=Audit(tokenizer, inputs.units, inputs.task.fields, sample_seed),
        plan=kept or inputs.plan | {"tokenizer": tokenizer.xxh3, "last": last},
        has_kept_plan=kept is not None,
        tokenizer_seconds=tokenizer_seconds,
    )


def _last(
    options: Options,
    inputs: Inputs,
    tokenizer: TextTokenizer,
    template: Template,
    kept: dict[str, Any] | None,
) -> Mark | None:
    """Return the last record of `--limit`; None if all records are kept."""
    if kept:
        return Mark(*kept["last"]) if kept.get("last") else None
    if options.limit is None:
        return None
    work = FindLeast(
        task=inputs.task,
        template=template,
        json_bytes=tokenizer.json_bytes,
        vocabulary_size=tokenizer.vocabulary_size,
        splits_special=tokenizer.splits_special,
        validation=inputs.validation or 0.0,
        most=options.limit,
    )
    workers = options.num_workers
    return find_last(work, options.limit, lambda work: done_by(work, inputs.units, workers))


def _lacks_separator(inputs: Inputs) -> bool:
    """Return whether each completion directly follows its prompt, in the first records of the
    corpus. A common end of all prompts counts as a separator, unless it is one character."""
    task, parts = inputs.task, (part for unit in inputs.units for part in unit.parts)
    first = next(parts, None)
    if first is None or not isinstance(task, CompleteEncoder):
        return False
    records = next(read_records(first, task.fields, in_one_pass=True), None)
    prompts, completions = records.fields.values() if records else ([], [])
    is_apart = any(
        prompt[-1:].isspace() or completion[:1].isspace()
        for prompt, completion in zip(prompts, completions, strict=True)
    )
    endings = {prompt[-2:] for prompt in prompts}
    return len(endings) > 1 and not is_apart


def _trained_tokenizer(
    options: Options, inputs: Inputs, output: Place, kept: dict[str, Any] | None
) -> TextTokenizer:
    """Train a tokenizer, or return the tokenizer that this run trained before.

    Raises:
        TokenizerError: Training gives another tokenizer than before.
    """
    origin = output.path(TOKENIZER_FILE)
    if kept and output.exists(TOKENIZER_FILE):
        json_bytes = output.read(TOKENIZER_FILE)
        if xxhash.xxh3_64_hexdigest(json_bytes) == kept["tokenizer"]:
            return _load(options, json_bytes, origin)
    logger.info("training a tokenizer on a sample of the corpus")
    json_bytes = train_tokenizer_json(
        inputs.units,
        fields=inputs.task.fields,
        vocabulary_size=options.vocab_size,
        seed=options.seed,
        remedy=inputs.task.remedy,
    )
    tokenizer = _load(options, json_bytes, origin)
    if kept and tokenizer.xxh3 != kept["tokenizer"]:
        raise TokenizerError(
            f"{origin}: is lost or damaged, and training does not give it again. Delete {output} "
            "and start again."
        )
    return tokenizer


def _load(
    options: Options, json_bytes: bytes, origin: object, files: ModelFiles | None = None
) -> TextTokenizer:
    return TextTokenizer.load(
        json_bytes,
        origin=origin,
        end_token=options.end_token,
        splits_special=options.special_tokens_in_text == "split" or options.task == "chat",
        files=files,
    )


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
    named = {*_TOKEN.findall(written)} | {*filter(written.__contains__, files.added)}
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


def _recipe(options: Options, inputs: Inputs, tokenizer: TextTokenizer | None) -> dict[str, Any]:
    """All that the output depends on, in words a user can compare."""
    sources = inputs.corpus.sources
    states = [(source.name, source.bytes, source.state, source.split) for source in sources]
    states_xxh3 = xxhash.xxh3_64_hexdigest(repr(states).encode())
    training = None if options.tokenizer else [options.vocab_size, options.seed]
    chat = inputs.task.chat_template if isinstance(inputs.task, ChatEncoder) else None
    return {
        "CORPUS": list(map(public, options.corpus)),
        "--exclude": list(map(public, options.exclude)),
        "--split": list(map(public, options.split)),
        "--task": options.task,
        "the fields": list(inputs.task.fields),
        "--keep": list(options.keep) or None,
        "--fim-rate, --fim-spm-rate and --seed": (
            [options.fim_rate, options.fim_spm_rate, options.seed] if options.fim_rate else None
        ),
        "--validation": options.validation,
        "--limit": options.limit,
        "--shard-size": inputs.shard_bytes,
        "--encoding": options.encoding,
        "--max-record": options.max_record_bytes,
        "--tokenizer": options.tokenizer and public(options.tokenizer),
        "--vocab-size and --seed": training,
        "--end-token": tokenizer.end_token if tokenizer else options.end_token,
        "--add-special-tokens": options.add_special_tokens,
        "--special-tokens-in-text": options.special_tokens_in_text,
        "the tokenizer's checksum": tokenizer.xxh3 if tokenizer else None,
        "--engine": options.engine,
        "the chat template": (
            [xxhash.xxh3_64_hexdigest(chat.source.encode()), chat.variables] if chat else None
        ),
        "the number of input files": len(states),
        "the bytes of the input": sum(source.bytes for source in sources),
        "the names, sizes and times of the input files": states_xxh3,
    }


def make_part(options: Options) -> PartSummary:
    """Make one part of the data set that `options` describe, or finish the data set.

    Args:
        options: The options of the command. All parts have the same except for `part`.

    Raises:
        TokenfeedError: Any error, in one line. The same command continues the part.
    """
    started = time.perf_counter()
    options.check()
    output, part = options.output, options.job_part
    state = state_of(output)
    listed = Listed.from_options(options, state)
    if state == "finished":
        _, num_units = recognise(output, listed.recipe)
        num_units = resumed_units = sum(map(part.has, range(num_units)))
    else:
        with contextlib.ExitStack() as stack:
            with planning_alone(output) if listed.plan is None else contextlib.nullcontext():
                run = prepared(listed)
                begun = RunRecords.begin(output, listed.recipe, part)
                records = stack.enter_context(begun)
                begin_writing(run, records)
            num_units, resumed_units = len(run.units), len(records.results)
            with records.noting_failure(part):
                run_units(run, records)
    return PartSummary(
        out=str(output),
        part=str(options.part),
        units=num_units,
        resumed_units=resumed_units,
        already_finished=state == "finished",
        seconds=round(time.perf_counter() - started, 2),
    )


def begin_writing(run: Run, records: RunRecords) -> None:
    """Store the plan, and the tokenizer for workers, unless another process has stored them."""
    if not run.has_kept_plan:
        records.keep_plan(run.plan)
    output, json_bytes = run.settings.output, run.tokenizer.json_bytes
    if not output.exists(TOKENIZER_FILE) or output.read(TOKENIZER_FILE) != json_bytes:
        output.write(TOKENIZER_FILE, json_bytes)


def make_dataset(options: Options, spool: Spool = tuple) -> Summary:
    """Make the data set that `options` describe, or finish it.

    Args:
        options: The options of the command.
        spool: A function that returns records made in this Python process. They are read instead
            of the files that the options name.

    Raises:
        TokenfeedError: Any error, in one line. Files with final names are complete, and the
            same options continue the run.
    """
    started = time.perf_counter()
    options.check()
    made = _made(options, spool)
    return Summary.of(options, *made, started)


def _made(options: Options, spool: Spool) -> tuple[Manifest, Figures]:
    """Make or finish a data set. Return its manifest, and figures of the run.

    Args:
        options: The options of the command, checked.
        spool: A function that returns records made in this Python process. They are read instead
            of the files that the options name.
    """
    output = options.output
    state = state_of(output)
    if options.finish and state == "new":
        raise ConfigError(
            f"`--finish`: {output} holds nothing to finish. Run `--part I/N` for every I first."
        )
    listed = Listed.from_options(options, state, spool)
    corpus = listed.inputs.corpus
    if state == "finished":
        manifest, num_units = recognise(output, listed.recipe)
        logger.info("already finished: the same command and input made this data set")
        return manifest, Figures(
            listed.finished_tokenizer(),
            corpus,
            units=num_units,
            resumed_units=num_units,
            already_finished=True,
        )
    run = prepared(listed)
    with RunRecords.begin(output, listed.recipe) as records:
        resumed_units, resumed_bytes = len(records.results), _text_bytes(records)
        manifest = _encode(run, records, listed)
    new_bytes = manifest.ledger.bytes - resumed_bytes
    return manifest, Figures(
        run.tokenizer,
        corpus,
        units=len(run.units),
        resumed_units=resumed_units,
        new_bytes=new_bytes,
        tokenizer_seconds=run.tokenizer_seconds,
        unread=_warned_of(run.inputs, manifest, reads_corpus=new_bytes > 0),
    )


_WARNED = {
    "unread_tools": "%s conversations have tools, but the chat template does not write them",
    "text_arguments": "%s calls have arguments as a text, which the chat template writes as JSON "
    "again, with more quotes: give the arguments as objects",
    "weights": "%s messages have weights other than 0 and 1, not used: give --keep weight",
    "unread_systems": "%s conversations begin with another system message than their system field, "
    "which was not read",
    "unread_labels": "%s records have a label that is neither true nor false: they are learnt",
}
"""Warnings by the counts of the manifest that change what a model learns."""
_WARNED_KEYS = (
    "train",
    "training",
    "trainable",
    "loss",
    "mask",
    "masked",
    "function_calls",
    "image",
)
"""Keys of messages that change what a model should learn, or lack in its text."""


def _warned_of(inputs: Inputs, manifest: Manifest, *, reads_corpus: bool) -> dict[str, str]:
    """Warn of what changes the meaning and was not read. Return all fields that were not read, none
    if an earlier run has read the whole corpus."""
    counts, fields = manifest.counts or {}, inputs.unread if reads_corpus else {}
    for name, share in fields.items():
        if remedy := inputs.task.warning_of(name):
            logger.warning("the field `%s` was not read (%s): %s", name, share, remedy)
    kept = {column.name for column in manifest.columns}
    for name, said in _WARNED.items():
        if counts.get(name) and not (name == "weights" and "weight" in kept):
            logger.warning(said, f"{counts[name]:,}")
    for key in _WARNED_KEYS:
        if number := counts.get(UNREAD_KEY + key):
            logger.warning("%s messages have the key `%s`, which was not read", f"{number:,}", key)
    return fields


def _text_bytes(records: RunRecords) -> int:
    """Return the bytes of text in finished units."""
    results = records.results.values()
    return sum(counts.bytes for result in results for counts in result.sources)


def _encode(run: Run, records: RunRecords, listed: Listed) -> Manifest:
    """Encode the units and write the data set."""
    output, inputs = run.settings.output, run.inputs
    try:
        begin_writing(run, records)
        with records.noting_failure(JobPart(0, 1)):
            settings = run_units(run, records)
    except TokenizerError:  # another command may do better, here too
        if not records.results:
            withdraw(output, records, inputs.splits)
        raise
    results = [records.results[unit.number] for unit in inputs.units]
    if not any(result.shards for result in results):
        failure = _no_document(output, inputs, results)
        withdraw(output, records, inputs.splits)
        raise failure
    remember(output, listed.recipe, len(inputs.units))
    manifest = commit(settings, inputs.corpus, run.tokenizer, run.audit, results)
    remove_records(output, job_first=True)
    return manifest


def _no_document(output: Place, inputs: Inputs, results: list[UnitResult]) -> CorpusError:
    corpus = inputs.corpus
    num_rejected = sum(result.rejected for result in results)
    files = f"{len(corpus.sources):,} input file{'s' if len(corpus.sources) > 1 else ''}"
    if not num_rejected:
        num_empty = sum(counts.empty for result in results for counts in result.sources)
        why = "every document is empty" if num_empty else "there is no record"
        return CorpusError(f"no text in {files}: {why}.")
    name = next(result.reject_file.file for result in results if result.reject_file)
    reject = json.loads(output.read(name).splitlines()[0])
    remedy = inputs.task.remedy(reject["reason"])
    return CorpusError(
        f"no usable document in {files}: {num_rejected:,} rejected, the first in {reject['file']}, "
        f"record {reject['record']}: {reject['reason']}.{remedy}"
    )
