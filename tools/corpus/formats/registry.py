"""All formats. A new format is a file beside this one, and a line here.

Formats of other packages are found when a file has their ending: see `installed`.
"""

from tokenfeed.tools.corpus.formats.arrow import ARROW
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.datatrove import DATATROVE
from tokenfeed.tools.corpus.formats.delimited import CSV, TSV
from tokenfeed.tools.corpus.formats.installed import installed_format
from tokenfeed.tools.corpus.formats.json_lines import JSON_LINES
from tokenfeed.tools.corpus.formats.json_list import JSON_LIST
from tokenfeed.tools.corpus.formats.litdata import LITDATA
from tokenfeed.tools.corpus.formats.mds import MDS
from tokenfeed.tools.corpus.formats.parquet import PARQUET
from tokenfeed.tools.corpus.formats.text import TEXT

FALLBACK = TEXT
"""What a file is whose name and content say nothing else."""


class _Formats(dict[str, Format]):
    """Formats by name. A format of an installed package has its ending as name, like `.warc`."""

    def __missing__(self, name: str) -> Format:
        found = installed_format(name)
        if found is None:
            raise KeyError(name)
        self[name] = found
        return found


FORMATS: dict[str, Format] = _Formats(
    (format_.name, format_)
    for format_ in (TEXT, JSON_LINES, JSON_LIST, CSV, TSV, PARQUET, ARROW, MDS, DATATROVE, LITDATA)
)
"""Contents are compared with them in this order."""
