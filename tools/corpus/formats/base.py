"""What a format is: how its files are known, read and cut into parts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from tokenfeed.tools.corpus.input_files import FilePart, InputFile, whole
from tokenfeed.tools.corpus.locations import Location
from tokenfeed.tools.corpus.records import Fields, Records

__all__ = ["Format"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format of input files. Workers are sent its name alone."""

    name: str
    endings: tuple[str, ...]
    """What the names of its files end in, in lower case."""
    read: Callable[[FilePart, Fields], Iterator[Records]]
    """Reads a part; raises one of `DAMAGE` or of `damage` where the rest of it cannot be read."""
    damage: tuple[type[Exception], ...] = ()
    """What its parser raises of a damaged file, besides `DAMAGE`."""
    packages: tuple[str, ...] = ()
    """Its parser, as it is installed, if only this format needs it: machines that share a run must
    have the same version."""
    cut: Callable[[InputFile, int], Iterator[FilePart]] = whole
    """Cuts a file into parts of about so many bytes of text, by the content of the file alone."""
    cut_at_once: int = 1
    """Files in a store that are cut at the same time, where that is little to ask for."""
    begins: Callable[[bytes, str], bool] | None = None
    """Whether a file with this beginning is of this format: a record has the field, or the file
    cannot be anything else. None if only the ending of a name tells."""
    is_vague: bool = False
    """Whether files with its endings may be of another format, so that their content decides."""
    schema: Callable[[Location], pa.Schema] | None = None
    """The schema of the table at a place; errors are those of `OpenTable`."""
    text_ratio: int = 1
    """Bytes of text that a byte of the file holds, about: for weighing work, no more."""
    is_compressible: bool = False
    """Whether its files may be compressed once more, as they may where `read` and `cut` take a part
    by its `blocks`."""
    has_record_per_line: bool = False
    """Whether records are lines, blank ones included, so that a record's number tells its line."""
