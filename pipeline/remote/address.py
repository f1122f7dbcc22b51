"""Addresses in stores, `s3://bucket/prefix`: the known schemes, and parsing."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Self
from urllib.parse import unquote, urlsplit

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.text import USER, WEB_SCHEMES, public


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """How a store differs from S3."""

    is_web: bool = False
    """Whether it is a web server: a host without buckets, read-only, without lists."""
    reads_ends: bool = True
    """Whether one request reads the last bytes of an object. If not, its size is read first."""
    counts_versions: bool = False
    """Whether conditions use a version number instead of an ETag."""


SCHEMES = {
    "s3": Traits(),
    "gs": Traits(counts_versions=True),
    "az": Traits(reads_ends=False),
    "abfss": Traits(reads_ends=False),
    **dict.fromkeys(sorted(WEB_SCHEMES), Traits(is_web=True)),
}


def traits_of(scheme: str) -> Traits:
    """Return the traits of a scheme. A scheme that a user registered has the traits of S3."""
    return SCHEMES.get(scheme, Traits())


_ANONYMOUS = "?anonymous"
_BY_ENVIRONMENT = "Set keys in the environment: docs/how/remote.md."


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """A parsed URL. The final slash is removed."""

    scheme: str
    url: str
    """Without user, password and query; it may be shown."""
    anonymous: bool = False
    """Whether requests are not signed."""
    query: str = ""
    """Sent with every request to a web server. It may contain a signature, so never log it."""
    is_hub: bool = False
    """Whether requests carry the token of `huggingface_hub`, if it has one."""

    def __repr__(self) -> str:
        return self.url

    @property
    def traits(self) -> Traits:
        """How the store differs from S3."""
        return traits_of(self.scheme)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Parse a URL.

        The path of a bucket is used literally, as by `aws s3`: `%20` in it does not mean a space.

        Raises:
            ConfigError: The URL has no bucket or host, or contains a user, a password or keys.
        """
        shown = public(url)
        scheme, _, rest = url.partition("://")
        is_web = traits_of(scheme).is_web
        if not is_web:
            anonymous = rest.endswith(_ANONYMOUS)
            base, query = rest.removesuffix(_ANONYMOUS), ""
            if shown != url or ":" in base.partition("/")[0]:
                raise ConfigError(f"{shown}: contains a user, a key or a query. {_BY_ENVIRONMENT}")
        else:
            anonymous = False
            before, _, fragment = rest.partition("#")
            base, _, query = before.partition("?")
            if USER.match(rest):
                raise ConfigError(
                    f"{shown}: contains a user or a password, which are not sent. Remove them. A "
                    "signed address (`?...`) works."
                )
            if fragment:
                raise ConfigError(f"{shown}: an address cannot contain `#`. Write %23.")
            query = "" if f"?{query}" == _ANONYMOUS else query
        host, _, path = base.partition("/")
        if not host:
            missing = "host" if is_web else "bucket"
            raise ConfigError(f"{shown}: has no {missing}. Give {scheme}://{missing.upper()}/PATH.")
        try:
            _ = urlsplit(f"//{host}").port
        except ValueError as error:
            raise ConfigError(f"{shown}: is not an address ({error}).") from None
        return cls(scheme, f"{scheme}://{host}/{path}".rstrip("/"), anonymous, query)


def object_address(url: str) -> tuple[str, str]:
    """Split the URL of an object into the URL of its folder and its name; "" without a folder.

    The folder keeps the query, because it may be a signature. The name of a file on the web is
    unquoted, because the client quotes names.
    """
    is_web = traits_of(url.partition("://")[0]).is_web
    base, mark, query = url.partition("?" if is_web else _ANONYMOUS)
    folder, _, name = base.rstrip("/").rpartition("/")
    name = unquote(name) if is_web else name
    return ("" if folder.endswith("/") else f"{folder}{mark}{query}", name)


def require(module: str, url: str) -> None:
    """Check that the client of an address is installed.

    Raises:
        ConfigError: It is not installed.
    """
    if find_spec(module) is None:
        raise ConfigError(
            f"{public(url)}: needs the package `{module}`, which is not installed. "
            "Run `pip install 'tokenfeed[remote]'`."
        )
