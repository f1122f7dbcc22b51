"""The data of benchmarks/text_loaders/: rows of real text, as shards and as flat arrays of ids.

The standard library's own source is cut into rows three ways and tokenized by `pretokenize`, with
one tokenizer trained on it. It is repeated, shuffled anew each time, until there is enough of it.
"""

import json
import random
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

KINDS = {"short": 40_000_000, "medium": 40_000_000, "documents": 80_000_000}
"""Tokens of each kind of rows."""
CHECK_ROWS = 5_003
"""A prime: nothing divides it. These short rows are counted one by one."""
VOCABULARY = 32_768
BLOCK_LINES = 20


def make_data(folder: Path, scale: float) -> float:
    """Fill `folder`, unless it was filled before; the scale of what is there."""
    if (folder / "data.json").exists():
        return float(json.loads((folder / "data.json").read_text())["scale"])
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(standard_library())
    write_json_lines(folder / "corpus.jsonl", texts, len("".join(texts)))
    trained = pretokenize(folder / "corpus.jsonl", folder / "tokenizer", "--vocab-size", VOCABULARY)
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    rows = {kind: list(cut(texts)) for kind, cut in CUTS.items()}
    rows["check"] = random.Random(0).sample(rows["short"], CHECK_ROWS)
    for kind, pieces in rows.items():
        characters = sum(map(len, pieces))
        if kind in KINDS:
            characters = int(KINDS[kind] * scale * trained["text_bytes_per_token"])
        corpus = folder / f"{kind}.jsonl"
        write_json_lines(corpus, pieces, characters)
        pretokenize(corpus, folder / kind / "shards", "--tokenizer", tokenizer)
        corpus.unlink()
        read_back(folder / kind)
    end = json.loads((folder / "tokenizer" / "manifest.json").read_text())["tokenizer"]["end_id"]
    (folder / "data.json").write_text(json.dumps({"end_id": end, "scale": scale}))
    return scale


def standard_library() -> Iterator[str]:
    """Every source file of it."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # test files that are broken on purpose
            if text.strip():
                yield text


def lines(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield from (line for line in text.split("\n") if len(line) > 20)


def blocks(texts: list[str]) -> Iterator[str]:
    for text in texts:
        whole = text.split("\n")
        for at in range(0, len(whole), BLOCK_LINES):
            if (block := "\n".join(whole[at : at + BLOCK_LINES])).strip():
                yield block


CUTS: dict[str, Callable[[list[str]], Iterator[str]]] = {
    "short": lines,
    "medium": blocks,
    "documents": iter,
}


def write_json_lines(path: Path, pieces: list[str], characters: int) -> None:
    """Write about so many characters: all pieces shuffled, then all of them shuffled again."""
    random_order = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        while characters > 0:
            for piece in random_order.sample(pieces, len(pieces)):
                file.write(json.dumps({"text": piece}) + "\n")
                characters -= len(piece)
                if characters <= 0:
                    break


def pretokenize(corpus: Path, out: Path, *options: object) -> dict[str, Any]:
    """Run the command; its summary."""
    command = [sys.executable, "-m", "tokenfeed.tools.pretokenize", str(corpus), str(out)]
    command += ["--validation", "0", "--json", *map(str, options)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def read_back(folder: Path) -> None:
    """Write `ids.npy` and `lengths.npy` beside the shards, which any Arrow reader opens."""
    ids, lengths = [], []
    for shard in sorted((folder / "shards" / "train").glob("*.arrow")):
        for part in pa.ipc.open_file(shard).read_all()["input_ids"].chunks:
            ids.append(part.flatten().to_numpy())
            lengths.append(part.value_lengths().to_numpy())
    np.save(folder / "ids.npy", np.concatenate(ids))
    np.save(folder / "lengths.npy", np.concatenate(lengths).astype(np.int64))
