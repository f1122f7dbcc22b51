"""What `pretokenize --append` adds rows to: a finished data set, and the input files it has.

The new files are tokenized as a data set of their own, in a hidden folder of the first. So a run
continues after a kill like any other. Then `grow` links the new shards into the first. An input
file that the data set has already is left out, by a checksum of its bytes. The lines of appended
files in sources.jsonl have this checksum. For files of the first run, `.made_by.json` has size and
time, which prove that a file is unchanged, and so its checksum can still be made.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import xxhash

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.data_set import refuse_difference
from tokenfeed.pipeline.format.manifest import MANIFEST_FILE, Manifest, read_checked
from tokenfeed.pipeline.format.schema import is_kept
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX
from tokenfeed.pipeline.format.store import LocalStore, Place
from tokenfeed.tools.corpus.blocks import Blocks
from tokenfeed.tools.corpus.input_files import InputFile, size_and_state
from tokenfeed.tools.corpus.locations import Location
from tokenfeed.tools.corpus.sources import Corpus
from tokenfeed.tools.encoding.labels import Labels
from tokenfeed.tools.encoding.tasks import TASK_CLASSES
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.jobs.claim import files_made_of
from tokenfeed.tools.jobs.run_records import alone_in_folder
from tokenfeed.tools.pretokenizing.options import Options

_HIDDEN = ".append"


class NothingNew(Exception):
    """The data set has every input file already."""


@dataclass(slots=True)
class Onto:
    """A data set that gets more rows, and the input files that it has."""

    store: LocalStore
    manifest: Manifest
    checksums: set[str]
    """Of the bytes of its input files, as far as they are known."""
    unproved: dict[str, tuple[int, int | str] | None]
    """Input files without a checksum: size and state when they were read, None if unknown."""
    skipped: int = 0
    """Number of input files that were left out, because the data set has them."""
    hidden: LocalStore = field(init=False)
    """The folder of the new rows, until they are part of the data set."""
    folder: str = ""
    """The folder that relative names in `unproved` start from."""
    validation: float | None = None
    """The share of the records for validation of the first run; None if unknown."""
    _of_size: dict[int, list[str]] = field(init=False)
    """Names of the files of this machine in `unproved` whose state is known, by size."""
    _lost: dict[tuple[int, int | str], str] = field(init=False, default_factory=dict)
    """Names of these files that changed or are missing, by their size with their time, and by
    their size with their name without folders."""

    def __post_init__(self) -> None:
        self.hidden = LocalStore(self.store.folder / _HIDDEN)
        self._of_size = {}
        for name, recorded in self.unproved.items():
            if recorded is not None and isinstance(recorded[1], int):
                self._of_size.setdefault(recorded[0], []).append(name)

    @classmethod
    @contextmanager
    def opened(cls, output: Place) -> Iterator[Self]:
        """Lock a finished data set, and read which input files it has.

        Raises:
            ConfigError: There is no finished data set, or another command is writing there.
            ManifestError: The manifest or sources.jsonl is damaged.
        """
        if not isinstance(output, LocalStore) or not output.exists(MANIFEST_FILE):
            raise ConfigError(
                f"`--append`: {output} is not a finished data set in a folder of this machine. "
                "Leave `--append` out to make one."
            )
        with alone_in_folder(output):
            manifest, (files, folder, share) = Manifest.read(output), files_made_of(output)
            checksums: set[str] = set()
            unproved: dict[str, tuple[int, int | str] | None] = {}
            for line in read_checked(output, manifest.sources).splitlines():
                source = json.loads(line)
                if "xxh3" in source:
                    checksums.add(source["xxh3"])
                elif source["path"]:
                    unproved[source["path"]] = files.get(source["path"])
            onto = cls(output, manifest, checksums, unproved, folder=folder, validation=share)
            onto._remove_committed()
            yield onto

    def options(self, options: Options) -> Options:
        """Return the options of the run that makes the new rows. Options that the user left out are
        those of the data set."""
        tokenizer = self.manifest.tokenizer
        task: str = options.task
        chosen: dict[str, Any] = {
            "append": False,
            "paths": (*options.paths[:-1], str(self.hidden.folder)),
            "tokenizer": options.tokenizer or str(self.store.folder / tokenizer.file),
        }
        if task == "lm":
            chosen["task"] = task = self.manifest.task
        if task not in ("chat", "ids"):
            loaded, token = self.tokenizer, None
            if tokenizer.end_id is not None and tokenizer.end_id != loaded.end_id:
                token = loaded.tokenizer.id_to_token(tokenizer.end_id)
            chosen["end_token"] = options.end_token or token
            chosen["add_special_tokens"] = tokenizer.special_tokens_added
        kept = [column for column in self.manifest.columns if is_kept(column.name)]
        if TASK_CLASSES[task].keeps:
            given = tuple(f"{column.name}={column.dtype}" for column in kept)
            chosen["keep"] = options.keep or given
        if options.task != "ids":
            chosen["special_tokens_in_text"] = tokenizer.special_tokens_in_text
        return replace(options, **chosen)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the data set, with the usual end token."""
        info = self.manifest.tokenizer
        json_bytes = read_checked(self.store, info)
        return TextTokenizer.load(json_bytes, origin=self.store.path(info.file))

    def without_known(self, corpus: Corpus) -> Corpus:
        """Return the input files that the data set does not have, with their checksums.

        Raises:
            NothingNew: It has all of them.
            ConfigError: It may have a file under this name or another one, and nothing says whether
                the content is the same.
        """
        new: list[InputFile] = []
        for source in corpus.sources:
            recorded = self.unproved.get(source.name)
            if recorded == (source.bytes, source.state):
                continue
            xxh3 = _checksum(source.path)
            self._prove(source.bytes)
            if xxh3 in self.checksums:
                continue
            if known := self._may_be(source):
                raise ConfigError(
                    f"`--append`: {source.name} may be the input file {known} that {self.store} "
                    "has already: no record shows whether the content is the same. `--exclude` the "
                    "file if it is. If not, change its name and time (`cp`)."
                )
            self.checksums.add(xxh3)
            new.append(replace(source, index=len(new), xxh3=xxh3))
        self.skipped = len(corpus.sources) - len(new)
        if not new:
            raise NothingNew
        lines = map(json.loads, read_checked(self.store, self.manifest.rejects).splitlines())
        listed = {line["file"] for line in lines if "record" not in line}
        binary = tuple(file for file in corpus.binary if file.name not in listed)
        return replace(corpus, sources=tuple(new), binary=binary)

    def labels(self, found: Labels) -> Labels:
        """Return the labels of the data set, after checking that the new records have no other
        label.

        Raises:
            ConfigError: A label is new, so the classes would have other numbers.
        """
        names = self.manifest.label_names
        if found.names == names or not names:
            return found
        if found.are_numbers:
            plain = tuple(map(str, range(len(names))))
            if names == plain and found.names == plain[: len(found.names)]:
                return Labels(names, are_numbers=True)
        new = [name for name in found.names if name not in names]
        if new or found.are_numbers:
            example = new[0] if new else found.names[0]
            raise ConfigError(
                f"`--append`: the label {example[:40]!r} is not one of the {len(names):,} of "
                f"{self.store}, whose numbers are fixed. Make a data set of all records."
            )
        return Labels(names)

    def check(self, described: Manifest) -> None:
        """Check that ids, labels and columns of the new rows have the same meaning as in the data
        set.

        Args:
            described: The manifest that a run would write, without rows.

        Raises:
            ConfigError: They differ.
        """
        refuse_difference(
            (self.store.name, self.manifest), ("this command", described), purpose="`--append`"
        )

    def remove_hidden(self) -> None:
        """Delete the folder of the new rows, which are part of the data set."""
        removed = self.store.folder / f"{_HIDDEN}{TEMPORARY_SUFFIX}"
        shutil.rmtree(removed, ignore_errors=True)  # of a command that was killed
        if self.hidden.folder.exists():
            os.rename(self.hidden.folder, removed)  # or a kill would leave half a data set
            shutil.rmtree(removed, ignore_errors=True)

    def _remove_committed(self) -> None:
        """Delete the folder of rows that a killed command had made part of the data set."""
        if self.hidden.exists(MANIFEST_FILE):
            rows = _shards(Manifest.read(self.hidden)) <= _shards(self.manifest)
            if not rows:
                return
        elif self.hidden.folder.exists():
            return
        self.remove_hidden()

    def _prove(self, size: int) -> None:
        """Add the checksums of the data set's files of a size, if they are as they were read."""
        for name in self._of_size.pop(size, ()):
            recorded, path = self.unproved[name], os.path.join(self.folder, name)
            if recorded and _state(path) == recorded:
                self.checksums.add(_checksum(path))
            elif recorded and size:
                self._lost |= {recorded: name, (size, os.path.basename(name)): name}

    def _may_be(self, source: InputFile) -> str | None:
        """Return the name of the data set's file that a file may be, moved or touched; else
        None."""
        if source.name in self.unproved and self.unproved[source.name] is None:
            return source.name
        moved = self._lost.get((source.bytes, source.state))
        return moved or self._lost.get((source.bytes, os.path.basename(source.name)))


def _shards(manifest: Manifest) -> set[str]:
    return {shard.xxh3 for split in manifest.splits.values() for shard in split.shards}


def _state(name: str) -> tuple[int, int] | None:
    """Return size and time of a file of this machine; None if there is no such file."""
    try:
        return size_and_state(name)
    except (OSError, ValueError):
        return None


def _checksum(path: Location) -> str:
    """Return the xxh3-64 of the stored bytes of a file."""
    digest = xxhash.xxh3_64()
    for block in Blocks(path):
        digest.update(block)
    return digest.hexdigest()
