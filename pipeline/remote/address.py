"""The address of a data set in a store: `s3://bucket/prefix`, and how messages show it."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Self
from urllib.parse import urlsplit

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.remote.schemes import Traits, traits_of

__all__ = ["Address", "hide_password", "require"]

_ANONYMOUS = "anonymous"
_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]*@")


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """A URL without its end slash, taken apart."""

    scheme: str
    url: str
    """What the client is given: it may hold a password."""
    anonymous: bool
    """Whether requests go unsigned."""

    def __repr__(self) -> str:
        return hide_password(self.url)

    @property
    def traits(self) -> Traits:
        """What sets the store there apart."""
        return traits_of(self.scheme)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Take a URL apart.

        Raises:
            ConfigError: It names no bucket or host, or has a part that means nothing here.
        """
        shown = hide_password(url)
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(f"{shown}: is no address ({error}).") from None
        is_web = traits_of(parts.scheme).is_web
        if not parts.netloc:
            raise ConfigError(f"{shown}: names no {'host' if is_web else 'bucket'}.")
        if parts.query not in ("", _ANONYMOUS) or parts.fragment:
            raise ConfigError(
                f"{shown.partition('?')[0]}: the only thing that may follow is `?{_ANONYMOUS}`. "
                "Give keys by the environment: docs/how/remote.md."
            )
        if not is_web and ":" in parts.netloc:
            raise ConfigError(f"{shown}: give keys by the environment: docs/how/remote.md.")
        base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        return cls(parts.scheme, base, bool(parts.query))


def hide_password(text: str) -> str:
    """A URL, or a text with URLs, without passwords."""
    return _PASSWORD.sub(r"\1:***@", text)


def require(module: str, url: str) -> None:
    """Refuse an address whose client is not installed.

    Raises:
        ConfigError: It is not.
    """
    if find_spec(module) is None:
        raise ConfigError(
            f"{hide_password(url)}: needs the package `{module}`, which is not installed. "
            "`pip install 'tokenfeed[remote]'` brings it."
        )
