"""The options of `pretokenize`: what the command line says, and what it means.

tyro turns the dataclass into the command line: a field's docstring is its help, unless the help
depends on what is registered.
"""

import dataclasses
import functools
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.cores import usable_cores
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE
from tokenfeed.pipeline.format.schema import Task
from tokenfeed.pipeline.sizes import bytes_of
from tokenfeed.tools.console import parse_words
from tokenfeed.tools.corpus.parts import MAX_RECORD_BYTES
from tokenfeed.tools.corpus.patterns import is_split_name
from tokenfeed.tools.corpus.stdin import STANDARD_INPUT
from tokenfeed.tools.described import fields_of_tasks, input_formats, records_of_tasks
from tokenfeed.tools.encoding.task import TaskEncoder
from tokenfeed.tools.encoding.tasks import TASK_CLASSES
from tokenfeed.tools.encoding.training import SMALLEST_VOCABULARY
from tokenfeed.tools.machines import check_machines
from tokenfeed.tools.outputs.output import Output, open_output
from tokenfeed.tools.run.clusters import Runner

__all__ = ["Options", "parse_options"]

_LARGEST_VOCABULARY = 10_000_000
_LONGEST_SPLIT = 255
"""Bytes in the name of a folder."""
_TRAINING = ("vocab_size", "seed")
"""Options of a tokenizer that is trained."""
_FIELD = (
    "The fields or columns that hold what a task reads, where they have other names than these; "
    f"those in brackets are read only if named. {fields_of_tasks()} Labels and tags are names or "
    "whole numbers."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Tokenize a corpus once, into checksummed shards that a training run streams.

    The same command continues a run that was interrupted.
    """

    paths: tyro.conf.Positional[
        Annotated[
            tuple[str, ...],
            tyro.conf.arg(metavar="CORPUS... OUT", help_behavior_hint="(required)"),
        ]
    ]
    """Folders, read recursively, and files; then a new or empty folder for the data set, or the one
    of an interrupted run. Each may be the address of a store, like s3://BUCKET/PATH."""
    task: Annotated[Task, tyro.conf.arg(help=f"What a record is. {records_of_tasks()}")] = "lm"
    tokenizer: Annotated[
        str | None,
        tyro.conf.arg(metavar="FILE|FOLDER|HUB-ID", help_behavior_hint="(default: train one)"),
    ] = None
    """A tokenizer.json, a folder that holds one, the address of either, or a hub id, perhaps with
    @REVISION."""
    vocab_size: int = 32_768
    """Ids of a tokenizer that is trained on a sample of the corpus."""
    end_token: Annotated[
        str | None, tyro.conf.arg(metavar="TOKEN", help_behavior_hint="(default: by usual names)")
    ] = None
    """Ends every document and completion."""
    add_special_tokens: bool = False
    """Put the tokenizer's template, like [CLS] ... [SEP], around each row."""
    special_tokens_in_text: Literal["plain", "split"] = "plain"
    """Special-token text inside a document: plain text, or split into its id."""
    field: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]],
        tyro.conf.arg(metavar="NAME=FIELD ...", help=_FIELD),
    ] = ()
    split: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=GLOB")
    ] = ()
    """Put files into the split NAME, by their names or paths below the given folders."""
    validation: Annotated[
        float | None,
        tyro.conf.arg(
            metavar="PART",
            help_behavior_hint="(default: 0.01, about 10 M tokens at most; 0 with splits)",
        ),
    ] = None
    """Part of the other records put aside for validation, by a hash of their text."""
    exclude: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="GLOB")
    ] = ()
    """Leave out names, or paths below the given folders."""
    shard_size: str = "auto"
    """Text in a shard, like 256MB; auto: a 64th of the input, from 8MB to 256MB."""
    max_record: str = f"{MAX_RECORD_BYTES // 10**6}MB"
    """Longest record in its file. A longer one is dropped while it is read, and rejected."""
    workers: int | Literal["auto"] = "auto"
    """Processes; auto: one for each core that the machine or container grants. No influence on
    the output."""
    runner: Runner = "local"
    """Who encodes: processes of this machine, or the workers of a Ray or Dask cluster, which must
    share CORPUS, and OUT if it is a folder. No influence on the output."""
    engine: Literal["auto", "tokenizers", "gigatoken"] = "auto"
    """auto: the fast gigatoken where it gives the same ids as tokenizers, which is checked."""
    verify_ids: bool = False
    """Encode everything by tokenizers too, and compare: takes as long as without gigatoken."""
    strict: bool = False
    """End at the first record that cannot be used."""
    max_rejects: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: any number)")
    ] = None
    """End when more records than this cannot be used."""
    part: Annotated[str | None, tyro.conf.arg(metavar="I/N", help_behavior_hint="")] = None
    """Encode only part I, counted from 0, of N: for job arrays and shells on machines that share
    CORPUS, and OUT if it is a folder. `--finish` makes the data set of all parts."""
    finish: bool = False
    """Encode nothing: make the data set of what all parts have left."""
    seed: int = 0
    """Draws the sample for training a tokenizer."""
    json: bool = False
    """Print the summary as JSON."""

    @property
    def corpus(self) -> tuple[str, ...]:
        """The input: all paths but the last."""
        return tuple(p if "://" in p else str(Path(p)) for p in map(str, self.paths[:-1]))

    @property
    def out(self) -> Path:
        """The output folder: the last path, which is no address then."""
        return Path(self.paths[-1])

    @property
    def output(self) -> Output:
        """The place that the last path names."""
        return open_output(self.paths[-1])

    @property
    def shard_bytes(self) -> int | None:
        """Bytes that `shard_size` means; None for auto."""
        if self.shard_size == "auto":
            return None
        return bytes_of(self.shard_size, flag="--shard-size", otherwise="auto")

    @property
    def max_record_bytes(self) -> int:
        """Bytes that `max_record` means."""
        return bytes_of(self.max_record, flag="--max-record")

    @property
    def num_workers(self) -> int:
        """Processes that `workers` means here."""
        return usable_cores() if self.workers == "auto" else self.workers

    @property
    def splits(self) -> tuple[tuple[str, str], ...]:
        """Splits, each with a pattern of names or paths whose files belong to it."""
        parted = (given.partition("=") for given in self.split)
        return tuple((name, glob) for name, _, glob in parted)

    @property
    def allowed_rejects(self) -> int | None:
        """Records that may be unusable; None for any number."""
        return 0 if self.strict else self.max_rejects

    @property
    def fields(self) -> dict[str, str]:
        """The fields that were given, by the task's own names for them."""
        parted = (given.partition("=") for given in self._given_fields())
        return {own: name for own, _, name in parted}

    def make_task(self) -> TaskEncoder:
        """The task, with its fields; labels have no numbers yet."""
        given: dict[str, Any] = {**self.fields}
        return TASK_CLASSES[self.task](add_special_tokens=self.add_special_tokens, **given)

    def check(self) -> None:
        """Refuse what cannot work, before anything is read.

        Raises:
            ConfigError: Names the option.
        """
        self._check_fields()
        if len(self.paths) < 2:
            raise ConfigError(
                "two paths are needed: CORPUS... (folders or files) and OUT (a folder)."
            )
        if "" in self.paths:
            raise ConfigError("a path is empty: expected CORPUS... OUT; is a variable not set?")
        self._check_meaning()
        if self.validation is not None and not 0 <= self.validation < 1:
            raise ConfigError(f"`--validation` {self.validation}: expected a part from 0 up to 1.")
        if not SMALLEST_VOCABULARY <= self.vocab_size <= _LARGEST_VOCABULARY:
            raise ConfigError(
                f"`--vocab-size` {self.vocab_size}: expected {SMALLEST_VOCABULARY} (every byte has "
                f"an id) to {_LARGEST_VOCABULARY:,}."
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"`--seed` {self.seed}: expected 0 to 2^64 - 1.")
        if self.num_workers < 1:
            raise ConfigError(f"`--workers` {self.workers}: expected at least 1, or auto.")
        for name in ("tokenizer", "end_token"):
            if getattr(self, name) == "":
                raise ConfigError(f"`{_flag(name)}` is empty: expected a name.")
        for given in self.split:
            name, _, glob = given.partition("=")
            if len(os.fsencode(name)) > _LONGEST_SPLIT:
                raise ConfigError(
                    f"`--split` {name[:40]}...: the name has {len(os.fsencode(name))} bytes, at "
                    f"most {_LONGEST_SPLIT} fit into the name of a folder."
                )
            if not is_split_name(name) or not glob:
                raise ConfigError(
                    f"`--split` {given!r}: expected a name and a pattern, like test='*.test.jsonl'."
                )
        if self.max_rejects is not None and (self.max_rejects < 0 or self.strict):
            raise ConfigError(
                f"`--max-rejects` {self.max_rejects}: expected at least 0, and no `--strict`."
            )
        if self.verify_ids and self.engine == "tokenizers":
            raise ConfigError(
                "`--verify-ids` compares with what `--engine tokenizers` makes: leave one of them "
                "out."
            )
        _ = self.shard_bytes, self.max_record_bytes  # raise if not a size
        self._check_tokenizer()

    def _check_fields(self) -> None:
        """Refuse fields that the task does not read, and those named twice or not at all."""
        own_names = TASK_CLASSES[self.task].kinds
        seen: set[str] = set()
        for given in self._given_fields():
            own, _, name = given.partition("=")
            if not name or own not in own_names:
                raise ConfigError(
                    f"`--field` {given!r}: expected NAME=FIELD, where NAME is what `--task "
                    f"{self.task}` reads: {', '.join(own_names)}. Put paths before options."
                )
            if own in seen:
                raise ConfigError(f"`--field` {given!r}: {own} is named twice. Name one field.")
            seen.add(own)
        names = [*self.make_task().named.values()]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"`--task {self.task}` needs fields of different names, got {', '.join(names)}."
            )

    def _given_fields(self) -> list[str]:
        """What stands behind each `--field`, one after the other."""
        return [given for together in self.field for given in together or ("",)]

    def _check_meaning(self) -> None:
        """Refuse options that have no effect on this command."""
        given = {field.name for field in dataclasses.fields(self) if self._is_given(field)}
        for name in _TRAINING:
            if name in given and self.tokenizer:
                raise ConfigError(
                    f"`{_flag(name)}` {getattr(self, name)}: is for a tokenizer that is trained, "
                    "and `--tokenizer` names one. Leave one of them out."
                )
        check_machines(
            runner=self.runner,
            part=self.part,
            finish=self.finish,
            given=given,
            is_stdin=STANDARD_INPUT in self.corpus,
        )

    def _is_given(self, field: "dataclasses.Field[Any]") -> bool:
        return bool(getattr(self, field.name) != field.default)

    def _check_tokenizer(self) -> None:
        """Refuse a tokenizer that is no regular file: reading a pipe might never end."""
        path = Path(self.tokenizer or "")
        path = path / TOKENIZER_FILE if path.is_dir() else path
        if self.tokenizer and path.exists() and not path.is_file():
            raise ConfigError(
                f"`--tokenizer` {self.tokenizer}: is no regular file. Give a tokenizer.json, a "
                "folder that holds one, or a hub id."
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parse_options() -> Options:
    """Read the command line. tyro takes only paths that stand together; the others are added."""
    parse = functools.partial(
        tyro.cli,
        Options,
        prog="pretokenize",
        description=f"{inspect.getdoc(Options)} {input_formats()}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    options: Options
    options, others = parse_words(lambda: parse(return_unknown_args=True))
    if any(other.startswith("-") and other != "-" for other in others):
        parse_words(parse)  # raises: the message has what may have been meant
    return dataclasses.replace(options, paths=(*options.paths, *others))
