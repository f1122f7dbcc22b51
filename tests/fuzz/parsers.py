"""The parsers of untrusted bytes: for each, valid files to mutate and a way to read them.

`read` raises an error of tokenfeed, or returns. It raises `Wrong` if it returns other tokens than
the valid files hold. Any other exception is a bug.
"""

import bz2
import contextlib
import gzip
import io
import itertools
import json
import logging
import lzma
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from fuzz.mutations import Layer
from pyarrow import ipc
from support.checkpoints import assert_same, make_state, save, sealed_content
from support.corpora import read_sources, texts
from support.data_sets import (
    byte_tokenizer,
    random_rows,
    rows_of_ids,
    sealed_manifest,
    write_rows,
)
from support.delivery import open_loader
from support.token_rows import (
    write_datatrove,
    write_llm_c,
    write_megatron,
    write_nanogpt,
    write_numpy,
    write_olmo,
)

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format import shard
from tokenfeed.pipeline.format.manifest import Manifest, ShardInfo
from tokenfeed.pipeline.format.schema import (
    INPUT_IDS,
    Rows,
    batch_buffers,
    column_kinds,
    offsets_of,
    record_batch,
    shard_schema,
)
from tokenfeed.pipeline.format.shard_ranges import RangedShard
from tokenfeed.pipeline.format.storage import file_xxh3
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.pipeline.planning.state import resealed
from tokenfeed.tools.corpus.input_files import IdFacts, InputFile, size_and_state
from tokenfeed.tools.corpus.records import FieldKind, Unusable
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.data_sets.explain import Explain
from tokenfeed.tools.data_sets.verify import find_problems
from tokenfeed.tools.encoding.chat_messages import Conversation
from tokenfeed.tools.encoding.tokenizer import ModelFiles, TextTokenizer
from tokenfeed.tools.pretokenizing.inputs import chat_template_of
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.trainer.checkpoints.checkpoint_files import DAMAGE, Checkpoints
from tokenfeed.trainer.data.datasets import as_tokenizer

_TEXTS, _SIZE = [text[:90] for text in texts(6)], 64
"""The texts of corpora, and the size of the vocabulary. Small files take less time."""
_TOKENIZER = byte_tokenizer(_TEXTS, vocabulary_size=_SIZE).to_str().encode()


class Wrong(Exception):
    """A reader returned other tokens than the valid files hold, without an error."""


@dataclass(frozen=True)
class Parser:
    """A parser of untrusted files."""

    make: Callable[[Path], Sequence[str]]
    """Writes valid files into a folder, and returns the names of those to mutate."""
    reads: Sequence[Callable[[Path, str], bool | None]]
    """Ways to read them, given the folder and the changed file. They return False if nothing of
    the file was used."""
    layers: dict[str, Layer] = field(default_factory=dict)
    """What is below the checksums and the compression of a file, by its name."""


def _files(files: dict[str, bytes]) -> Callable[[Path], Sequence[str]]:
    """Return what writes some files. The first of them is mutated."""

    def make(folder: Path) -> Sequence[str]:
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        return [*files][:1]

    return make


def _seal_state(content: dict[str, Any]) -> bytes:
    with contextlib.suppress(ValueError, zlib.error):  # refused before its checksum is compared
        content = resealed(content)
    return json.dumps(content).encode()


def _data_set(folder: Path) -> Path:
    """Write a small data set: a compressed shard of three record batches for training, and one
    for validation without compression, in which more changes can be decoded."""
    splits = {
        split: random_rows(np.arange(1, longest), vocabulary_size=_SIZE)
        for split, longest in (("train", 16), ("validation", 6))
    }
    writer = "tokenfeed.pipeline.format.shard_writer"
    codecs = mock.patch(f"{writer}.pa.Codec", side_effect=[pa.Codec("zstd"), None])
    with codecs, mock.patch(f"{writer}.BATCH_TOKENS", 50):
        return write_rows(folder / "set", splits, _SIZE, tokenizer=_TOKENIZER)


_manifest = cache(Manifest.read)


def _batches(folder: Path, manifest: Manifest, info: ShardInfo) -> list[tuple[Rows, int]]:
    """Read every record batch of a shard as a local file, and by ranges as from a store."""
    reader = shard.ShardReader.open(folder, manifest, info)
    found = [reader.read(number) for number in range(info.batches)]
    whole = open_store(folder).open(info.file, info.bytes).read()
    expected = shard.ExpectedShard.of(info.file, info, _SIZE, manifest.columns, None)
    ranged = RangedShard.from_end(expected, whole)
    for number, (rows, _) in enumerate(found):
        start, length = ranged.span(number, 1)
        again, _ = ranged.rows(number, whole[start : start + length])
        if not np.array_equal(again.ids, rows.ids) or rows.lengths.sum() != len(rows.ids):
            raise Wrong("a range has other tokens than the file")
    return found


def _ids(folder: Path, manifest: Manifest) -> list[bytes]:
    infos = (info for split in manifest.splits.values() for info in split.shards)
    return [rows.ids.tobytes() for info in infos for rows, _ in _batches(folder, manifest, info)]


def _with_checksums(name: str, data: bytes) -> bytes:
    """Return a damaged shard with right checksums of its damaged record batches."""
    schema = shard_schema(_SIZE, ())
    with contextlib.suppress(*shard.UNDECODABLE):
        reader = ipc.open_file(data)
        for number in range(3 if reader.schema.equals(schema) else 0):
            batch, metadata = reader.get_batch_with_custom_metadata(number)
            buffers = batch_buffers(batch, column_kinds(schema))
            row = int(metadata[shard.FIRST_ROW_KEY])
            for key, checksum in shard.batch_checksums(name, number, row, buffers).items():
                data = data.replace(metadata[key], checksum)
    return data


_SHARDS = ("train/00000.arrow", "validation/00000.arrow")


def _make_shard(folder: Path) -> Sequence[str]:
    made = _data_set(folder)
    (folder / "expected").write_bytes(b"".join(_ids(made, Manifest.read(made))))
    return [f"set/{name}" for name in _SHARDS]


def _read_shard(folder: Path, file: str) -> None:
    """Read a damaged shard. Seven of eight times, the manifest has its size."""
    manifest, data = _manifest(folder / "set"), (folder / file).read_bytes()
    (info,) = manifest.splits[file.split("/")[1]].shards
    with contextlib.suppress(OSError):
        if zlib.crc32(data) % 8 and (size := open_store(folder / "set").size(info.file)) < 1 << 20:
            info = replace(info, bytes=size)
    ids, are_sealed = b"", True
    for number, (rows, first_row) in enumerate(_batches(folder / "set", manifest, info)):
        if first_row + len(rows) > info.rows or rows.lengths.max() > info.longest_row:
            raise Wrong("a shard gave rows that the manifest does not have")
        buffers = {"": offsets_of(rows.lengths).astype(np.int32), "input_ids": rows.ids}
        (checksum,) = shard.batch_checksums(info.file, number, first_row, buffers).values()
        ids, are_sealed = ids + rows.ids.tobytes(), are_sealed and checksum in data
    if ids not in (folder / "expected").read_bytes() and not are_sealed:
        raise Wrong("a damaged shard gave tokens without their checksums")


_MOST_ZEROS = 60_000_000


def _record_batches(data: bytes) -> dict[str, Any]:
    """Return the seal of a shard, and what each of its record batches has."""
    reader = ipc.open_file(data)
    batches = map(reader.get_batch_with_custom_metadata, range(reader.num_record_batches))
    return {
        "seal": reader.schema.metadata[shard.SEAL_KEY].decode(),
        "batches": [
            {
                "first_row": metadata[shard.FIRST_ROW_KEY].decode(),
                "rows": batch.column(INPUT_IDS).to_pylist(),
                "zeros": 0,
            }
            for batch, metadata in batches
        ],
    }


def _sealed_shard(content: dict[str, Any]) -> bytes:
    """Return a shard with right checksums. `zeros` is the number of tokens of one more row, which
    takes hardly any room in the file."""
    schema, name = shard_schema(_SIZE, ()), _SHARDS[0]
    described = shard.shard_metadata(name, _SIZE) | {shard.SEAL_KEY: content["seal"]}
    sink, options = io.BytesIO(), ipc.IpcWriteOptions(compression="zstd")
    with ipc.new_file(sink, schema.with_metadata(described), options=options) as writer:
        for number, batch in enumerate(content["batches"]):
            zeros = min(abs(batch["zeros"]), _MOST_ZEROS)
            parts = [*batch["rows"], *([np.zeros(zeros)] if zeros else ())]
            ids = np.concatenate([np.array(part, np.uint16) for part in parts])
            rows = rows_of_ids(ids, np.array([*map(len, parts)]), _SIZE)
            made, buffers = record_batch(rows, schema)
            first, row = str(batch["first_row"]), 0
            with contextlib.suppress(ValueError):
                row = int(first) % 2**64
            checksums = shard.batch_checksums(name, number, row, buffers)
            metadata = {shard.FIRST_ROW_KEY: first.encode("utf-8", "surrogatepass")} | checksums
            writer.write_batch(made, custom_metadata=metadata)
    return sink.getvalue()


def _read_manifest(folder: Path, _: str) -> None:
    """A sealed manifest may leave out shards. The rest must be rows of the shards."""
    expected = (folder / "expected").read_bytes()
    if any(ids not in expected for ids in _ids(folder / "set", Manifest.read(folder / "set"))):
        raise Wrong("a manifest gave other tokens")


def _verify(folder: Path, _: str) -> None:
    for problem in find_problems(folder / "set", Manifest.read(folder / "set")):
        if "\n" in problem:
            raise Wrong(f"a problem of two lines: {problem!r}")


def _load(folder: Path, _: str) -> None:
    with open_loader(folder / "set") as loader:
        next(iter(loader))


def _make_state(folder: Path) -> Sequence[str]:
    with open_loader(_data_set(folder), micro_batches_per_step=2) as loader:
        for _ in zip(range(2), loader, strict=False):
            pass
        (folder / "state.json").write_text(json.dumps(loader.state_dict()))
    return ["state.json"]


def _explain(folder: Path, _: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        Explain(out=(str(folder / "set"),), state=folder / "state.json").run()


_loader = cache(lambda folder: open_loader(folder / "set", micro_batches_per_step=2))


def _read_state(folder: Path, _: str) -> bool:
    """A loader is used until it accepts a state."""
    try:
        content = json.loads((folder / "state.json").read_bytes())
    except (ValueError, RecursionError):
        return False  # of the caller, who decodes the file
    _loader(folder).load_state_dict(content)
    with _loader(folder) as loader:
        _loader.cache_clear()
        for _ in zip(range(2), loader, strict=False):
            pass
    return True


def _make_checkpoint(folder: Path) -> Sequence[str]:
    made = save(folder / "checkpoints", 1).relative_to(folder)
    shutil.copy(folder / made / "checkpoint.json", folder / "valid.json")
    return [f"{made}/checkpoint.json", f"{made}/state-0.safetensors"]


def _read_checkpoint(folder: Path, file: str) -> None:
    """Read a damaged checkpoint. Seven of eight times, checkpoint.json has the checksum of damaged
    tensors."""
    path, is_sealed = folder / file, False
    if path.suffix == ".safetensors":
        content = json.loads((folder / "valid.json").read_bytes())
        if is_sealed := zlib.crc32(path.read_bytes()) % 8 > 0:
            content["files"] = {path.name: file_xxh3(path)}
        path.with_name("checkpoint.json").write_bytes(sealed_content(content))
    checkpoint = Checkpoints(folder / "checkpoints").open()
    with contextlib.suppress(*DAMAGE):  # `resume` explains these
        found = checkpoint.read()
        if not is_sealed:
            assert_same(found, make_state(1))


LAYERS = {
    "gz": Layer(gzip.decompress, partial(gzip.compress, mtime=0)),
    "bz2": Layer(bz2.decompress, partial(bz2.compress, compresslevel=1)),
    "xz": Layer(lzma.decompress, partial(lzma.compress, preset=0)),
    "zst": Layer(
        zstandard.ZstdDecompressor().decompress,
        zstandard.ZstdCompressor(write_checksum=True).compress,
    ),
    "json": Layer(json.loads, lambda content: json.dumps(content).encode()),
}
"""By the ending of the name, for files without an own layer."""

_loaded = cache(lambda path: TextTokenizer.load(path.read_bytes(), origin="it"))


_LINES = "".join(
    json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(_TEXTS)
).encode()


_TABLE = pa.table({"text": _TEXTS, "n": list(range(len(_TEXTS)))})


def _arrow(new: Callable[..., Any], table: pa.Table = _TABLE) -> bytes:
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, 3)
    return sink.getvalue()


_NESTED = pa.table({"words": [text.split() for text in _TEXTS], "in": [{"a": [t]} for t in _TEXTS]})


_DELIMITED = "text,n\n" + "".join(f'"{text}",{n}\n' for n, text in enumerate(_TEXTS))


_CORPORA = {
    "a.jsonl": _LINES,
    "a.json": json.dumps([{"text": text} for text in _TEXTS]).encode(),
    "a.csv": _DELIMITED.encode(),
    "a.tsv": _DELIMITED.replace(",", "\t").encode(),
    "a.txt": "\n".join(_TEXTS).encode(),
    "a.jsonl.gz": gzip.compress(_LINES, mtime=0),
    "a.jsonl.bz2": bz2.compress(_LINES, 1),
    "a.jsonl.xz": lzma.compress(_LINES, preset=0),
    "a.jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress(_LINES),
    "a.csv.gz": gzip.compress(_DELIMITED.encode(), mtime=0),
    "a.parquet": _arrow(pq.ParquetWriter),
    "a.arrow": _arrow(ipc.new_file),
    "b.arrow": _arrow(ipc.new_stream),
}


@cache
def _found(path: Path, field: str = "text") -> list[InputFile]:
    ids = IdFacts("<u2", 0) if field == "input_ids" else None
    found = find_corpus(
        (str(path),), out=path.parent / "out", field=field, max_record_bytes=100_000, ids=ids
    )
    return list(found.sources)


def _source(path: Path, field: str = "text") -> list[InputFile]:
    """Return the file as a source. Seven of eight times, its format is not detected again."""
    if zlib.crc32(path.read_bytes()) % 8 == 0:
        return _found.__wrapped__(path, field)
    size, state = size_and_state(str(path))
    return [replace(source, bytes=size, state=state) for source in _found(path, field)]


def _read_corpus(folder: Path, file: str) -> bool:
    """Read texts. The file that is changed is read, or is beside files that are read."""
    path = folder / file
    sources = _found.__wrapped__(path.parent) if path.name == "state.json" else _source(path)
    good, bad = read_sources(sources, FieldKind.TEXT)
    for value in good.values():
        value if isinstance(value, str) else bytes(value).decode()
    _check_reasons(bad)
    return bool(good)


ADDRESS = " at 0x"
"""Part of a repr: the same damage would give another line in each process."""


def _check_reasons(bad: dict[int, str]) -> None:
    if any("\n" in reason or ADDRESS in reason for reason in bad.values()):
        raise Wrong(f"a reason of two lines, or with an address: {bad!r}")


def _read_nested(folder: Path, file: str) -> bool:
    """Read lists of words, and objects."""
    good: dict[int, Any] = {}
    for name, kind in (("words", FieldKind.WORDS), ("in", FieldKind.JSON)):
        found, bad = read_sources(_source(folder / file, name), kind, field=name)
        _check_reasons(bad)
        good |= found
    return bool(good)


def _token_rows(write: Callable[[Path, list[list[int]]], Path]) -> Parser:
    """Return the parser of a file of token ids with the files beside it.

    A changed id or border may stay unnoticed, because there are no checksums. The number of ids is
    that of the file, unless a record is rejected.
    """
    rows = [[n + 1, *range(1, n % 20), 0] for n in range(40)]

    def make(folder: Path) -> Sequence[str]:
        (folder / "rows").mkdir()
        (folder / "name").write_text(write(folder / "rows", rows).name)
        return [f"rows/{path.name}" for path in sorted((folder / "rows").iterdir())]

    def read(folder: Path, _: str) -> bool:
        path = folder / "rows" / (folder / "name").read_text()
        sources = _source(path, "input_ids")
        good, bad = read_sources(sources, FieldKind.IDS, shard_bytes=100, field="input_ids")
        _check_reasons(bad)
        num_ids, size = sum(map(len, good.values())), path.stat().st_size
        pairs = itertools.product((2, 4, 8), (0, 128, 1024))  # bytes of an id and of a header
        assert bad or any(width * num_ids + head == size for width, head in pairs)
        return bool(good)

    return Parser(make, [read])


def _read_tokenizer(folder: Path, _: str) -> None:
    content = (folder / "tokenizer.json").read_bytes()
    with contextlib.suppress(ConfigError):
        as_tokenizer(content, "a data set")
    tokenizer = TextTokenizer.load(content, origin="tokenizer")
    assert tokenizer.vocabulary_size > 0
    assert tokenizer.before_word in (b"", b" ")
    assert tokenizer.end_id is None or tokenizer.has_template in (True, False)


_TEMPLATE = """{% set x_token = "<x>" %}
{% set ns = namespace(last=0) %}{% for m in messages %}{% set ns.last = loop.index %}\
{{ bos_token }}{{ m.role }}:{% if m.content is string %}{{ m.content | trim }}{% else %}\
{{ m.content | map(attribute='text') | join }}{% endif %}\
{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}\
{% endfor %}{% if m.role == 'assistant' and '</think>' not in m.content %}{{ eos_token }}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ bos_token }}assistant:{% endif %}"""
_TOKENS_OF_MODEL = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}
_MODEL = {
    "tokenizer_config.json": _TOKENS_OF_MODEL | {"add_bos_token": False, "pad_token": None},
    "special_tokens_map.json": _TOKENS_OF_MODEL,
    "generation_config.json": {"eos_token_id": [0, 1], "top_p": 0.5},
}
_CALL = {"function": {"name": "f", "arguments": {"a": "b"}}}
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": "b", "tool_calls": [_CALL]},
    {"role": "tool", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def _make_model(folder: Path) -> Sequence[str]:
    (folder / "tokenizer.json").write_bytes(_TOKENIZER)
    for name, content in _MODEL.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return [*_MODEL, "chat_template.jinja"]


def _read_model(folder: Path, _: str) -> None:
    """Read the files beside a tokenizer, and render a conversation by the template."""
    options = Options(paths=("in", "out"), tokenizer=str(folder), task="chat")
    files = ModelFiles.read(str(folder))
    tokenizer = TextTokenizer.load(_TOKENIZER, origin="tokenizer", files=files)
    logging.disable(logging.WARNING)
    try:
        template = chat_template_of(options, tokenizer, files)
    finally:
        logging.disable(logging.NOTSET)
    conversation = Conversation(_CONVERSATION, [{"name": "f"}])
    for source in (template.source, template.with_variables):
        again = replace(template, source=source)
        with contextlib.suppress(Unusable):
            found = again.render(again.with_texts(conversation)[0])
            if any(each in found.text for each in ("built-in", "/home", "/root")):
                raise Wrong("a template wrote an object of Python")


_SAVED = {
    "saved/state.json": b'{"_data_files": [{"filename": "data-0.arrow"}], "_split": "train"}',
    "saved/data-0.arrow": _CORPORA["b.arrow"],
    "saved/dataset_info.json": b"{}",
}
PARSERS = {
    "shard": Parser(
        _make_shard,
        [_read_shard],
        {f"set/{name}": Layer(bytes, partial(_with_checksums, name)) for name in _SHARDS},
    ),
    "record batches": Parser(
        lambda folder: _make_shard(folder)[:1],
        [_read_shard],
        {f"set/{_SHARDS[0]}": Layer(_record_batches, _sealed_shard)},
    ),
    "manifest": Parser(
        lambda folder: _make_shard(folder) and ["set/manifest.json"],
        [_read_manifest, _verify, _load],
        {"set/manifest.json": Layer(json.loads, sealed_manifest)},
    ),
    "state": Parser(
        _make_state,
        [_read_state, _explain],
        {"state.json": Layer(json.loads, _seal_state)},
    ),
    "checkpoint": Parser(
        _make_checkpoint,
        [_read_checkpoint],
        {"checkpoints/step-00000001/checkpoint.json": Layer(json.loads, sealed_content)},
    ),
    "tokenizer": Parser(_files({"tokenizer.json": _TOKENIZER}), [_read_tokenizer]),
    "model files": Parser(_make_model, [_read_model]),
    "saved": Parser(_files(_SAVED), [_read_corpus]),
    "nested": Parser(_files({"nested.arrow": _arrow(ipc.new_file, _NESTED)}), [_read_nested]),
    "megatron": _token_rows(write_megatron),
    "nanogpt": _token_rows(write_nanogpt),
    "llm.c": _token_rows(write_llm_c),
    "olmo": _token_rows(write_olmo),
    "numpy": _token_rows(write_numpy),
    "datatrove": _token_rows(write_datatrove),
    **{name: Parser(_files({name: data}), [_read_corpus]) for name, data in _CORPORA.items()},
}
"""By name: `python -m tests.fuzz --parser NAME`."""
