"""The known object stores, by the schemes of their addresses, and how each differs from S3."""

from dataclasses import dataclass

__all__ = ["SCHEMES", "Traits", "traits_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """How a store differs from S3."""

    is_web: bool = False
    """It is a web server: it has a host and no bucket, can only be read, and lists nothing."""
    reads_ends: bool = True
    """Whether one request brings the last bytes of an object; else its size is asked for first."""
    counts_versions: bool = False
    """Whether conditions name a version that it counts, instead of an ETag."""
    names_container: bool = False
    """Whether the part of an address before `@` is a container, not a user."""


_WEB = Traits(is_web=True)
SCHEMES = {
    "s3": Traits(),
    "gs": Traits(counts_versions=True),
    "az": Traits(reads_ends=False),
    "abfss": Traits(reads_ends=False, names_container=True),
    "http": _WEB,
    "https": _WEB,
}


def traits_of(scheme: str) -> Traits:
    """Return the traits of a scheme. An unknown one, which a user registered, is like S3."""
    return SCHEMES.get(scheme, Traits())
