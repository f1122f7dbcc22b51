"""The object stores that there are, by the schemes of their addresses, and what sets each apart."""

from dataclasses import dataclass

__all__ = ["SCHEMES", "Traits", "traits_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What a store does otherwise than S3."""

    is_web: bool = False
    """It is a web server: it has a host and no bucket, can only be read, and lists nothing."""
    reads_ends: bool = True
    """Whether one request brings the last bytes of an object; else its size is asked for first."""
    names_container: bool = False
    """Whether what stands before an `@` is a container, and no user."""
    counts_versions: bool = False
    """Whether conditions name a version that it counts, instead of an ETag."""


_AZURE, _WEB = Traits(reads_ends=False), Traits(is_web=True)
SCHEMES = {
    "s3": Traits(),
    "gs": Traits(counts_versions=True),
    "az": _AZURE,
    "abfss": Traits(reads_ends=False, names_container=True),
    "http": _WEB,
    "https": _WEB,
}


def traits_of(scheme: str) -> Traits:
    """What is known of a scheme; the client knows more of them, which somebody may register."""
    return SCHEMES.get(scheme, Traits())
