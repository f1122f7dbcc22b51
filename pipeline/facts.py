"""Summaries as text: one `name  value` line per fact, with the values aligned."""

from collections.abc import Mapping

_LEAST_WIDTH = 9
"""Columns before the values, unless a name needs more."""


def facts(values: Mapping[str, str]) -> str:
    r"""Return one line per name and value. Names without a value are left out.

    The further lines of a value stand below its first line:

        facts({"rows": "12", "stall": "5.00%\nof 60 s"}) is

        rows     12
        stall    5.00%
                 of 60 s
    """
    shown = {name: value for name, value in values.items() if value}
    width = max([_LEAST_WIDTH, *(len(name) + 1 for name in shown)])
    indent = "\n" + " " * width
    return "\n".join(
        name.ljust(width) + value.replace("\n", indent) for name, value in shown.items()
    )


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 file" and "2 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
