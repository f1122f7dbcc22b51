"""Text that is shown or stored: summaries with aligned values, and addresses without their secrets.

An address can hold a user, a password, or a query with a token or a signature. No file and no
message of tokenfeed contains these parts: errors remove them from their text, and code that stores
or prints an address calls `public` first. A run that needs a secret again gets it from the command
line or the environment again.
"""

import re
from collections.abc import Mapping

WEB_SCHEMES = frozenset({"http", "https"})
_CONTAINER_SCHEMES = frozenset({"abfss"})
"""Schemes with `container@account`: the part before `@` is not a user."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)")
"""The scheme of an address. `Path` leaves one of the slashes. One letter is a drive of Windows."""
USER = re.compile(r"[^/?#]*@|(?!\[)[^/?#@]*:(?!\d+(?:[/?#]|$)).*@", re.DOTALL)
"""User and password in front of a host. An unquoted password may hold `/`, `?`, `#` and `@`."""
_WEB_QUERY = re.compile(r"[?#].*", re.DOTALL)
_QUERY = re.compile(r"\?[^/?#]*=.*", re.DOTALL)
"""In the address of a bucket `?` and `#` are parts of a key, but `?name=value` is a query."""
_IN_TEXT = re.compile(
    _SCHEME.pattern + r"(?:[^\s/?#@]*:(?!\s|\d+(?:[/?#\s]|$))[^\n@]*@)?[^\s\"'<>]+"
)
"""An address in a text. A password may hold blanks and quotes."""


def is_address(text: str) -> bool:
    """Return whether a text is an address, also with only one slash, as `Path` writes addresses."""
    return "://" in text or bool(_SCHEME.match(text))


def public(address: str) -> str:
    """Return an address without its secrets: user, password, query and fragment.

    Other text, such as a path, is returned unchanged. So are `?` and `#` in the key of a bucket.
    Text before the address, as in `train=https://...`, stays.
    """
    found = _SCHEME.search(address)
    if not found:
        return address
    scheme, rest = found[1].lower(), address[found.end() :]
    user = USER.match(rest)
    if user and (scheme not in _CONTAINER_SCHEMES or ":" in user[0]):
        rest = f"***@{rest[user.end() :]}"
    query = _WEB_QUERY if scheme in WEB_SCHEMES else _QUERY
    return address[: found.end()] + query.sub("", rest)


def without_secrets(text: str) -> str:
    """Return a text with the secrets removed from every address in it."""
    return _IN_TEXT.sub(lambda found: public(found[0]), text) if ":/" in text else text


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return a text with U+FFFD in place of the control characters that a terminal would obey."""
    return _CONTROL.sub("\ufffd", text)


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
        name.ljust(width) + printable(value).replace("\n", indent) for name, value in shown.items()
    )


def count_of(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, as in "1 file" and "2 files". Default plural: noun and "s"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
