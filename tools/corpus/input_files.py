"""Input files as they were found, and the parts of them that are read at once."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.blocks import Blocks, Compression, Damage
from tokenfeed.tools.corpus.locations import PUT_BACK, Location, RemoteFile

__all__ = ["MAX_RECORD_BYTES", "STANDARD_INPUT", "FilePart", "InputFile", "whole"]

STANDARD_INPUT = "-"
MAX_RECORD_BYTES = 64_000_000
"""The default of `--max-record`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One input file as it was when the run began."""

    index: int
    """Its line in sources.jsonl, counted from 0."""
    name: str
    """As given on the command line, and below that as found."""
    path: Location
    """Where it is read: for spooled input not its name."""
    bytes: int
    text_bytes: int
    """Bytes of text expected, which are more in a file that is compressed."""
    state: int | str
    """Changes when the file does: its modification time, or what a store says of its version; for
    a data set of the Hub its commit, for spooled input its checksum."""
    format: str
    """The name of its format as the registry has it."""
    compression: Compression | None
    max_record_bytes: int = MAX_RECORD_BYTES
    """A longer record is rejected."""
    split: str | None = None
    """The split that all its records belong to; None draws it for each."""
    is_spooled: bool = False
    """Whether it is a nameless copy of standard input or of Python objects."""

    def check_unchanged(self) -> None:
        """Compare the file with what it was when the run began.

        Raises:
            CorpusError: It is gone or has changed: half of it may already be in a shard.
        """
        if self.is_spooled or isinstance(self.path, RemoteFile):
            return  # of an object each answer is compared
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            raise CorpusError(
                f"{self.name}: vanished while the corpus was read. {PUT_BACK}"
            ) from None
        is_commit = isinstance(self.state, str)  # of the Hub; the file is a copy in a cache
        if now.st_size != self.bytes or not (is_commit or now.st_mtime_ns == self.state):
            raise CorpusError(f"{self.name}: changed while the corpus was read. {PUT_BACK}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """Consecutive records of one input file."""

    source: InputFile
    start: int = 0
    """Where it begins, in what its format counts: bytes, row groups, record batches."""
    stop: int | None = None
    """Where it ends; None for a whole file."""
    first_record: int = 0
    weight_bytes: int
    """Bytes of text expected: for sharing out work and for progress, not for the result."""
    damage: Damage | None = None
    """Where its file is damaged, once that is known."""

    def blocks(self) -> Blocks:
        """Its bytes, decompressed, where `start` and `stop` are bytes."""
        source = self.source
        return Blocks(source.path, source.compression, self.start, self.stop, self.damage)

    def weight_of(self, consumed_bytes: int) -> float:
        """The part of its weight that so many bytes of the file stand for."""
        part_bytes = self.source.bytes if self.stop is None else self.stop - self.start
        return self.weight_bytes * consumed_bytes / max(part_bytes, 1)


def whole(source: InputFile, shard_bytes: int) -> Iterator[FilePart]:
    """The file as one part, however big: for what cannot be entered in the middle."""
    yield FilePart(source=source, weight_bytes=source.text_bytes)
