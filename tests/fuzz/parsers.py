"""The parsers of untrusted bytes: for each, valid files to mutate and a way to read them.

`read` raises an error of tokenfeed, or returns. It raises `Wrong` if it returns other tokens than
the valid files hold. Any other exception is a bug.
"""

import base64
import bz2
import contextlib
import gzip
import io
import json
import lzma
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
import zstandard
from fuzz.mutations import Seal
from support.checkpoints import save
from support.corpora import read as read_corpus
from support.corpora import texts
from support.data_sets import random_rows, write_rows
from support.delivery import open_loader
from support.token_rows import write_datatrove, write_litdata
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenfeed.pipeline.format.manifest import CHECKSUM_KEY, Manifest, canonical
from tokenfeed.pipeline.format.shard import ExpectedShard, ShardReader
from tokenfeed.pipeline.format.shard_ranges import RangedShard
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.pipeline.planning.state import resealed
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.data_sets.adopt import adopt
from tokenfeed.tools.data_sets.explain import Explain
from tokenfeed.tools.data_sets.export import Format, export_data_set
from tokenfeed.tools.data_sets.verify import find_problems
from tokenfeed.tools.encoding.tiktoken_files import KNOWN, tiktoken_to_json
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.trainer.checkpoints.checkpoint_files import DAMAGE, Checkpoints


class Wrong(Exception):
    """A reader returned other tokens than the valid files hold, without an error."""


@dataclass(frozen=True, kw_only=True)
class Parser:
    """A parser of untrusted files."""

    make: Callable[[Path], Sequence[str]]
    """Writes valid files into a folder, and returns the names of those to mutate."""
    reads: Sequence[Callable[[Path], None]]
    """Ways to read them, of which each is tried."""
    seals: dict[str, Seal] = field(default_factory=dict)
    """How files of JSON get their checksum, by name."""


def _seal_manifest(content: dict[str, Any]) -> bytes:
    content.pop(CHECKSUM_KEY, None)
    return json.dumps(
        content | {CHECKSUM_KEY: xxhash.xxh3_64_hexdigest(canonical(content))}
    ).encode()


def _seal_state(content: dict[str, Any]) -> bytes:
    with contextlib.suppress(msgspec.ValidationError):  # refused before its checksum is compared
        content = resealed(content)
    return json.dumps(content).encode()


def _seal_checkpoint(content: dict[str, Any]) -> bytes:
    content.pop("xxh3", None)
    whole = json.dumps(content).encode() + b"\n"
    return json.dumps({"xxh3": xxhash.xxh3_64_hexdigest(whole)} | content).encode()


def _tokenizer() -> bytes:
    """Return a tokenizer.json of 300 ids."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        texts(12),
        trainers.BpeTrainer(
            initial_alphabet=alphabet,
            special_tokens=["<|endoftext|>"],
            vocab_size=300,
            show_progress=False,
        ),
    )
    return made.to_str().encode()


def _data_set(folder: Path) -> Path:
    """Write a small data set: a shard of four record batches for training, one for validation."""
    with mock.patch("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 100):
        lengths = np.arange(1, 29)
        splits = {
            "train": random_rows(lengths, vocabulary_size=300),
            "validation": random_rows(lengths[:8], vocabulary_size=300),
        }
        return write_rows(folder / "set", splits, 300, tokenizer=_tokenizer())


def _ids(folder: Path) -> list[bytes]:
    """Read every record batch of a data set as a local file, and by ranges as from a store."""
    manifest = Manifest.read(folder)
    found = []
    for split in manifest.splits.values():
        for info in split.shards:
            reader = ShardReader.open(folder, manifest, info)
            whole = open_store(folder).open(info.file, info.bytes).read()
            size, columns = manifest.tokenizer.vocabulary_size, manifest.columns
            ranged = RangedShard.from_end(
                ExpectedShard.of(info.file, info, size, columns, None), whole
            )
            for number in range(info.batches):
                rows, _ = reader.read(number)
                start, length = ranged.span(number, 1)
                again, _ = ranged.rows(number, whole[start : start + length])
                found.append(rows.ids.tobytes())
                if again.ids.tobytes() != found[-1]:
                    raise Wrong("a range has other tokens than the file")
    return found


def _make_shard(folder: Path) -> Sequence[str]:
    (folder / "expected").write_bytes(b"".join(_ids(_data_set(folder))))
    return ["set/train/00000.arrow", "set/validation/00000.arrow"]


def _read_shard(folder: Path) -> None:
    if b"".join(_ids(folder / "set")) != (folder / "expected").read_bytes():
        raise Wrong("a damaged shard gave other tokens")


def _make_manifest(folder: Path) -> Sequence[str]:
    _make_shard(folder)
    return ["set/manifest.json"]


def _read_manifest(folder: Path) -> None:
    """A sealed manifest may leave out shards. The rest must be rows of the shards."""
    expected = (folder / "expected").read_bytes()
    if any(ids not in expected for ids in _ids(folder / "set")):
        raise Wrong("a manifest gave other tokens")


def _verify(folder: Path) -> None:
    manifest = Manifest.read(folder / "set")
    for problem in find_problems(folder / "set", manifest):
        if "\n" in problem:
            raise Wrong(f"a problem of two lines: {problem!r}")


def _load(folder: Path) -> None:
    with open_loader(folder / "set") as loader:
        next(iter(loader))


def _make_state(folder: Path) -> Sequence[str]:
    with open_loader(_data_set(folder), micro_batches_per_step=2) as loader:
        for _ in zip(range(2), loader, strict=False):
            pass
        (folder / "state.json").write_text(json.dumps(loader.state_dict()))
    return ["state.json"]


def _explain(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        Explain(out=(str(folder / "set"),), state=folder / "state.json").run()


def _read_state(folder: Path) -> None:
    try:
        content = json.loads((folder / "state.json").read_bytes())
    except (ValueError, RecursionError):
        return  # of the caller, who decodes the file
    with open_loader(folder / "set", micro_batches_per_step=2) as loader:
        loader.load_state_dict(content)
        for _ in zip(range(2), loader, strict=False):
            pass


def _make_checkpoint(folder: Path) -> Sequence[str]:
    made = save(folder / "checkpoints", 1).relative_to(folder)
    return [f"{made}/checkpoint.json", f"{made}/state-0.safetensors"]


def _read_checkpoint(folder: Path) -> None:
    checkpoint = Checkpoints(folder / "checkpoints").open()
    with contextlib.suppress(*DAMAGE):  # `resume` explains these
        checkpoint.read()


_INDEXES: dict[Format, tuple[str, ...]] = {
    "megatron": ("train.bin", "train.idx"),
    "llm.c": ("train_000001.bin",),
    "olmo": ("train.npy", "train.csv.gz"),
    "datatrove": ("train.ds", "train.ds.index", "train.ds.metadata"),
}


def _index(to: Format) -> Parser:
    """Foreign files of tokens with their index. The rows are what the index says, and the tokens
    those of the file."""

    def make(folder: Path) -> Sequence[str]:
        made = _data_set(folder)
        shutil.copy(made / "tokenizer", folder / "tokenizer.json")
        export_data_set(str(made), folder / "foreign", to)
        shutil.rmtree(made)
        return [f"foreign/{name}" for name in _INDEXES[to]]

    def read(folder: Path) -> None:
        shutil.rmtree(folder / "out", ignore_errors=True)
        tokenizer = TextTokenizer.load((folder / "tokenizer.json").read_bytes(), origin="it")
        path = folder / "foreign" / _INDEXES[to][0]
        adopt([str(path)], str(folder / "out"), tokenizer)
        if problems := list(find_problems(folder / "out", Manifest.read(folder / "out"))):
            raise Wrong(f"an adopted data set is damaged: {problems[0]}")
        if b"".join(_ids(folder / "out")) not in path.read_bytes():
            raise Wrong("the adopted tokens are not those of the file")

    return Parser(make=make, reads=[read])


def _make_stitched(folder: Path) -> Sequence[str]:
    files = _index("olmo").make(folder)
    tokenizer = TextTokenizer.load((folder / "tokenizer.json").read_bytes(), origin="it")
    adopt([str(folder / files[0])], str(folder / "set"), tokenizer)
    (folder / "expected").write_bytes(b"".join(_ids(folder / "set")))
    return [str(path.relative_to(folder)) for path in (folder / "set/train").iterdir()]


_TEXTS = texts(12)
_LINES = "".join(
    json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(_TEXTS)
).encode()


def _table(write: Callable[[pa.Table, io.BytesIO], None]) -> bytes:
    sink = io.BytesIO()
    write(pa.table({"text": _TEXTS, "n": list(range(len(_TEXTS)))}), sink)
    return sink.getvalue()


def _arrow(table: pa.Table, sink: io.BytesIO) -> None:
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, 4)


def _stream(table: pa.Table, sink: io.BytesIO) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, 4)


_DELIMITED = "text,n\n" + "".join(f'"{text[:300]}",{n}\n' for n, text in enumerate(_TEXTS))


def _mds() -> bytes:
    """A shard of mosaicml-streaming with a column of texts."""
    names = {"column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None]}
    config, texts = json.dumps(names).encode(), [text[:300].encode() for text in _TEXTS]
    first = 4 * (len(texts) + 2) + len(config)
    ends = first + np.cumsum([0, *(4 + len(text) for text in texts)])
    numbers = np.array([len(texts), *ends], np.uint32).tobytes()
    return numbers + config + b"".join(np.uint32(len(t)).tobytes() + t for t in texts)


_CORPORA = {
    "a.jsonl": _LINES,
    "a.json": json.dumps([{"text": text} for text in _TEXTS]).encode(),
    "a.csv": _DELIMITED.encode(),
    "a.tsv": _DELIMITED.replace(",", "\t").encode(),
    "a.txt": "\n".join(_TEXTS).encode(),
    "a.jsonl.gz": gzip.compress(_LINES, mtime=0),
    "a.jsonl.bz2": bz2.compress(_LINES),
    "a.jsonl.xz": lzma.compress(_LINES),
    "a.jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress(_LINES),
    "a.csv.gz": gzip.compress(_DELIMITED.encode(), mtime=0),
    "a.parquet": _table(lambda table, sink: pq.write_table(table, sink, row_group_size=4)),
    "a.arrow": _table(_arrow),
    "b.arrow": _table(_stream),
    "a.mds": _mds(),
}


def _make_corpus(name: str) -> Parser:
    def make(folder: Path) -> Sequence[str]:
        (folder / name).write_bytes(_CORPORA[name])
        return [name]

    return Parser(make=make, reads=[lambda folder: _read_corpus(folder / name)])


def _read_corpus(path: Path) -> None:
    good, bad = read_corpus(path, max_record_bytes=100_000)
    for value in good.values():
        value if isinstance(value, str) else bytes(value).decode()
    if any("\n" in reason for reason in bad.values()):
        raise Wrong(f"a reason of two lines: {bad!r}")


def _make_saved(folder: Path) -> Sequence[str]:
    (folder / "saved").mkdir()
    (folder / "saved/data-0.arrow").write_bytes(_CORPORA["b.arrow"])
    (folder / "saved/dataset_info.json").write_text("{}")
    content = {"_data_files": [{"filename": "data-0.arrow"}], "_split": "train"}
    (folder / "saved/state.json").write_text(json.dumps(content))
    return ["saved/state.json"]


def _token_rows(write: Callable[[Path, list[list[int]]], None], name: str) -> Parser:
    """Return the parser of a file of token ids with the files beside it.

    A changed id or border may stay unnoticed, because there are no checksums. The number of ids is
    that of the file, unless a record is rejected, or index.json has another type of ids.
    """
    rows = [[n, *range(n % 40)] for n in range(90)]

    def make(folder: Path) -> Sequence[str]:
        (folder / "rows").mkdir()
        write(folder / "rows", rows)
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(folder / "rows" / "index.json", folder / "expected")
        return [f"rows/{path.name}" for path in sorted((folder / "rows").iterdir())]

    def read(folder: Path) -> None:
        path, index = folder / "rows" / name, folder / "rows" / "index.json"
        good, bad = read_corpus(path, FieldKind.IDS, shard_bytes=1000, field="input_ids")
        is_whole = sum(map(len, good.values())) == sum(map(len, rows))
        is_same = not index.exists() or index.read_bytes() == (folder / "expected").read_bytes()
        assert is_whole or bad or not is_same

    return Parser(make=make, reads=[read])


def _make_tokenizer(folder: Path) -> Sequence[str]:
    (folder / "tokenizer.json").write_bytes(_tokenizer())
    return ["tokenizer.json"]


def _read_tokenizer(folder: Path) -> None:
    tokenizer = TextTokenizer.load((folder / "tokenizer.json").read_bytes(), origin="tokenizer")
    assert tokenizer.vocabulary_size > 0
    _ = tokenizer.before_word, tokenizer.end_id, tokenizer.has_template


def _make_tiktoken(folder: Path) -> Sequence[str]:
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"abc"]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "a.tiktoken").write_text("".join(lines))
    return ["a.tiktoken"]


def _read_tiktoken(folder: Path) -> None:
    known = dict.fromkeys(range(1000), KNOWN[50_256])
    json_bytes = tiktoken_to_json((folder / "a.tiktoken").read_bytes(), "tokenizer", known)
    TextTokenizer.load(json_bytes, origin="tokenizer")


PARSERS = {
    "shard": Parser(make=_make_shard, reads=[_read_shard]),
    "stitched": Parser(make=_make_stitched, reads=[_read_shard]),
    "manifest": Parser(
        make=_make_manifest,
        reads=[_read_manifest, _verify, _load],
        seals={"set/manifest.json": _seal_manifest},
    ),
    "state": Parser(
        make=_make_state,
        reads=[_read_state, _explain],
        seals={"state.json": _seal_state},
    ),
    "checkpoint": Parser(
        make=_make_checkpoint,
        reads=[_read_checkpoint],
        seals={"checkpoints/step-00000001/checkpoint.json": _seal_checkpoint},
    ),
    **{to: _index(to) for to in _INDEXES},
    "tokenizer": Parser(
        make=_make_tokenizer,
        reads=[_read_tokenizer],
        seals={"tokenizer.json": lambda content: json.dumps(content).encode()},
    ),
    "tiktoken": Parser(make=_make_tiktoken, reads=[_read_tiktoken]),
    "saved": Parser(make=_make_saved, reads=[lambda folder: _read_corpus(folder / "saved")]),
    "litdata": _token_rows(partial(write_litdata, chunk_rows=90), "chunk-0-0.bin"),
    "datatrove rows": _token_rows(write_datatrove, "0.ds"),
    **{name: _make_corpus(name) for name in _CORPORA},
}
"""By name: `python -m tests.fuzz --parser NAME`."""
