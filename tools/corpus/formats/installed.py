"""Formats of other packages: an entry point per ending of file names, in `tokenfeed.formats`.

    [project.entry-points."tokenfeed.formats"]
    warc = "my_package:read_warc"

`read_warc(file)` takes a binary file, decompressed if its name ends in .gz, .zst, .bz2 or .xz, and
yields records: dicts, texts (the first field of the task), or Arrow tables. The same bytes must
give the same records. If it raises an error, the rest of the file is rejected.
"""

import functools
import io
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, BinaryIO

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools.corpus.blocks import BlockFile
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.json_lines import JsonLines, decoded
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.records import Fields, Records
from tokenfeed.tools.corpus.spool import json_lines

GROUP = "tokenfeed.formats"

Read = Callable[[BinaryIO], Iterator[Any]]


def installed_format(ending: str) -> Format | None:
    """Return the format that an installed package has for an ending like `.warc`; else None.

    Raises:
        ConfigError: The package cannot be imported.
    """
    points = [point for point in _points() if f".{point.name.lower().lstrip('.')}" == ending]
    if not points:
        return None
    if len({point.value for point in points}) > 1:
        values = " and ".join(sorted(point.value for point in points))
        raise ConfigError(f"{GROUP}: {values} both read {ending}. Uninstall one of the packages.")
    point = points[0]
    try:
        read: Read = point.load()
    except (Exception, SystemExit) as error:  # the package may do anything
        raise ConfigError(
            f"{GROUP}: {point.name} = {point.value}: cannot be imported: {error}. Mend or "
            "uninstall the package."
        ) from error
    return Format(
        name=ending,
        endings=(ending,),
        read=partial(read_by, read),
        damage=(Exception,),
        packages=(point.dist.name,) if point.dist else (),
        is_compressible=True,
    )


@functools.cache
def _points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


def read_by(read: Read, part: FilePart, fields: Fields) -> Iterator[Records]:
    """Read a file by a function on its bytes; see above."""
    blocks = part.blocks()
    errors: list[Exception] = []
    """Raised at the end, after the records before them."""

    def records() -> Iterator[Any]:
        with io.BufferedReader(BlockFile(blocks)) as file:
            try:
                yield from read(file)
            except Exception as error:
                errors.append(error)

    lines = json_lines(part.source.name, records, fields)
    yield from decoded(part, blocks, lines, JsonLines(fields), "record")
    if errors:
        raise errors[0]
