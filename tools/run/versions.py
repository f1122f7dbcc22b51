"""The versions of packages that the bytes of a shard depend on: the same wherever a run works."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["versions"]

_PACKAGES = ("tokenfeed", "pyarrow", "tokenizers", "gigatoken")


def versions() -> list[str]:
    """Name and version of each, `none` where it is not installed."""
    from tokenfeed.tools.corpus.formats.registry import FORMATS  # which `shards` does without

    of_formats = {name for format_ in FORMATS.values() for name in format_.packages}
    return [f"{name} {_version(name)}" for name in (*_PACKAGES, *sorted(of_formats))]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
