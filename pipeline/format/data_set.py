"""Open data sets for reading: a store, its manifest and one split; and its tokenizer.

The data sets of a mixture are opened together; ids and labels must have the same meaning in all of
them. No shard is opened here. Torch-free.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tokenfeed.pipeline.errors import ConfigError, ManifestError, error_line
from tokenfeed.pipeline.format.manifest import Manifest, SplitInfo
from tokenfeed.pipeline.format.schema import is_kept
from tokenfeed.pipeline.format.store import RangedStore, Store, StorePath, open_store

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class OpenedSplit:
    """An opened split of a data set."""

    store: Store
    manifest: Manifest
    split: SplitInfo
    rows: int
    tokens: int
    batches: int
    """Number of record batches. `rows`, `tokens` and `batches` are of the whole split."""

    @classmethod
    def from_manifest(cls, path: StorePath, manifest: Manifest, split: SplitInfo) -> Self:
        """Return a split of the data set with this manifest."""
        sizes = split.rows, split.tokens, split.batches
        return cls(open_store(path), manifest, split, *sizes)

    @property
    def name(self) -> str:
        """The path of the data set as the user gave it, for messages and statistics."""
        return self.store.name


def open_splits(paths: Collection[StorePath], split: str) -> tuple[OpenedSplit, ...]:
    """Read the manifest of each data set.

    Args:
        paths: Paths of the data sets; several are the sources of a mixture.
        split: Name of the split in each of them.

    Raises:
        ManifestError: A data set or its split is missing.
        ConfigError: A split has no rows, or the data sets do not match.
    """
    opened = tuple(_open(path, split) for path in paths)
    for other in opened[1:]:
        refuse_difference((opened[0].name, opened[0].manifest), (other.name, other.manifest))
    return opened


def has_remote(sources: tuple[OpenedSplit, ...]) -> bool:
    """Return whether any source is in a store."""
    stores = {type(source.store): source.store for source in sources}  # a mixture may have 1,000
    return any(isinstance(store, RangedStore) for store in stores.values())


def _open(path: StorePath, split: str) -> OpenedSplit:
    store = open_store(path)
    manifest = Manifest.read(store)
    try:
        info = manifest.split(split)
    except ManifestError as error:
        raise ManifestError(f"{store.name}: {error}") from None
    if not info.rows:
        full = [f"`{name}`" for name, other in manifest.splits.items() if other.rows]
        remedy = "Run `pretokenize` on more text."
        if full:
            remedy = (
                f"All are in {' and '.join(full)}: give `pretokenize --validation 0`, or texts "
            )
            remedy += "that differ (equal texts have one split)."
        raise ConfigError(f"{store.name}: the split `{split}` holds no rows. {remedy}")
    return OpenedSplit.from_manifest(store, manifest, info)


def refuse_difference(first: tuple[str, Manifest], other: tuple[str, Manifest]) -> None:
    """Check that ids and labels have the same meaning in two data sets.

    Args:
        first: Name and manifest of a data set.
        other: Name and manifest of another data set.

    Raises:
        ConfigError: They differ.
    """
    (our_name, ours), (their_name, theirs) = first, other
    pairs = zip(_facts_of(ours).items(), _facts_of(theirs).values(), strict=True)
    for (name, left), right in pairs:
        if left != right:
            remedy = "Run `pretokenize` with the same settings."
            if name == "tokenizer":
                known = f"{our_name}/{ours.tokenizer.file}"
                remedy = f"Run `pretokenize --tokenizer {known}` on the texts of the other."
            if name == "task":
                remedy = "Train on one of them, or write both as prompts and completions."
            raise ConfigError(
                f"a mixture needs one {name}: {our_name} has {left}, {their_name} has "
                f"{right}. {remedy}"
            )


def _facts_of(manifest: Manifest) -> dict[str, Any]:
    """What ids and labels mean."""
    return {
        "tokenizer": manifest.tokenizer.xxh3,
        "vocabulary size": manifest.tokenizer.vocabulary_size,
        "task": manifest.task,
        "columns": [
            f"{column.name} ({column.dtype})" if is_kept(column.name) else column.name
            for column in manifest.columns
        ],
        "label names": manifest.label_names,
    }


NOT_FAILURES = (KeyboardInterrupt, SystemExit, MemoryError)
"""Exceptions that do not come from a library. Every other exception does, even a panic in Rust."""
_HAS_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
_ODD_ESCAPE = re.compile(rb"\\u00[4-7]")
"""Matches an escape that no program needs, but that may be in a key."""


def decode_tokenizer(content: bytes) -> "Tokenizer":
    """Return the tokenizer of a tokenizer.json.

    Raises:
        ValueError: The file is not a tokenizer: all errors, panics and aborts of `tokenizers`. The
            message has one line.
    """
    from tokenizers import Tokenizer

    if _HAS_PREFIX.search(content) or _ODD_ESCAPE.search(content):
        _check_merges(content)
    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:  # the library raises what its Rust side gives: no narrower class
        if isinstance(error, NOT_FAILURES):
            raise
        raise ValueError(error_line(error)) from error


def _check_merges(content: bytes) -> None:
    """Reject a merge whose second token is cut within a character.

    The library cuts the prefix of subwords off the second token, byte by byte. If the rest is not
    UTF-8, the message of its error is not UTF-8 either, and the library ends the process.

    Example: the prefix "a" and the merge of "a" and "é". The last byte of "é" remains.
    """
    sizes: list[int] = []
    merges: list[Any] = []

    def collect(pairs: list[tuple[str, Any]]) -> None:  # of each object, with all repeated keys
        for key, value in pairs:
            if key == "continuing_subword_prefix" and isinstance(value, str):
                sizes.append(len(value.encode("utf-8", "surrogatepass")))
            elif key == "merges" and isinstance(value, list):
                merges.extend(each for each in value if isinstance(each, str | list))

    try:
        json.loads(content, object_pairs_hook=collect, parse_int=str)
    except (ValueError, RecursionError):
        return  # the library rejects it, too
    for merge in merges:
        *_, second = merge.split(" ") if isinstance(merge, str) else merge or [""]
        encoded = second.encode("utf-8", "surrogatepass") if isinstance(second, str) else b""
        if any(0x80 <= byte < 0xC0 for size in sizes for byte in encoded[size : size + 1]):
            raise ValueError(f"the prefix of subwords cuts a character of {ascii(merge)[:80]}")
