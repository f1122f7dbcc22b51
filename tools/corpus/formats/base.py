"""The interface of a format: how to recognise, read and cut its files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from tokenfeed.tools.corpus.input_files import FilePart, InputFile, whole
from tokenfeed.tools.corpus.locations import Location
from tokenfeed.tools.corpus.records import Fields, Records


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of input files. Workers receive only its name."""

    name: str
    endings: tuple[str, ...]
    """Endings of file names, in lower case."""
    read: Callable[[FilePart, Fields], Iterator[Records]]
    """Reads a part. Raises one of `DAMAGE` or `damage` if the rest of the part cannot be read."""
    damage: tuple[type[Exception], ...] = ()
    """Exceptions of the parser for a damaged file, beside `DAMAGE`."""
    packages: tuple[str, ...] = ()
    """Packages that only this format needs. Machines that share a run need the same versions."""
    cut: Callable[[InputFile, int], Iterator[FilePart]] = whole
    """Cuts a file into parts with about a number of bytes of text, the same parts in every run."""
    cut_at_once: int = 1
    """Number of objects in a store that are cut at the same time."""
    begins: Callable[[bytes, str], bool] | None = None
    """Returns whether a file with this beginning has the format: a record has the field, or no
    other format fits. None: only the ending of a name decides."""
    is_vague: bool = False
    """Whether files with these endings may have another format, so the content decides."""
    schema: Callable[[Location], pa.Schema] | None = None
    """Returns the schema of a table. Raises the errors of `OpenTable`."""
    text_ratio: int = 1
    """Estimated bytes of text per byte of the file, for the division of work."""
    is_compressible: bool = False
    """Whether files may be compressed (.gz and others). `read` and `cut` must then use
    `FilePart.blocks`."""
    has_record_per_line: bool = False
    """Whether the number of a record is the number of its line, with blank lines counted."""
