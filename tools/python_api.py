"""`tokenfeed.pretokenize`: the command `pretokenize` for scripts and notebooks.

Paths and addresses are read as by the command. Python objects are first written to a temporary file
of JSON Lines, which workers can cut and read. A second call compares the checksum of this file, and
continues if the records are the same.

This file imports little, so that the program of the workers starts, and imports, beside the imports
of this process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools.jobs import executors
from tokenfeed.tools.jobs.executors import Runner, end_early, start_early
from tokenfeed.tools.pretokenize import needs_workers

if TYPE_CHECKING:
    from tokenfeed.pipeline.format.manifest import Manifest
    from tokenfeed.tools.corpus.spool import Spooled
    from tokenfeed.tools.encoding.tasks.registry import TaskName
    from tokenfeed.tools.pretokenizing.options import Options
    from tokenfeed.tools.pretokenizing.summary import Summary

_RECORDS = "records"
"""Name of Python objects in origins and errors."""
_FEW_RECORDS = 1_000
"""Records that this process encodes before workers would start, unless they are very long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretokenized:
    """A finished data set. `str()` is the output of the command."""

    out: str
    """Folder or address, for `ShardLoader`."""
    manifest: Manifest
    """Splits, shards and tokenizer."""
    summary: Summary
    """The figures that the command prints with `--json`."""

    @property
    def rejects(self) -> list[dict[str, Any]]:
        """The rejected records: `file`, number of the `record` from 0, and `reason` of each. A file
        that was left out has no `record`."""
        from tokenfeed.pipeline.format.store import open_place

        lines = open_place(self.out).read(self.manifest.rejects.file).splitlines()
        return [json.loads(line) for line in lines]

    def __str__(self) -> str:
        from tokenfeed.tools.data_sets.inspection import describe

        return describe(self.manifest, self.summary.facts())


def pretokenize(
    source: object,
    out: str | os.PathLike[str],
    *,
    task: TaskName = "lm",
    field: Mapping[str, str] | None = None,
    keep: Mapping[str, str] | Sequence[str] = (),
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 32_768,
    end_token: str | None = None,
    add_special_tokens: bool = False,
    fim_rate: float = 0.0,
    fim_spm_rate: float = 0.5,
    chat_template: str | os.PathLike[str] | None = None,
    template_argument: Mapping[str, object] | None = None,
    limit: int | None = None,
    split: Mapping[str, str] | None = None,
    validation: float | None = None,
    exclude: Sequence[str] = (),
    encoding: str | None = None,
    max_rejects: int | None = None,
    workers: int | Literal["auto"] = "auto",
    engine: Literal["auto", "tokenizers"] = "auto",
    runner: Runner = "local",
    special_tokens_in_text: Literal["plain", "split"] = "plain",
    shard_size: int | str = "auto",
    max_record: int | str = 64_000_000,
    seed: int = 0,
) -> Pretokenized:
    """Tokenize a corpus once, into checksummed shards, like the command `pretokenize`.

    The same call continues a run that was interrupted, and recognises a data set that it has
    finished. It works in notebooks and in scripts without `if __name__ == "__main__"`.

    Args:
        source: What to read:

            - a path or address, or a list of them, as the command takes them;
            - a `datasets.Dataset` or `IterableDataset`;
            - a table of pyarrow, pandas, polars or anything else that exports Arrow, or a column;
            - a list of dicts, or a function without arguments that returns an iterator of dicts, of
              texts or of tables;
            - a dict from split name to one of the sources above but paths, such as a
              `datasets.DatasetDict`. The option `split` is for paths.
        out: A new or empty folder, the folder of an interrupted run, or an address.
        task: The content of a record. `pretokenize --help-all` describes this and all options
            below. They have the same names and defaults.
        field: Names of fields by the names that the task uses: `{"text": "content"}`.
        keep: Names of columns with a number per id, or their types by name:
            `{"advantage": "float32"}`.
        tokenizer: A tokenizer.json, a folder with one, or a Hub id. Default: train one.
        template_argument: Variables of the chat template: `{"enable_thinking": False}`.
        split: Patterns of file names by split: `{"test": "*.test.jsonl"}`.

    Raises:
        ConfigError: An option is wrong, or `out` contains other files.
        CorpusError: There is no usable record, or more are rejected than allowed.
        KeyboardInterrupt: Ctrl-C. Finished units are kept; the same call continues.
    """
    given = dict(locals())
    words = {name: value for name, value in given.items() if name not in ("source", "out")}
    with ExitStack() as stack:
        stack.callback(end_early)
        if runner == "local" and (task in executors.IN_CHILDREN or _is_large(source)):
            start_early(has_texts=task != "ids")
        return _pretokenized(source, out, words, stack)


def _is_large(source: object) -> bool:
    """Return whether workers will probably be needed. A wrong guess only costs time."""
    if isinstance(source, Mapping):
        return any(map(_is_large, source.values()))
    if paths := _paths(source):
        return needs_workers([*paths])
    return len(source) > _FEW_RECORDS if isinstance(source, Sized) else True


def _pretokenized(
    source: object, out: str | os.PathLike[str], words: dict[str, Any], stack: ExitStack
) -> Pretokenized:
    """Do the work of `pretokenize`.

    Args:
        source: See `pretokenize`.
        out: See `pretokenize`.
        words: The other arguments of `pretokenize`.
        stack: Deletes temporary files when it ends.
    """
    from tokenfeed.pipeline.format.manifest import Manifest
    from tokenfeed.tools.corpus.records import shown_names
    from tokenfeed.tools.pretokenizing.make import make_dataset
    from tokenfeed.tools.pretokenizing.options import Options
    from tokenfeed.trainer.config.values import setting_of

    words = dict(words)
    for name in ("field", "split", "template_argument"):
        if not isinstance(words[name] or {}, Mapping):
            raise ConfigError(f"`{name}`: expected a dict, got {type(words[name]).__name__}.")
        words[name] = words[name] or {}
    try:
        arguments = {name: json.dumps(value) for name, value in words["template_argument"].items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`template_argument`: cannot be written as JSON: {error}.") from None
    words["template_argument"] = arguments
    for name in ("field", "split", "template_argument", "keep", "exclude"):
        words[name] = _texts(words[name])
    for name in ("tokenizer", "chat_template"):
        words[name] = None if words[name] is None else _path(name, words[name])
    place = _path("out", out)
    paths = _paths(source)
    by_split = None if paths else _by_split(source)
    kinds = get_type_hints(Options, include_extras=True)
    words = {name: setting_of(kinds[name], value, f"`{name}`") for name, value in words.items()}
    options = Options(paths=(*(paths or by_split or ()), place), **words)
    if isinstance(source, Mapping) and options.make_task().fields.keys() <= source.keys():
        raise ConfigError(
            f"source: its keys are {shown_names(source)}, expected names of splits. To give "
            "columns, use `pyarrow.table(source)`."
        )
    if by_split and options.runner != "local":
        raise ConfigError(
            f"`runner` {options.runner!r}: its workers cannot read objects of this process. Write "
            "them to a file that all machines share, and give its path."
        )

    def spool_all() -> list[Spooled]:
        return [
            _spooled(name, records, of_split, options, stack)
            for name, (of_split, records) in (by_split or {}).items()
        ]

    summary = make_dataset(options, spool_all)
    return Pretokenized(out=summary.out, manifest=Manifest.read(summary.out), summary=summary)


def _texts(given: Any) -> Any:
    """Return one text or several as a tuple, as on a command line; another value as it is, to be
    rejected."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Mapping):
        return tuple(f"{name}={value}" for name, value in given.items())
    return tuple(given) if isinstance(given, Iterable) else given


def _path(name: str, given: object) -> str:
    """Return a path as text.

    Raises:
        ConfigError: It is another object.
    """
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str):
        raise ConfigError(
            f"`{name}`: got {type(given).__name__}, expected a path. Save the object to a file "
            "and give its path."
        )
    return path


def _paths(source: object) -> tuple[str, ...] | None:
    """Return the paths of a source; None if the source has records.

    Raises:
        ConfigError: A list has paths and records.
    """
    sources = source if isinstance(source, list | tuple) else [source]
    paths = [os.fspath(path) for path in sources if isinstance(path, str | os.PathLike)]
    if paths and len(paths) < len(sources):
        raise ConfigError(
            f"source: the list has paths, like {paths[0][:40]!r}, and records. Give either, or a "
            "function that returns texts and dicts."
        )
    return tuple(paths) or None


def _by_split(source: object) -> dict[str, tuple[str | None, object]]:
    """Return records and the name of their split, by their name in origins."""
    if isinstance(source, Mapping):
        if not source:
            raise ConfigError("source: is an empty dict, which names no split. Give some records.")
        if with_paths := [name for name, given in source.items() if _paths(given)]:
            raise ConfigError(
                f"source: the split {with_paths[0]!r} has paths. Give a list of all paths, and put "
                "them into splits by `split`. To give columns, use `pyarrow.table(source)`."
            )
        return {f"{_RECORDS}/{name}": (str(name), records) for name, records in source.items()}
    return {_RECORDS: (None, source)}


def _spooled(
    name: str, records: object, split: str | None, options: Options, stack: ExitStack
) -> Spooled:
    """Write records to a temporary file, which is deleted when `stack` ends."""
    from tokenfeed.tools.corpus.field_paths import possible_columns
    from tokenfeed.tools.corpus.records import FieldKind
    from tokenfeed.tools.corpus.spool import NAMED_RECORDS, class_names, json_lines, spool
    from tokenfeed.tools.encoding.tasks.chat import ChatEncoder
    from tokenfeed.tools.jobs.progress_bar import bytes_read

    is_any_layout = options.task == "chat" and not options.field
    fields = ChatEncoder.usual_fields() if is_any_layout else options.make_task().fields
    if options.task == "ids" and not options.field:
        fields = {**fields, "attention_mask": FieldKind.OPTIONAL_JSON}
    folder = None if "://" in options.paths[-1] else Path(options.paths[-1])
    with bytes_read(name) as advance:
        blocks = json_lines(name, records, possible_columns(fields), named=NAMED_RECORDS)
        file = spool(name, blocks, folder, split=split, advance=advance)
    stack.callback(file.file.close)
    return file._replace(class_names=class_names(records))
