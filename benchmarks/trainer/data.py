"""Data sets of benchmarks/trainer/: the source of Python's standard library, cut three ways.

classify   lines, and the package each is from
tag        lines as Python reads them, and the kind of each word
lm         pieces of 40 lines
"""

import io
import json
import keyword
import random
import subprocess
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["make"]

PACKAGES = ("asyncio", "email", "unittest", "importlib", "xml", "multiprocessing")
ROWS = 8000
DOCUMENTS = 1500
PRETOKENIZE = Path(sys.executable).with_name("pretokenize")

Record = dict[str, Any]


def files() -> Iterator[tuple[str, str]]:
    """Every file of the packages: its package and text."""
    library = Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        for path in sorted((library / package).rglob("*.py")):
            yield package, path.read_text(encoding="utf-8", errors="replace")


def lines() -> Iterator[Record]:
    """Lines that say something."""
    for package, text in files():
        for line in text.splitlines():
            if len(line.split()) > 1:
                yield {"text": line.strip(), "label": package}


def words() -> Iterator[Record]:
    """Lines of tokens and their kinds."""
    for _, text in files():
        tokens: list[str] = []
        kinds: list[str] = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.NEWLINE, tokenize.NL):
                if len(tokens) > 1:
                    yield {"tokens": tokens, "tags": kinds}
                tokens, kinds = [], []
            elif token.string.strip():
                tokens.append(token.string)
                kinds.append(kind(token))


def kind(token: tokenize.TokenInfo) -> str:
    """What a word is to Python."""
    return "KEYWORD" if keyword.iskeyword(token.string) else tokenize.tok_name[token.type]


def documents() -> Iterator[Record]:
    """Pieces of files."""
    for _, text in files():
        lines = text.splitlines()
        for first in range(0, len(lines), 40):
            yield {"text": "\n".join(lines[first : first + 40])}


SOURCES: dict[str, tuple[Callable[[], Iterable[Record]], int]] = {
    "classify": (lines, ROWS),
    "tag": (words, ROWS),
    "lm": (documents, DOCUMENTS),
}


def make(task: str, folder: Path) -> Path:
    """The shards of a task, unless they are there."""
    shards = folder / task
    if not shards.exists():
        source, rows = SOURCES[task]
        records = list(source())
        random.Random(0).shuffle(records)
        corpus = folder / f"{task}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        corpus.write_text("".join(json.dumps(record) + "\n" for record in records[:rows]))
        options = ["--task", task, "--vocab-size", "4096", "--validation", "0.1"]
        subprocess.run([PRETOKENIZE, corpus, shards, *options], check=True, capture_output=True)
    return shards
