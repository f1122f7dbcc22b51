"""manifest.json as bytes: read from a store, and proved by its version and the checksum of itself.

Torch-free.
"""

import json
from typing import Any

import xxhash

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.reading import error_line
from tokenfeed.pipeline.format.schema import FORMAT_VERSION
from tokenfeed.pipeline.format.store import Store

__all__ = ["CHECKSUM_KEY", "canonical", "proved", "stored"]

CHECKSUM_KEY = "manifest_xxh3"


def canonical(content: dict[str, Any]) -> bytes:
    """What the checksum is of, whatever the file looks like."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def stored(store: Store, name: str) -> bytes:
    """The manifest of a data set as it lies there.

    Raises:
        ManifestError: It is missing, or cannot be read.
    """
    path = store.path(name)
    try:
        return store.read(name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ManifestError(
            f"{path}: not found, so this folder holds no finished data set. "
            "Point at the output folder of `pretokenize`, or run it to the end."
        ) from error
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # of the second kind are names with a NUL
        raise ManifestError(f"{path}: cannot be read: {error_line(error)}.") from error


def proved(raw: bytes, path: str) -> tuple[dict[str, Any], str]:
    """What a manifest says, without its checksum, and that; messages name it as `path`.

    Raises:
        ManifestError: It is no JSON, of another version, or altered.
    """
    content = _decoded(raw, path)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise ManifestError(
            f"{path}: expected format version {FORMAT_VERSION}, got {version!r}. "
            "Run `pretokenize` again, or use the tokenfeed release that wrote it."
        )
    checksum = content.pop(CHECKSUM_KEY, None)
    try:
        actual = xxhash.xxh3_64_hexdigest(canonical(content))
    except RecursionError as error:
        raise _no_json(path, error) from error
    if checksum != actual:
        raise ManifestError(
            f"{path}: the content has checksum {actual}, but the file says {checksum!r}: it is "
            "damaged or was edited. Restore it, or run `pretokenize` again."
        )
    return content, actual


def _decoded(raw: bytes, path: str) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _no_json(path, error) from error
    if not isinstance(content, dict):
        raise ManifestError(f"{path}: expected a JSON object, got {type(content).__name__}.")
    return content


def _no_json(path: str, error: Exception) -> ManifestError:
    return ManifestError(f"{path}: is not JSON ({error}). Restore it, or run `pretokenize` again.")
