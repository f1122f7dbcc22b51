"""The formats there are: a new one is a file beside this one, and a line here."""

from tokenfeed.tools.corpus.formats.arrow import ARROW
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.delimited import CSV, TSV
from tokenfeed.tools.corpus.formats.json_lines import JSON_LINES
from tokenfeed.tools.corpus.formats.json_list import JSON_LIST
from tokenfeed.tools.corpus.formats.parquet import PARQUET
from tokenfeed.tools.corpus.formats.text import TEXT

__all__ = ["FALLBACK", "FORMATS"]

FALLBACK = TEXT
"""What a file is whose name and content say nothing else."""
FORMATS: dict[str, Format] = {
    format_.name: format_
    for format_ in (
        TEXT,
        JSON_LINES,
        JSON_LIST,
        CSV,
        TSV,
        PARQUET,
        ARROW,
    )
}
"""By name. Contents are compared with them in this order."""
