"""`shards adopt FILE... OUT --tokenizer T`: make a data set from token files, in place.

The tokens stay in their files: each shard is a stitched file, which the loader reads like any
other. One pass reads every token once, to find the ends of rows, to compare ids with the
vocabulary, and to write the checksum of each record batch. So a file that changes later is detected
when it is read.
"""

import fnmatch
import io
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import ipc

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.pipeline.format.manifest import (
    REJECTS_FILE,
    SOURCES_FILE,
    TOKENIZER_FILE,
    Manifest,
    RecordCounts,
    ShardInfo,
    SplitInfo,
    TokenizerInfo,
    length_histogram,
)
from tokenfeed.pipeline.format.schema import (
    FORMAT_VERSION,
    INPUT_IDS,
    ORIGIN_FILE,
    ORIGIN_RECORD,
    Rows,
    record_batch,
    shard_schema,
    token_dtype,
)
from tokenfeed.pipeline.format.shard import FIRST_ROW_KEY, SEAL_KEY, batch_checksums, shard_metadata
from tokenfeed.pipeline.format.shard_writer import BATCH_ROWS, BATCH_TOKENS, UNSEALED
from tokenfeed.pipeline.format.stitched import STITCHED_SUFFIX, OtherFile, write_stitched
from tokenfeed.pipeline.format.storage import atomic_file
from tokenfeed.tools.data_sets.derived import Files, new_data_set
from tokenfeed.tools.data_sets.foreign import TokenFile, open_tokens
from tokenfeed.tools.data_sets.inspection import Inspect
from tokenfeed.tools.encoding.tokenizer import ModelFiles, TextTokenizer, fetch_tokenizer_json
from tokenfeed.tools.jobs.crew import Progress
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.shell.command_line import text

SHARD_TOKENS = 1 << 25
SHARD_ROWS = 1 << 22
_log = logging.getLogger(__name__)
_SPLIT = re.compile(r"\w[\w-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopt:
    """Make a data set from the token files of Megatron, nanoGPT, llm.c, OLMo or datatrove, without
    copying the tokens."""

    paths: tuple[Annotated[str, text("FILE... OUT")], ...]
    """Files with tokens (.bin, .npy, .ds), or their addresses; then a new or empty folder for the
    data set. The files must stay where they are."""
    tokenizer: Annotated[str, text("FILE|FOLDER|HUB-ID")] | None = None
    """The tokenizer that made the ids. Required."""
    split: tuple[Annotated[str, text("NAME=GLOB")], ...] = ()
    """Put the files whose names match GLOB into the split NAME. Default: val.bin and files named
    like `validation` or `val` into `validation`, the others into `train`."""
    end_token: Annotated[str, text("TOKEN")] | None = None
    """Token that ends each document, in formats without an index. Default: the model's."""
    json: bool = False
    """Print the manifest as JSON."""

    def run(self) -> int:
        """Adopt the files."""
        if len(self.paths) < 2 or not self.tokenizer:
            raise ConfigError(
                "expected FILE... OUT and `--tokenizer`, like `shards adopt train.bin out/ "
                "--tokenizer gpt2`."
            )
        tokenizer = TextTokenizer.load(
            fetch_tokenizer_json(self.tokenizer),
            origin=self.tokenizer,
            end_token=self.end_token,
            files=ModelFiles.read(self.tokenizer),
        )
        if tokenizer.end_problem:
            _log.warning("%s", tokenizer.end_problem)
        parted = (given.partition("=") for given in self.split)
        splits = tuple((name, glob) for name, _, glob in parted)
        adopt(self.paths[:-1], self.paths[-1], tokenizer, splits)
        return Inspect(out=self.paths[-1], json=self.json).run()


def adopt(
    paths: Sequence[str],
    out: str,
    tokenizer: TextTokenizer,
    splits: tuple[tuple[str, str], ...] = (),
) -> Manifest:
    """Make a data set from token files.

    Args:
        paths: The files, or their addresses.
        out: A new or empty folder.
        tokenizer: What made the ids.
        splits: Splits, each with the pattern of its files; the first that matches counts.

    Raises:
        ConfigError: A file is of no known format, or the folder holds something.
        CorpusError: A file is damaged, or an id is not in the vocabulary.
    """
    files = [open_tokens(path, tokenizer) for path in paths]
    if wrong := [name for name, glob in splits if not (_SPLIT.fullmatch(name) and glob)]:
        raise ConfigError(f"`--split {wrong[0]}`: expected NAME=GLOB, like validation='*_val*'.")
    of_split: dict[str, list[int]] = {"train": []}
    for number, file in enumerate(files):
        of_split.setdefault(_split_of(file.name, splits), []).append(number)
    if unused := [given for given in splits if given[0] not in of_split]:
        raise ConfigError(f"`--split {'='.join(unused[0])}`: no file matches it. Correct the GLOB.")
    by_place: dict[str, int] = {}
    for number, file in enumerate(files):
        first = by_place.setdefault(file.file.real_path, number)
        if first != number:
            raise ConfigError(
                f"{file.name}: is the file {files[first].name}, whose rows would be there twice. "
                "Give it once."
            )
    described = " ".join(f"{file.file.path} {file.file.size}" for file in files)
    names = (*of_split, TOKENIZER_FILE, SOURCES_FILE, REJECTS_FILE)
    with (
        new_data_set(out, "shards adopt", described, names) as new,
        Bar([file.file.size for file in files]) as bar,
    ):
        ledgers: list[dict[str, Any]] = [
            {"path": file.name, "bytes": 0, "read": 0, "written": 0, "empty": 0, "rejected": 0}
            for file in files
        ]
        infos: dict[str, SplitInfo] = {}
        for split, numbers in sorted(of_split.items()):
            shards: list[ShardInfo] = []
            histogram = length_histogram(np.empty(0))
            for number in numbers:
                file, ledger, odd = files[number], ledgers[number], 0
                for part in _parts(file):
                    name = f"{split}/{len(shards):05d}.arrow"
                    shard, more = _stitch(new.work, name, file, part, number, tokenizer)
                    shards.append(shard)
                    odd += more
                    histogram += length_histogram(part.lengths)
                    ledger["written"] += len(part.lengths)
                    ledger["empty"] += part.empty
                    share = shards[-1].tokens / file.tokens
                    bar.advance(Progress(file.file.size * share, shards[-1].tokens))
                ledger["read"] = ledger["written"] + ledger["empty"]
                if file.by_index and 0 < 2 * odd < ledger["written"]:
                    _log.warning(
                        "%s: %s of %s rows do not end with the end token or have another one, "
                        "unlike the rest. Is the index the one of this file?",
                        *(file.name, f"{odd:,}", f"{ledger['written']:,}"),
                    )
                bar.count_unit()
            infos[split] = SplitInfo(
                shards=tuple(shards), length_histogram=tuple(histogram.tolist())
            )
        content = Files({TOKENIZER_FILE: tokenizer.json_bytes})
        lines = "".join(json.dumps(ledger) + "\n" for ledger in ledgers)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            task="lm",
            columns=(),
            label_names=(),
            tokenizer=TokenizerInfo(
                file=TOKENIZER_FILE,
                bytes=len(tokenizer.json_bytes),
                xxh3=tokenizer.xxh3,
                vocabulary_size=tokenizer.vocabulary_size,
                end_id=tokenizer.end_id,
                pad_id=tokenizer.pad_id,
                engine="adopted",
                engine_version="",
                audited=0,
                differences=0,
                special_tokens_in_text="plain",
                special_tokens_added=False,
            ),
            splits=infos,
            ledger=RecordCounts.of(ledgers),
            sources=content.add(SOURCES_FILE, lines.encode()),
            rejects=content.add(REJECTS_FILE, b""),
        )
        new.finish(manifest, content)
    return manifest


class _Part(NamedTuple):
    """Rows of a file that become a shard."""

    first_token: int
    lengths: np.ndarray
    """Tokens of each row that has some, int64."""
    numbers: np.ndarray
    """Number of each of these rows in the file, empty rows included."""
    empty: int
    """Rows without tokens."""


def _parts(file: TokenFile) -> Iterator[_Part]:
    """Yield the rows of each shard."""
    token = row = num_tokens = num_rows = 0
    pending: list[np.ndarray] = []
    for lengths in file.lengths():
        while len(lengths):
            ends = num_tokens + np.cumsum(lengths)
            stop = min(int(np.searchsorted(ends, SHARD_TOKENS)) + 1, SHARD_ROWS - num_rows)
            pending.append(lengths[:stop])
            num_tokens = int(ends[min(stop, len(ends)) - 1])
            num_rows += len(pending[-1])
            lengths = lengths[stop:]
            if num_tokens >= SHARD_TOKENS or num_rows == SHARD_ROWS:
                yield _part(token, row, pending)
                token, row = token + num_tokens, row + num_rows
                pending, num_tokens, num_rows = [], 0, 0
    if num_rows:
        yield _part(token, row, pending)


def _part(first_token: int, first_row: int, pending: list[np.ndarray]) -> _Part:
    lengths = np.concatenate(pending)
    numbers = np.flatnonzero(lengths)
    return _Part(first_token, lengths[numbers], first_row + numbers, len(lengths) - len(numbers))


def _stitch(
    folder: Path, name: str, file: TokenFile, part: _Part, source: int, tokenizer: TextTokenizer
) -> tuple[ShardInfo, int]:
    """Write the stitched file of some rows.

    Returns:
        What the manifest says about the shard, and how many rows have another place of the end
        token than the last.

    Raises:
        CorpusError: An id is not in the vocabulary.
    """
    ends, size = np.cumsum(part.lengths), tokenizer.vocabulary_size
    ids = file.ids(part.first_token, int(ends[-1]))
    if ids.min() < 0 or ids.max() >= size:
        at = int(np.argmax((ids < 0) | (ids >= size)))
        raise CorpusError(
            f"{file.name}, token {part.first_token + at:,}: has the id {int(ids[at]):,}, and the "
            f"tokenizer has {size:,} ids. Give the tokenizer that made it."
        )
    are_odd = ids[ends - 1] != tokenizer.end_id
    are_odd |= np.add.reduceat(ids == tokenizer.end_id, ends - part.lengths, dtype=np.int64) > 1
    ids = ids.view(token_dtype(size))
    schema, seal = shard_schema(size, ()), xxhash.xxh3_64()
    described = schema.with_metadata(shard_metadata(name, size) | {SEAL_KEY: UNSEALED})
    sink = _Sink()
    with ipc.new_file(pa.PythonFile(sink, "w"), described) as writer:
        row = batches = 0
        while row < len(ends):
            first = int(ends[row - 1]) if row else 0
            stop = int(np.searchsorted(ends, first + BATCH_TOKENS)) + 1
            stop = min(stop, row + BATCH_ROWS, len(ends))
            origins: dict[str, np.ndarray] = {
                ORIGIN_FILE: np.full(stop - row, source, np.uint32),
                ORIGIN_RECORD: part.numbers[row:stop].astype(np.uint64),
            }
            taken = ids[first : int(ends[stop - 1])]
            rows = Rows(part.lengths[row:stop], {INPUT_IDS: taken}, origins)
            batch, buffers = record_batch(rows, schema)
            checksums = batch_checksums(name, batches, row, buffers)
            sink.expect(taken, file.first + (part.first_token + first) * ids.itemsize)
            writer.write_batch(batch, custom_metadata={FIRST_ROW_KEY: str(row)} | checksums)
            assert sink.expected is None
            seal.update(b"".join(checksums.values()))
            row, batches = stop, batches + 1
    own = sink.own.getvalue().replace(UNSEALED.encode(), seal.hexdigest().encode())
    with atomic_file(folder / f"{name}{STITCHED_SUFFIX}") as stitched:
        others, pieces = (OtherFile(file.file.path, file.file.size),), np.array(sink.pieces)
        write_stitched(stitched, others, pieces, sink.size, own)
    info = ShardInfo(
        file=name,
        bytes=sink.size,
        xxh3=_checksum(sink, own, ids, file.first + part.first_token * ids.itemsize),
        rows=len(ends),
        tokens=int(ends[-1]),
        batches=batches,
        longest_row=int(part.lengths.max()),
        seal=seal.hexdigest(),
    )
    return info, int(are_odd.sum())


class _Sink(io.RawIOBase):
    """Receives a shard from Arrow, and keeps all bytes but those of the ids, which are in another
    file."""

    def __init__(self) -> None:
        self.own = io.BytesIO()
        self.pieces: list[tuple[int, int, int]] = []
        """First byte in the shard, other file or -1, first byte there."""
        self.size = 0
        self.expected: tuple[bytes, int] | None = None
        """The ids of the present record batch, and where they are in the other file."""

    def expect(self, ids: np.ndarray, place: int) -> None:
        self.expected = ids.tobytes(), place

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        place, file = self.own.tell(), -1
        if self.expected and data == self.expected[0]:
            (_, place), file = self.expected, 0
            self.expected = None
        else:
            self.own.write(data)
        if not (self.pieces and file == self.pieces[-1][1] == -1):
            self.pieces.append((self.size, file, place))
        self.size += len(data)
        return len(data)


def _checksum(sink: _Sink, own: bytes, ids: np.ndarray, place: int) -> str:
    """Return the checksum of a shard whose ids begin at `place` of the other file."""
    digest, of_ids, of_own = xxhash.xxh3_64(), ids.view(np.uint8).data, memoryview(own)
    ends = [*(start for start, _, _ in sink.pieces[1:]), sink.size]
    for (start, file, first), end in zip(sink.pieces, ends, strict=True):
        first, source = (first, of_own) if file == -1 else (first - place, of_ids)
        digest.update(source[first : first + end - start])
    return digest.hexdigest()


def _split_of(name: str, splits: tuple[tuple[str, str], ...]) -> str:
    for split, pattern in splits:
        if any(fnmatch.fnmatchcase(each, pattern) for each in (name, Path(name).name)):
            return split
    words = Path(name).stem.lower().replace("-", "_").split("_")
    return "validation" if {"val", "valid", "validation"} & set(words) else "train"
