"""Write files of litData, mosaicml-streaming and datatrove, with the bytes of their own writers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from tokenizers import Tokenizer, models, pre_tokenizers

Rows = list[list[int]]


def save_words(path: Path, size: int) -> Path:
    """Save a tokenizer of so many words between white space: w0, w1, ..."""
    vocabulary = {f"w{number}": number for number in range(size)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(path))
    return path


def write_litdata(
    folder: Path, rows: Rows, *, as_dict: bool = False, packed: bool = False, chunk_rows: int = 40
) -> None:
    """Write a folder as `optimize` of litData does: int32 tensors for its `TokensLoader`, or dicts
    of a tensor, a mask and an int."""
    chunks = []
    for number, start in enumerate(range(0, len(rows), chunk_rows)):
        samples = []
        for row in rows[start : start + chunk_rows]:
            leaves = [np.array(row, "<i4").tobytes()]
            if as_dict:
                leaves = [np.array(row, "<i8").tobytes(), bytes([1] * len(row)), bytes(8)]
                leaves.insert(0, np.array([len(leaf) for leaf in leaves], "<u4").tobytes())
            samples.append(b"".join(leaves))
        ends = 8 + 4 * len(samples) + np.cumsum([0, *map(len, samples)])
        content = np.array([len(samples), *ends], "<u4").tobytes() + b"".join(samples)
        name = f"chunk-0-{number}.zstd.bin" if packed else f"chunk-0-{number}.bin"
        info = {"chunk_bytes": len(content), "chunk_size": len(samples), "filename": name}
        chunks.append(info | {"dim": None})
        (folder / name).write_bytes(zstandard.compress(content) if packed else content)
    spec: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    if as_dict:
        spec = {"type": "builtins.dict", "context": '["input_ids", "mask", "number"]'}
    formats = ["no_header_tensor:18", "no_header_numpy:4", "int"] if as_dict else None
    config = {
        "compression": "zstd" if packed else None,
        "data_format": formats or ["no_header_tensor:16"],
        "data_spec": json.dumps([1, spec]),
        "item_loader": "PyTreeLoader" if as_dict else "TokensLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))


def mds_shard(samples: list[list[bytes]], config: dict[str, Any]) -> bytes:
    """Return a shard of mosaicml-streaming: the values of each column of each sample."""
    sizes = config["column_sizes"]
    whole = [
        b"".join(
            [
                np.uint32(len(value)).tobytes()
                for value, size in zip(sample, sizes, strict=True)
                if size is None
            ]
            + sample
        )
        for sample in samples
    ]
    content = json.dumps(config).encode()
    first = 4 * (len(whole) + 2) + len(content)
    ends = [first, *(first + np.cumsum([len(each) for each in whole])).tolist()]
    numbers = np.array([len(whole), *ends], np.uint32).tobytes()
    return numbers + content + b"".join(whole)


def write_datatrove(folder: Path, rows: Rows, *, width: int = 2) -> None:
    """Write what `TokenizedFile` of datatrove writes."""
    ids = np.array([token for row in rows for token in row], f"<u{width}")
    (folder / "0.ds").write_bytes(ids.tobytes())
    (folder / "0.ds.index").write_bytes(np.cumsum([len(row) for row in rows]).astype("<u8").data)
    (folder / "0.ds.metadata").write_text(f"gpt2|{width}\n{len(ids)}\n{len(ids) / 1e3:.2f} kT")
