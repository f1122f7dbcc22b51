"""The options of `pretokenize`: a dataclass whose docstrings are the help, and its checks."""

import codecs
import dataclasses
import inspect
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, ValidationError, convert

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.placement import usable_cores
from tokenfeed.pipeline.format.schema import RESERVED_NAMES, Column
from tokenfeed.tools.corpus.field_paths import check_name
from tokenfeed.tools.corpus.formats.registry import FALLBACK, FORMATS
from tokenfeed.tools.corpus.input_files import MAX_RECORD_BYTES, STANDARD_INPUT
from tokenfeed.tools.corpus.sources import is_split_name
from tokenfeed.tools.encoding.fim import FillInMiddle
from tokenfeed.tools.encoding.tasks.base import TaskEncoder
from tokenfeed.tools.encoding.tasks.registry import TASK_CLASSES, TaskName
from tokenfeed.tools.encoding.training import SMALLEST_VOCABULARY
from tokenfeed.tools.jobs.executors import Runner, check_installed
from tokenfeed.tools.jobs.run_records import JobPart
from tokenfeed.tools.shell.command_line import Page, parse_command, text
from tokenfeed.trainer.config.values import NotNegative, Positive, Size, flag_of

_OTHER_NAMES = {
    "--append": "another OUT (`train --shards A B` reads both as one)",
    "--strict": "--max-rejects 0",
}
_COMMON = ("task", "field", "tokenizer", "validation", "workers")
"""The options that --help shows."""
_EXAMPLES = """examples:
  texts, with a new tokenizer:    pretokenize corpus/ out/
  labelled rows of a table:       pretokenize reviews.csv out/ --task classify --field text=review
  conversations, for a model:     pretokenize chat.jsonl out/ --task chat --tokenizer Qwen/Qwen3-4B
"""
_GROUPS = {
    "task and tokenizer": (
        *("task", "field", "keep", "tokenizer", "vocab_size", "end_token", "add_special_tokens"),
        *("fim_rate", "fim_spm_rate"),
        *("chat_template", "template_argument"),
    ),
    "input": ("limit", "split", "validation", "exclude", "encoding", "max_rejects"),
    "speed and output": ("workers", "engine", "json"),
    "cluster and job array": ("runner", "part", "finish"),
    "rarely needed": (*("special_tokens_in_text", "shard_size", "max_record", "seed"),),
}
"""The options by the title of their group in the help."""
_LARGEST_VOCABULARY = 10_000_000
_KEPT_TYPES = ("float32", "int8", "int16", "int32")
"""Types of kept columns, the default first."""
_TRAINING = ("vocab_size", "seed")
"""Options of the trained tokenizer."""
_NEEDED = {
    "chat": "the one of the model that you train, with the special tokens of its chat template",
    "ids": "the one that made the ids",
}
"""The tokenizers of tasks that train none."""

_VocabSize = Annotated[
    int,
    Meta(
        ge=SMALLEST_VOCABULARY,
        le=_LARGEST_VOCABULARY,
        title="N",
        description=f"a whole number from {SMALLEST_VOCABULARY} (every byte has an id) to "
        f"{_LARGEST_VOCABULARY:,}",
    ),
]
_Rate = Annotated[float, Meta(ge=0, le=1, title="X", description="a share from 0 to 1")]
_Share = Annotated[float, Meta(ge=0, lt=1, title="SHARE", description="a share from 0 up to 1")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Tokenize a corpus once, into checksummed shards that a training run streams.

    The same command continues a run that was interrupted.
    """

    paths: tuple[Annotated[str, text("CORPUS... OUT")], ...]
    """CORPUS: files and folders. OUT, the last path: a new or empty folder for the data set, or the
    folder of an interrupted run. Every path may be an address, like s3://BUCKET/PATH."""
    task: TaskName = "lm"
    """What a record is."""
    field: tuple[Annotated[str, text("NAME=FIELD ...")], ...] = ()
    """The field or column of your records to read for each field NAME of the task, like
    text=review. A FIELD may be inside another (answers.text[0]), or a text made of several
    ('{context}\\n{question}'). Optional fields are in brackets. Labels and tags may be names or
    whole numbers."""
    keep: tuple[Annotated[str, text("NAME[=TYPE]")], ...] = ()
    """Also store the field NAME: a number for each token id (--task ids) or message (--task chat).
    TYPE: float32 (the default), int8, int16 or int32. Can be given several times."""
    tokenizer: Annotated[str, text("FILE|FOLDER|HUB-ID")] | None = None
    """A tokenizer.json, or the folder, address or Hub repository (ID[@REVISION]) that contains
    one. Default: train a tokenizer on a sample of the corpus."""
    vocab_size: _VocabSize = 32_768
    """Number of ids of the trained tokenizer."""
    end_token: Annotated[str, text("TOKEN")] | None = None
    """Token after every document and completion; with `--task ids`, the token that ends a row in
    files without an index. Default: the tokenizer's token with a usual name, like <|endoftext|>."""
    add_special_tokens: bool = False
    """Put the tokenizer's template, like [CLS] ... [SEP], around each row."""
    fim_rate: _Rate = 0.0
    """Share of the documents that are rearranged as prefix, suffix, middle, so that a model learns
    to fill in the middle (FIM)."""
    fim_spm_rate: _Rate = 0.5
    """Share of the documents of --fim-rate in which the suffix comes first (SPM)."""
    chat_template: Annotated[str, text("FILE")] | None = None
    """Template of --task chat. Default: chat_template.jinja or tokenizer_config.json of the
    tokenizer."""
    template_argument: tuple[Annotated[str, text("NAME=VALUE")], ...] = ()
    """Variable of the chat template. VALUE is JSON, or else a text. Can be given several times."""
    split: tuple[Annotated[str, text("NAME=GLOB")], ...] = ()
    """Put the files whose names or paths match GLOB into the split NAME. Can be given several
    times."""
    validation: _Share | None = None
    """Share of the records that go to the validation split, chosen by a hash of their text, among
    records without a split. Default: 0.01, or up to 0.1 for about 20 rows of 20 to 2,000 records;
    0.1 with labels; 0 if files belong to the split validation, or without labels, with --split."""
    limit: Positive | None = None
    """Keep N usable records of the split train, for a smaller first run: those whose texts have the
    least hashes. All records of other splits are kept. Default: all records."""
    exclude: tuple[Annotated[str, text("GLOB")], ...] = ()
    """Leave out files whose names or paths match GLOB. Can be given several times."""
    encoding: Annotated[str, text("NAME")] | None = None
    """Encoding of text that is not UTF-8, like latin-1, cp1252, shift_jis or gbk. A file that is
    UTF-8, or that begins with the mark of UTF-16, does not need it."""
    max_rejects: NotNegative | None = None
    """Stop after more than N rejected records; 0: at the first. Default: no limit."""
    workers: Positive | Literal["auto"] = "auto"
    """Number of processes. auto: one per usable core. The output does not depend on their
    number."""
    engine: Literal["auto", "tokenizers"] = "auto"
    """Library that encodes. auto: gigatoken if tests show that it returns the ids of tokenizers,
    else tokenizers."""
    json: bool = False
    """Print the summary as JSON."""
    runner: Runner = "local"
    """Where to encode: processes of this machine, or the workers of a Ray or Dask cluster. All
    machines must read CORPUS, and OUT if it is a folder. The output is the same with every
    runner."""
    part: Annotated[str, text("I/N")] | None = None
    """Encode only part I, counted from 0, of N parts: for job arrays on machines that share CORPUS,
    and OUT if it is a folder. The part that ends last makes the data set."""
    finish: bool = False
    """Make the data set although parts are missing: encode what they did not finish."""
    special_tokens_in_text: Literal["plain", "split"] = "plain"
    """How to encode the text of a special token inside a document: as plain text, or as its id."""
    shard_size: Size | Literal["auto"] = "auto"
    """Bytes of text per shard, like 256MB. auto: a 64th of the input, 8MB to 256MB."""
    max_record: Size = MAX_RECORD_BYTES
    """Largest size of a record, decompressed. A larger record is rejected. Default: 64MB."""
    seed: NotNegative = 0
    """Seed of the sample that trains a tokenizer, and of --fim-rate."""

    @property
    def corpus(self) -> tuple[str, ...]:
        """The input: all paths but the last."""
        return tuple(p if "://" in p else str(Path(p)) for p in map(str, self.paths[:-1]))

    @property
    def num_workers(self) -> int:
        """Number of processes on this machine."""
        return usable_cores() if self.workers == "auto" else self.workers

    @property
    def job_part(self) -> JobPart:
        """The units of this process: a part of them, or all."""
        return JobPart.from_text(self.part or "0/1")

    @property
    def splits(self) -> tuple[tuple[str, str], ...]:
        """Splits, each with the pattern of its files."""
        parted = (given.partition("=") for given in self.split)
        return tuple((name, glob) for name, _, glob in parted)

    @property
    def fields(self) -> dict[str, str]:
        """The given fields, by the names that the task uses."""
        parted = (given.partition("=") for given in self.field)
        return {own: name for own, _, name in parted}

    def make_task(self) -> TaskEncoder:
        """Make the task with its fields. Labels have no numbers yet."""
        given: dict[str, Any] = {}
        if self.task == "chat":
            given["splits_special"] = self.special_tokens_in_text == "split"
        if self.fim_rate and self.task == "lm":
            given["fim"] = FillInMiddle(
                rate=self.fim_rate, spm_rate=self.fim_spm_rate, seed=self.seed
            )
        return TASK_CLASSES[self.task](
            names=self.fields,
            keep=tuple(map(_kept_column, self.keep)),
            add_special_tokens=self.add_special_tokens,
            **given,
        )

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The variables that `template_argument` gives to the chat template."""
        found: dict[str, Any] = {}
        for given in self.template_argument:
            name, is_given, value = given.partition("=")
            if not is_given or not name.isidentifier():
                raise ConfigError(
                    f"`--template-argument` {given!r}: expected NAME=VALUE, like "
                    "enable_thinking=false."
                )
            try:
                found[name] = json.loads(value)
            except ValueError:
                found[name] = value
        return found

    def __post_init__(self) -> None:
        """Reject options that cannot work, before any file is read.

        Raises:
            ConfigError: Names the option.
        """
        self._check_fields()
        self._check_together()
        for given, (name, glob) in zip(self.split, self.splits, strict=True):
            if not is_split_name(name) or not glob:
                raise ConfigError(
                    f"`--split` {given!r}: expected a name and a pattern, like test='*.test.jsonl'."
                )
        for path in self.paths if self.split else ():
            name, is_pair, _ = str(path).partition("=")
            if is_pair and is_split_name(name) and not os.path.lexists(path):
                raise ConfigError(f"`{path}`: --split takes one value. Write --split {path!r}.")
        if self.encoding is not None:
            _check_encoding(self.encoding)
        _ = self.template_arguments  # raises if wrong

    def _check_fields(self) -> None:
        """Reject fields that the task does not read, or that are named twice or not at all."""
        own_names = TASK_CLASSES[self.task].kinds
        seen: set[str] = set()
        for given in self.field:
            own, _, name = given.partition("=")
            if not name or own not in own_names:
                example = f"{next(iter(own_names))}={name or own or 'body'}"
                raise ConfigError(
                    f"`--field` {given!r}: expected NAME=FIELD, like {example}, where NAME is what "
                    f"`--task {self.task}` reads: {', '.join(own_names)}. Put paths before options."
                )
            if own in seen:
                raise ConfigError(f"`--field` {given!r}: {own} is named twice. Name one field.")
            seen.add(own)
            check_name(name)
        task = self.make_task()
        if self.keep and not task.keeps:
            able = [f"`--task {name}`" for name, task in TASK_CLASSES.items() if task.keeps]
            raise ConfigError(
                f"`--keep` {self.keep[0]}: `--task {self.task}` reads no number for each token. "
                f"Use {' or '.join(able)}, or leave it out."
            )
        names = [*task.names.values(), *(column.name for column in task.keep)]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"`--task {self.task}` needs fields of different names, got {', '.join(names)}."
            )

    def _check_together(self) -> None:
        """Reject options that contradict each other, or have no effect on this command."""
        fields = dataclasses.fields(self)
        given = {field.name for field in fields if getattr(self, field.name) != field.default}
        for name in _TRAINING:
            if name in given and self.tokenizer and not (name == "seed" and self.fim_rate):
                raise ConfigError(
                    f"`{flag_of(name)}` {getattr(self, name)}: is for a tokenizer that is trained, "
                    "and `--tokenizer` names one. Leave one of them out."
                )
        useless = {"chat_template", "template_argument"} if self.task != "chat" else set()
        if self.task != "lm":
            useless |= {"fim_rate", "fim_spm_rate"}
        if self.task == "chat":
            useless |= {"end_token", "add_special_tokens"}
        if self.task == "ids":
            useless |= {"add_special_tokens", "vocab_size", "special_tokens_in_text", "engine"}
        for name in sorted(given & useless):
            raise ConfigError(
                f"`{flag_of(name)}` has no effect with `--task {self.task}`. Leave it out."
            )
        if self.task in _NEEDED and not self.tokenizer:
            raise ConfigError(f"`--task {self.task}` needs `--tokenizer`: {_NEEDED[self.task]}.")
        if self.paths[-1:] == (STANDARD_INPUT,):
            raise ConfigError("`-`: OUT, the last path, is a folder. Give a new or empty folder.")
        if "" in self.exclude:
            raise ConfigError("`--exclude` is empty: expected a GLOB. Is a shell variable unset?")
        if "fim_spm_rate" in given and not self.fim_rate:
            raise ConfigError(
                f"`--fim-spm-rate` {self.fim_spm_rate}: has no effect without `--fim-rate`. Give "
                "both, or leave it out."
            )
        sharing = {
            "runner": f"--runner {self.runner}",
            "part": f"--part {self.part}",
            "finish": "--finish",
        }
        used = [words for name, words in sharing.items() if name in given]
        if not used:
            return
        check_installed(self.runner)
        _ = self.job_part  # raises if wrong
        if used[1:]:
            raise ConfigError(f"`{used[0]}` and `{used[1]}`: leave one of them out.")
        if STANDARD_INPUT in self.corpus:
            raise ConfigError(
                f"`-`: only this machine has standard input, and `{used[0]}` needs files that all "
                "machines share. Write it to a file there."
            )
        if "workers" in given and "runner" in given:
            raise ConfigError(f"`--workers`: has no effect beside `{used[0]}`. Leave it out.")


def _check_encoding(name: str) -> None:
    """Reject a name that is not the encoding of a text.

    Raises:
        ConfigError: Names the option.
    """
    try:
        _ = "".encode(name)
        codecs.getincrementaldecoder(name)
    except (LookupError, ValueError):
        raise ConfigError(
            f"`--encoding`={name}: Python knows no encoding of texts with this name. Give one like "
            "latin-1, cp1252, shift_jis, gbk, koi8-r or utf-16-le."
        ) from None


def parse_options() -> Options:
    """Read the command line."""
    page = Page(
        about=f"{inspect.getdoc(Options)} {input_formats()}",
        common=_COMMON,
        groups=_GROUPS,
        more={"task": f" {records_of_tasks()}", "field": f" {fields_of_tasks()}"},
        examples=_EXAMPLES,
        other_names=_OTHER_NAMES,
    )
    return parse_command(Options, "pretokenize", page=page)


def _kept_column(given: str) -> Column:
    """Return the column that `--keep` names.

    Raises:
        ConfigError: The name or the type cannot be used.
    """
    name, _, dtype = given.partition("=")
    try:
        column = convert(
            {"name": name, "dtype": dtype or _KEPT_TYPES[0], "per": "token"}, type=Column
        )
    except ValidationError:
        column = None
    if column is None or column.dtype not in _KEPT_TYPES:
        raise ConfigError(
            f"`--keep` {given!r}: expected NAME or NAME=TYPE, where NAME has letters, digits and _ "
            f"only, and TYPE is {', '.join(_KEPT_TYPES)}."
        )
    if name in RESERVED_NAMES:
        raise ConfigError(
            f"`--keep` {given!r}: shards or batches use the name {name} themselves. Rename the "
            "column."
        )
    return column


def input_formats() -> str:
    """The formats of a corpus, each by its first file ending."""
    formats = [
        format_ for format_ in FORMATS.values() if format_.endings and format_ is not FALLBACK
    ]
    lines = [format_.endings[0] for format_ in formats if format_.is_text]
    others = [format_.endings[0] for format_ in formats if not format_.is_text]
    return (
        f"Input: text and source files (a file is a document), {', '.join(lines)}, each also .gz, "
        f".zst, .bz2 or .xz; {', '.join(others)}, folders of `save_to_disk`; .bin, "
        ".npy and .ds of token ids for `--task ids`; - for standard input; "
        "hub:OWNER/NAME[@REVISION]; hf://datasets/OWNER/NAME[@REVISION][/PATH]."
    )


def records_of_tasks() -> str:
    """What a record is in each task."""
    return "; ".join(f"{name}: {task.record}" for name, task in TASK_CLASSES.items()) + "."


def fields_of_tasks() -> str:
    """The fields that each task reads; those in brackets are read only if they are named."""
    lists = (f"{name}: {', '.join(_fields(task))}" for name, task in TASK_CLASSES.items())
    return "; ".join(lists) + "."


def _fields(task: type[TaskEncoder]) -> Iterator[str]:
    read = task().names
    return (own if own in read else f"[{own}]" for own in task.kinds)
