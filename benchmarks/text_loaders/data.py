"""The data of benchmarks/text_loaders/: rows of real text, as shards and as flat arrays of ids.

The standard library's own source is cut into rows three ways and tokenized by `pretokenize`, with
one tokenizer trained on it. It is repeated, shuffled anew each time, until there is enough of it.
"""

import json
import random
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tokenfeed import Manifest
from tokenfeed.pipeline.format.kinds import TargetRule

KINDS = {
    "short": 40_000_000,
    "medium": 40_000_000,
    "documents": 80_000_000,
    "chat": 40_000_000,
}
"""Tokens of each kind of rows."""
CHECK_ROWS = 5_003
"""A prime: nothing divides it. These short rows are counted one by one."""
VOCABULARY = 32_768
BLOCK_LINES = 20
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
)
IS_TARGET = 1 << 15
"""Bit of an id in `ids.npy` that conversations must learn. Every id is smaller."""

Piece = str | list[dict[str, str]]
"""A text, or the messages of a conversation."""


def make_data(folder: Path, scale: float) -> float:
    """Fill `folder`, unless it was filled before; the scale of what is there."""
    if (folder / "data.json").exists():
        return float(json.loads((folder / "data.json").read_text())["scale"])
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(standard_library())
    write_json_lines(folder / "corpus.jsonl", texts, sum(map(len, texts)))
    trained = pretokenize(folder / "corpus.jsonl", folder / "tokenizer", "--vocab-size", VOCABULARY)
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    rows: dict[str, list[Piece]] = {kind: list(cut(texts)) for kind, cut in CUTS.items()}
    rows["check"] = random.Random(0).sample(rows["short"], CHECK_ROWS)
    for kind, pieces in rows.items():
        characters = sum(map(size, pieces))
        if kind in KINDS:
            characters = int(KINDS[kind] * scale * trained["text_bytes_per_token"])
        corpus = folder / f"{kind}.jsonl"
        write_json_lines(corpus, pieces, characters)
        options = ["--task", "chat", "--chat-template", folder / "chat.jinja"] * (kind == "chat")
        pretokenize(corpus, folder / kind / "shards", "--tokenizer", tokenizer, *options)
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


def conversations(texts: list[str]) -> Iterator[list[dict[str, str]]]:
    """Blocks as messages of a user and an assistant in turn, one to six of each."""
    draw = random.Random(2)
    for text in texts:
        pieces = list(blocks([text]))
        while len(pieces) > 1:
            count = min(2 * draw.randint(1, 6), len(pieces) // 2 * 2)
            taken, pieces = pieces[:count], pieces[count:]
            roles = ["user", "assistant"] * (count // 2)
            yield [{"role": r, "content": c} for r, c in zip(roles, taken, strict=True)]


CUTS: dict[str, Callable[[list[str]], Iterator[Any]]] = {
    "short": lines,
    "medium": blocks,
    "documents": iter,
    "chat": conversations,
}


def size(piece: Piece) -> int:
    """Characters of a piece."""
    return len(piece) if isinstance(piece, str) else sum(len(each["content"]) for each in piece)


def write_json_lines(path: Path, pieces: Sequence[Piece], characters: int) -> None:
    """Write about so many characters: all pieces shuffled, then all of them shuffled again."""
    random_order = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        while characters > 0:
            for piece in random_order.sample(pieces, len(pieces)):
                name = "text" if isinstance(piece, str) else "messages"
                file.write(json.dumps({name: piece}) + "\n")
                characters -= size(piece)
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
    """Write `ids.npy` and `lengths.npy` beside the shards, which any Arrow reader opens. Targets of
    conversations are marked by `IS_TARGET`."""
    rule = TargetRule.from_setting(None, Manifest.read(folder / "shards").columns)
    ids, lengths = [], []
    for shard in sorted((folder / "shards" / "train").glob("*.arrow")):
        for part in pa.ipc.open_file(shard).read_all().to_batches():
            rows = part["input_ids"]
            ids.append(rows.flatten().to_numpy())
            lengths.append(rows.value_lengths().to_numpy())
            if rule:
                mask = rule.mask(part["kinds"].flatten().to_numpy(), lengths[-1])
                ids[-1] = np.where(mask, ids[-1] | IS_TARGET, ids[-1])
    np.save(folder / "ids.npy", np.concatenate(ids))
    np.save(folder / "lengths.npy", np.concatenate(lengths).astype(np.int64))
