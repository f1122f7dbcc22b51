"""manifest.json: the one file that completes a data set.

`pretokenize` writes it last, so a folder with a manifest is complete. It has figures per shard,
never per batch or row, and so stays small. It ends with its own checksum: a flipped bit or a manual
edit raises an error instead of changing the plan. Torch-free; used by the loader and the tools.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.once import once
from tokenfeed.pipeline.format.read_errors import error_line
from tokenfeed.pipeline.format.schema import FORMAT_VERSION, Column
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.format.store import Store, StorePath, open_store

__all__ = [
    "CHECKSUM_KEY",
    "JOB_FILE",
    "MADE_BY_FILE",
    "MANIFEST_FILE",
    "PARTS_FOLDER",
    "TOKENIZER_FILE",
    "FileInfo",
    "Ledger",
    "Manifest",
    "ShardInfo",
    "SplitInfo",
    "TokenizerInfo",
    "canonical",
    "length_histogram",
    "proved",
    "stored",
]

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


MANIFEST_FILE, TOKENIZER_FILE = "manifest.json", "tokenizer.json"
MADE_BY_FILE = ".made_by.json"
PARTS_FOLDER = ".parts"
"""Holds the records of an unfinished run."""
JOB_FILE = f"{PARTS_FOLDER}/job.json"
"""Says what the unfinished run is."""
Count = Annotated[int, msgspec.Meta(ge=0)]

_ADDED = ("seal", "routed", "verified")
"""Keys that the first manifests lack: left out where nothing is known, so that these keep their
fingerprints."""
_HISTOGRAM_BINS = 32
_FILE_NAME = re.compile(r"(?!/)(?!(.*/)?\.\.(/|$))[^\0\ud800-\udfff]+", re.DOTALL)
"""What any system can open, and no other place: neither from the root nor upwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """A file of the data set and what proves that it is the right one."""

    file: str
    """Path below the data set's folder, with forward slashes."""
    bytes: Count
    xxh3: str
    """xxh3-64 of the whole file, 16 hex digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo(FileInfo):
    """One shard: its file and its size in every unit the plan needs."""

    rows: Count
    tokens: Count
    batches: Count
    longest_row: Count
    """Tokens of the longest row."""
    seal: str | None = None
    """xxh3-64 over the checksums of all its record batches: tells it from a shard with other rows.
    Absent in the first data sets."""


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """The shards of one split, in row order. It is summed up once, and pickled as one piece: a
    worker of a loader of 100,000 shards starts a second sooner."""

    shards: tuple[ShardInfo, ...]
    length_histogram: tuple[Count, ...]
    """Rows by length: entry k counts those of `2**k` up to `2**(k+1) - 1` tokens."""

    @cached_property
    def rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def batches(self) -> int:
        """Record batches of all shards."""
        return sum(shard.batches for shard in self.shards)

    @cached_property
    def longest_row(self) -> int:
        """Tokens of the longest row of all shards."""
        return max((shard.longest_row for shard in self.shards), default=0)

    def __reduce__(self) -> tuple[Callable[[bytes], "SplitInfo"], tuple[bytes]]:
        return _unpacked, (msgspec.msgpack.encode(self),)


def _unpacked(packed: bytes) -> SplitInfo:
    return msgspec.msgpack.decode(packed, type=SplitInfo)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo(FileInfo):
    """The tokenizer that made the ids, stored beside the shards."""

    vocabulary_size: Count
    """Ids are below this number; it decides how wide a token is on disk."""
    end_id: Count | None
    """Stands at the end of every document, or null where the tokenizer has no such token."""
    pad_id: Count
    """Fills the padding of a batch; its value is never seen by a loss or by attention."""
    engine: str
    """What made the ids: `tokenizers`, the reference, or a faster one whose ids were compared."""
    engine_version: str
    audited: Count
    """Texts whose ids a fast engine and the reference both made, to compare."""
    differences: Count
    """Of those, how many differed. With any, the reference made all ids of the data set."""
    special_tokens_in_text: str
    """What special-token text inside a document became: `plain` text, or `split` into its id."""
    special_tokens_added: bool
    """Whether the tokenizer's own template ([CLS] ... [SEP]) was put around each row."""
    routed: Count | None = None
    """Texts that the fast engine left to the reference; of a data set made by it, and not by one of
    the first release."""
    verified: bool | None = None
    """Given where the reference encoded every text too, and gave the same ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What became of the input: read = written + empty + rejected, always."""

    files: Count
    bytes: Count
    """Bytes of text encoded, as UTF-8."""
    read: Count
    written: Count
    empty: Count
    rejected: Count


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished data set: what it holds, what made it, and the checksum of every file."""

    format_version: Count
    task: str
    columns: tuple[Column, ...]
    """What the task adds to ids and origin."""
    label_names: tuple[str, ...]
    """The classes or tags by their number; empty where the task has none."""
    tokenizer: TokenizerInfo
    splits: dict[str, SplitInfo]
    ledger: Ledger
    sources: FileInfo
    """sources.jsonl: a line per input file, with its own ledger; rows point at it."""
    rejects: FileInfo
    """rejects.jsonl: a line per record that could not be used: file, record, reason."""

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-64 of the content: two data sets are the same if and only if it is the same."""
        return xxhash.xxh3_64_hexdigest(canonical(self.content()))

    def content(self) -> dict[str, Any]:
        """What the file holds beside its checksum."""
        return dataclasses.asdict(self, dict_factory=_without_absent)

    def split(self, name: str) -> SplitInfo:
        """The split called `name`; a ManifestError names those there are."""
        if name not in self.splits:
            there = ", ".join(self.splits) or "none"
            raise ManifestError(f"no split `{name}` in this data set; it has: {there}")
        return self.splits[name]

    def encoded(self) -> bytes:
        """What manifest.json holds."""
        content = self.content() | {CHECKSUM_KEY: self.fingerprint}
        return json.dumps(content, indent=1).encode() + b"\n"

    def write(self, folder: Path) -> None:
        """Write manifest.json into `folder`, atomically."""
        atomic_write(folder / MANIFEST_FILE, self.encoded())

    @classmethod
    def read(cls, path: StorePath) -> "Manifest":
        """Read and check the manifest.json of a data set.

        Raises:
            ManifestError: It is missing, no JSON, of another version, altered, or inconsistent.
        """
        store = open_store(path)
        return once((store, cls), partial(cls._stored, store))

    @classmethod
    def _stored(cls, store: Store) -> "Manifest":
        return cls.decoded(stored(store, MANIFEST_FILE), store.path(MANIFEST_FILE))

    @classmethod
    def decoded(cls, raw: bytes, file: str) -> "Manifest":
        """Check what a manifest.json holds; messages name it as `file`, errors are of `read`."""
        content, checksum = proved(raw, file)
        try:
            manifest = msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise ManifestError(f"{file}: {error}. Run `pretokenize` again.") from error
        manifest._check(file)
        vars(manifest)["fingerprint"] = checksum  # to pack 100,000 shards again takes a second
        return manifest

    def _check(self, path: str) -> None:
        self._check_files(path)
        written = sum(split.rows for split in self.splits.values())
        ledger = self.ledger
        if written != ledger.written or ledger.read != (
            ledger.written + ledger.empty + ledger.rejected
        ):
            raise ManifestError(
                f"{path}: the ledger does not close: read {ledger.read:,}, written "
                f"{ledger.written:,}, empty {ledger.empty:,}, rejected {ledger.rejected:,}, rows "
                f"in shards {written:,}. Run `pretokenize` again."
            )

    def _check_files(self, path: str) -> None:
        shards = [shard for split in self.splits.values() for shard in split.shards]
        for info in (self.tokenizer, self.sources, self.rejects, *shards):
            if not _FILE_NAME.fullmatch(info.file):
                raise ManifestError(
                    f"{path}: {info.file!r} is no file below the data set's folder. Run "
                    "`pretokenize` again."
                )


def length_histogram(lengths: np.ndarray) -> np.ndarray:
    """Count rows by power of two of their length.

    Args:
        lengths: Tokens of each row, shape (N,), every value at least 1.

    Returns:
        int64, shape (32,); entry k counts lengths from 2**k to 2**(k+1) - 1.
    """
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1
    return np.bincount(exponents, minlength=_HISTOGRAM_BINS)


def _without_absent(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None or name not in _ADDED}
