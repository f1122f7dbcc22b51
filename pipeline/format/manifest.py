"""manifest.json: the one file that completes a data set.

`pretokenize` writes it last, so a folder with a manifest is complete. It has figures per shard,
never per batch or row, and so stays small. It ends with its own checksum: a flipped bit or a manual
edit raises an error instead of changing the plan. Torch-free; used by the loader and the tools.
"""

import dataclasses
import json
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash

from tokenfeed.pipeline.errors import ConfigError, ManifestError, error_line
from tokenfeed.pipeline.format.schema import FORMAT_VERSION, Column
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.format.store import Store, StorePath, once, open_store

CHECKSUM_KEY = "manifest_xxh3"


def canonical(content: dict[str, Any]) -> bytes:
    """Return the bytes that the checksum covers: the content in canonical JSON."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def stored(store: Store, name: str) -> bytes:
    """Read the bytes of a manifest from a store.

    Raises:
        ManifestError: The manifest is missing or cannot be read.
    """
    path = store.path(name)
    try:
        return store.read(name)
    except NotADirectoryError:
        raise ManifestError(
            f"{store.name}: is not a folder. Point at the output folder of `pretokenize`."
        ) from None
    except FileNotFoundError:
        raise ManifestError(
            f"{path}: not found, so this folder holds no finished data set. "
            "Point at the output folder of `pretokenize`, or run it to the end."
        ) from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise ManifestError(f"{path}: cannot be read: {error_line(error)}.") from error


MANIFEST_FILE, TOKENIZER_FILE = "manifest.json", "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SOURCES_FILE, REJECTS_FILE = "sources.jsonl", "rejects.jsonl"
MADE_BY_FILE = ".made_by.json"
PARTS_FOLDER = ".parts"
"""Holds the records of an unfinished run."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]

_ADDED = ("seal", "routed", "verified", "chat_template", "fields", "counts", "removed")
"""Keys that the first manifests lack. They are omitted if unknown, so that old fingerprints
stay."""
_HISTOGRAM_BINS = 32
_LEAST_BATCH_BYTES = 24
"""Bytes of a record batch in the footer of a shard alone."""
_FILE_NAME = re.compile(r"(?!/)(?!(.*/)?\.\.(/|$))[^\0\ud800-\udfff]+", re.DOTALL)
"""A relative path that stays below the folder of the data set."""


FEW_ROWS, _FEW_TOKENS = 20, 20_000
"""Results on a split with less of both say little about a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """A file of the data set, with its size and checksum."""

    file: str
    """Path below the data set's folder, with forward slashes."""
    bytes: Count
    xxh3: str
    """xxh3-64 of the whole file, 16 hex digits."""


def file_info(name: str, content: bytes) -> FileInfo:
    """Return the entry of a file with this content."""
    return FileInfo(file=name, bytes=len(content), xxh3=xxhash.xxh3_64_hexdigest(content))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo(FileInfo):
    """A shard: its file, and its size in rows, tokens and record batches."""

    rows: Count
    tokens: Count
    batches: Count
    longest_row: Count
    """Tokens of the longest row."""
    seal: str | None = None
    """xxh3-64 over the checksums of all record batches. It differs for other rows. None in the
    first data sets."""


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """The shards of one split, in row order.

    Sums are cached, and it is pickled as one byte string: with 100,000 shards, a worker starts a
    second sooner.
    """

    shards: tuple[ShardInfo, ...]
    length_histogram: tuple[Count, ...]
    """Row counts by length: entry k counts rows of `2**k` to `2**(k+1) - 1` tokens."""

    @cached_property
    def rows(self) -> int:
        """Number of rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def batches(self) -> int:
        """Number of record batches of all shards."""
        return sum(shard.batches for shard in self.shards)

    @cached_property
    def longest_row(self) -> int:
        """Tokens of the longest row of all shards."""
        return max((shard.longest_row for shard in self.shards), default=0)

    @property
    def is_small(self) -> bool:
        """Whether results on the split are mostly chance."""
        return self.rows < FEW_ROWS and self.tokens < _FEW_TOKENS

    def __reduce__(self) -> tuple[Callable[[bytes], "SplitInfo"], tuple[bytes]]:
        return _unpacked, (msgspec.msgpack.encode(self),)


def _unpacked(packed: bytes) -> SplitInfo:
    return msgspec.msgpack.decode(packed, type=SplitInfo)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo(FileInfo):
    """The tokenizer of the data set, stored next to the shards."""

    vocabulary_size: Count
    """All ids are below this number. It determines the dtype of ids on disk."""
    end_id: Count | None
    """Id at the end of every document; None if the tokenizer has no such token."""
    pad_id: Count
    """Id that fills the padding of a batch. No loss and no attention uses it."""
    engine: str
    """Library that made the ids: `tokenizers`, the reference, or a faster library whose ids were
    compared with the reference."""
    engine_version: str
    audited: Count
    """Number of texts that both the fast engine and the reference encoded, for comparison."""
    differences: Count
    """Number of compared texts with different ids. If above 0, the reference made all ids."""
    special_tokens_in_text: str
    """How the text of a special token in a document was encoded: as `plain` text, or `split` into
    its id."""
    special_tokens_added: bool
    """Whether each row has the special tokens of the tokenizer's template ([CLS] ... [SEP])."""
    routed: Count | None = None
    """Number of texts that the fast engine passed to the reference; None if no fast engine was used
    and in the first data sets."""
    verified: bool | None = None
    """True if the reference also encoded every text, with the same ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordCounts:
    """Counts of input records. read = written + empty + rejected + left_out + removed, always."""

    files: Count
    bytes: Count
    """Bytes of text encoded, as UTF-8."""
    read: Count
    written: Count
    empty: Count
    rejected: Count
    removed: Count | None = None
    """Records that `shards select` removed; None if it removed none."""
    left_out: Count | None = None
    """Records beyond `--limit`; None if there were none."""

    @classmethod
    def of(cls, sources: Sequence[dict[str, Any]]) -> "RecordCounts":
        """Return the sums of the lines of sources.jsonl."""
        names = ("bytes", "read", "written", "empty", "rejected")
        totals = {name: sum(source[name] for source in sources) for name in names}
        more: dict[str, Any] = {
            name: sum(source.get(name, 0) for source in sources) or None
            for name in ("removed", "left_out")
        }
        return cls(files=len(sources), **totals, **more)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished data set: its content, its origin, and the checksum of every file."""

    format_version: Count
    task: str
    columns: tuple[Column, ...]
    """Columns of the task, besides ids and origin."""
    label_names: tuple[str, ...]
    """Names of the classes or tags, by number; empty if the task has none."""
    tokenizer: TokenizerInfo
    splits: dict[str, SplitInfo]
    ledger: RecordCounts
    sources: FileInfo
    """sources.jsonl: one line per input file, with its counts. Rows refer to its line numbers."""
    rejects: FileInfo
    """rejects.jsonl: one line per rejected record: file, record, reason."""
    chat_template: FileInfo | None = None
    """chat_template.jinja: the template that wrote the conversations; None for other tasks."""
    fields: dict[str, str] | None = None
    """The field of the records that has each part of a conversation, such as "messages"; None for
    other tasks."""
    counts: dict[str, Count] | None = None
    """What users should know of the conversations, by name; None for other tasks."""

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-64 of the content, 16 hex digits. Equal data sets have equal fingerprints."""
        return xxhash.xxh3_64_hexdigest(canonical(self.content()))

    @property
    def side_files(self) -> tuple[FileInfo, ...]:
        """All files but the shards and the manifest."""
        template = (self.chat_template,) if self.chat_template else ()
        return (self.tokenizer, self.sources, self.rejects, *template)

    def content(self) -> dict[str, Any]:
        """Return the content of the file without its checksum."""
        return dataclasses.asdict(self, dict_factory=_without_absent)

    def split(self, name: str) -> SplitInfo:
        """Return a split by name.

        Raises:
            ManifestError: The split is missing. The message lists the existing splits.
        """
        if name not in self.splits:
            there = ", ".join(self.splits) or "none"
            raise ManifestError(f"no split `{name}` in this data set; it has: {there}")
        return self.splits[name]

    def encoded(self) -> bytes:
        """Return the bytes of manifest.json."""
        content = self.content() | {CHECKSUM_KEY: self.fingerprint}
        return json.dumps(content, indent=1).encode() + b"\n"

    def write(self, folder: Path) -> None:
        """Write manifest.json into `folder`, atomically."""
        atomic_write(folder / MANIFEST_FILE, self.encoded())

    @classmethod
    def read(cls, path: StorePath) -> "Manifest":
        """Read and check the manifest.json of a data set.

        Raises:
            ManifestError: The file is missing, not JSON, of another version, damaged or
                inconsistent.
        """
        store = open_store(path)
        path = store.path(MANIFEST_FILE)
        return once(path, lambda: cls.decoded(stored(store, MANIFEST_FILE), path))

    @classmethod
    def decoded(cls, raw: bytes, file: str) -> "Manifest":
        """Verify and decode the bytes of a manifest.json.

        Raises the errors of `read`. Their messages name the manifest `file`.
        """
        again = "Restore it, or run `pretokenize` again."
        try:
            content = json.loads(raw)
            if not isinstance(content, dict):
                raise ValueError(f"got {type(content).__name__}")
            version, checksum = content.get("format_version"), content.pop(CHECKSUM_KEY, None)
            actual = xxhash.xxh3_64_hexdigest(canonical(content))
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{file}: is not a JSON object ({error}). {again}") from error
        if version != FORMAT_VERSION:
            raise ManifestError(
                f"{file}: expected format version {FORMAT_VERSION}, got {version!r}. "
                "Run `pretokenize` again, or use the tokenfeed release that wrote it."
            )
        if checksum != actual:
            raise ManifestError(
                f"{file}: the content has checksum {actual}, but the file says {checksum!r}: it is "
                f"damaged or was edited. {again}"
            )
        try:
            manifest = msgspec.convert(content, cls)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise ManifestError(f"{file}: {error}. Run `pretokenize` again.") from error
        manifest._check(file)
        vars(manifest)["fingerprint"] = checksum  # computing it for 100,000 shards takes a second
        return manifest

    def _check(self, path: str) -> None:
        self._check_files(path)
        made_by = self.tokenizer
        if max(made_by.pad_id, made_by.end_id or 0) >= made_by.vocabulary_size:
            raise ManifestError(
                f"{path}: `pad_id` {made_by.pad_id} or `end_id` {made_by.end_id} is beyond the "
                f"vocabulary of {made_by.vocabulary_size:,}. Run `pretokenize` again."
            )
        for name, split in self.splits.items():
            counts = split.length_histogram
            if len(counts) != _HISTOGRAM_BINS or sum(counts) != split.rows:
                raise ManifestError(
                    f"{path}: the split `{name}` has {split.rows:,} rows, but a histogram of "
                    f"{sum(counts):,} in {len(counts)} bins. Run `pretokenize` again."
                )
        written = sum(split.rows for split in self.splits.values())
        ledger = self.ledger
        if written != ledger.written or ledger.read != (
            ledger.written
            + ledger.empty
            + ledger.rejected
            + (ledger.removed or 0)
            + (ledger.left_out or 0)
        ):
            raise ManifestError(
                f"{path}: the counts of records do not match: read {ledger.read:,}, written "
                f"{ledger.written:,}, empty {ledger.empty:,}, rejected {ledger.rejected:,}, "
                f"removed {ledger.removed or 0:,}, left out {ledger.left_out or 0:,}, rows in "
                f"shards {written:,}. Run `pretokenize` again."
            )

    def _check_files(self, path: str) -> None:
        shards = [shard for split in self.splits.values() for shard in split.shards]
        for name in (info.file for info in (*self.side_files, *shards)):
            if not _FILE_NAME.fullmatch(name):
                raise ManifestError(
                    f"{path}: {name!r} is not a file below the folder of the data set. Run "
                    "`pretokenize` again."
                )
            if _is_own(name):
                raise ManifestError(
                    f"{path}: lists {name!r}, a name that tokenfeed uses for files of its own. The "
                    "manifest was forged: use the data set only if you know who made it, and run "
                    "`pretokenize` again."
                )
        for shard in shards:
            most = min(shard.rows, shard.bytes // _LEAST_BATCH_BYTES)
            if not min(shard.rows, 1) <= shard.batches <= most or shard.rows > shard.tokens:
                raise ManifestError(
                    f"{path}: {shard.file} cannot have {shard.batches:,} record batches, "
                    f"{shard.rows:,} rows and {shard.tokens:,} tokens in {shard.bytes:,} bytes. "
                    "Restore the file, or run `pretokenize` again."
                )


def _is_own(name: str) -> bool:
    """Return whether a manifest would list a file that tokenfeed reads without it. File systems may
    ignore case."""
    first = posixpath.normpath(name).casefold().split("/")[0]
    return first in (MANIFEST_FILE, MADE_BY_FILE, PARTS_FOLDER)


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


def read_checked(store: Store, info: FileInfo) -> bytes:
    """Read a file whose content must be as the manifest says.

    Raises:
        ManifestError: The file is missing, cannot be read, or has another checksum.
    """
    path = store.path(info.file)
    try:
        content = once(path, lambda: store.read(info.file))
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error_line(error)}. Restore it.") from error
    if (actual := xxhash.xxh3_64_hexdigest(content)) != info.xxh3:
        raise ManifestError(
            f"{path}: has checksum {actual}, but is {info.xxh3} in the manifest. Restore the file "
            "from another copy of the data set, or run `pretokenize` again."
        )
    return content
