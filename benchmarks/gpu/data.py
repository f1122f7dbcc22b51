"""The data of benchmarks/gpu/: the standard library's own source, as a data set of every task."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.text_loaders.data import blocks, pretokenize, standard_library

__all__ = ["TASKS", "make_data"]

TASKS = ("lm", "complete", "classify", "score", "tag")
VOCABULARY = 50_257
"""As GPT-2 has, for which a step is predicted."""
SMALL_VOCABULARY, SMALL_TEXTS = 512, 10
CHARACTERS = 250
"""Of a row with one label, which cannot be cut: fewer tokens than a sequence has."""

Record = dict[str, Any]


def make_data(folder: Path, *, small: bool) -> None:
    """Make what is missing of a data set a task; takes minutes, or seconds where it is small."""
    texts = list(islice(standard_library(), SMALL_TEXTS if small else None))
    tokenizer = folder / TASKS[0] / "tokenizer.json"
    for task in TASKS:
        if (folder / task / "manifest.json").exists():
            continue
        corpus = folder / f"{task}.jsonl"
        corpus.parent.mkdir(parents=True, exist_ok=True)
        with open(corpus, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records(task, texts))
        learnt = ("--vocab-size", SMALL_VOCABULARY if small else VOCABULARY)
        with_tokenizer = ("--tokenizer", tokenizer) if tokenizer.exists() else learnt
        pretokenize(corpus, folder / task, "--task", task, *with_tokenizer)
        corpus.unlink()


def records(task: str, texts: list[str]) -> Iterator[Record]:
    """Documents, or what can be asked of pieces of them."""
    if task == "lm":
        yield from ({"text": text} for text in texts)
        return
    for block in blocks(texts):
        yield from islice(question(task, block), 1)


def question(task: str, block: str) -> Iterator[Record]:
    """One about a block of lines; none where it has no answer."""
    lines, words, text = block.splitlines(keepends=True), block.split(), block[:CHARACTERS]
    if task == "classify":
        yield {"text": text, "label": "function" if "def " in text else "other"}
    elif task == "score":
        yield {"text": text, "score": text.count(" ") / CHARACTERS}
    elif task == "tag":
        yield {"tokens": words, "tags": ["name" if w.isidentifier() else "other" for w in words]}
    elif len(lines) > 1:
        half = len(lines) // 2
        yield {"prompt": "".join(lines[:half]), "completion": "".join(lines[half:])}
