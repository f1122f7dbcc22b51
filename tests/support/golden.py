"""What golden tests share: small data sets that the public `pretokenize` makes, and digests.

The tokenizer and the records are fixed: no library of random numbers draws them. Shards are small,
so a data set has several windows.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tokenfeed import Batch, pretokenize

Record = dict[str, Any]

WORDS = 90
_NAMES = ("joy", "fear", "calm")
_TAGS = ("O", "B-A", "I-A", "B-B")
_TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + ' </s>' }}{% endgeneration %}{% else %}{{ m.content + ' </s>' }}{% endif %}"
    "{{ ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


class Draws:
    """Whole numbers that stay the same: a linear congruential generator."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, bound: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self._state >> 33) % bound

    def text(self, most: int) -> str:
        """At most so many words, usually few. Each word tells something about the next."""
        at, found = self.below(WORDS), []
        for _ in range(1 + self.below(1 + self.below(most))):
            found.append(f"w{at}")
            at = (at + 1 + self.below(3)) % WORDS
        return " ".join(found)


def _document(draws: Draws) -> Record:
    return {"text": draws.text(40 if draws.below(12) else 300)}


def _ids(draws: Draws) -> Record:
    ids = [draws.below(WORDS) for _ in draws.text(50).split()]
    return {
        "input_ids": ids,
        "advantage": [draws.below(64) / 8 - 4 for _ in ids],
        "turn": [draws.below(5) for _ in ids],
    }


def _labelled(draws: Draws) -> Record:
    label = draws.below(len(_NAMES))
    return {"text": f"w{label} {draws.text(40)}", "label": _NAMES[label]}


def _pair(draws: Draws) -> Record:
    return {
        "text": draws.text(25),
        "second": draws.text(25),
        "score": draws.below(64) / 16,
    }


def _tagged(draws: Draws) -> Record:
    words = draws.text(40).split()
    return {"tokens": words, "tags": [_TAGS[draws.below(len(_TAGS))] for _ in words]}


def _completed(draws: Draws) -> Record:
    return {"prompt": draws.text(30) + "\n", "completion": draws.text(30)}


def _talk(draws: Draws) -> list[dict[str, str]]:
    first = [{"role": "system", "content": draws.text(6)}] * draws.below(2)
    turns = [{"role": "user"}, {"role": "assistant"}] * (1 + draws.below(3))
    return first + [turn | {"content": draws.text(20)} for turn in turns]


def _chat(draws: Draws) -> Record:
    return {"messages": _talk(draws)}


def _preference(draws: Draws) -> Record:
    *prompt, chosen = _talk(draws)
    return {
        "prompt": prompt,
        "chosen": [chosen],
        "rejected": [{"role": "assistant", "content": draws.text(20)}],
    }


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "documents": (_document, {"task": "lm"}),
    "ids": (_ids, {"task": "ids", "keep": {"advantage": "float32", "turn": "int8"}}),
    "classes": (_labelled, {"task": "classify"}),
    "pairs": (_pair, {"task": "score", "field": {"pair": "second"}}),
    "tags": (_tagged, {"task": "tag"}),
    "completions": (_completed, {"task": "complete"}),
    "chat": (_chat, {"task": "chat"}),
    "preferences": (_preference, {"task": "chat"}),
}
"""The kinds of data sets: what draws a record, and the arguments of `pretokenize`."""
KEPT = {"ids": ("advantage", "turn")}
"""Columns that are kept beside the ids."""


def save_tokenizer(folder: Path) -> Path:
    """A tokenizer of the words w0, w1, ..., with a chat template. No library writes its file, so no
    version of a library changes it."""
    names = [f"w{number}" for number in range(WORDS)]
    names += ["</s>", "<pad>", "[SEP]", "system", "user", "assistant", "?"]
    vocabulary = {name: id for id, name in enumerate(names)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [{"id": vocabulary[name], "content": name} for name in ("</s>", "<pad>")]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [each | plain | {"special": True} for each in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def make_data_set(
    folder: Path, kind: str, tokenizer: Path, *, seed: int, records: int, shard_size: str = "1500"
) -> Path:
    """A data set of drawn records."""
    record_of, options = KINDS[kind]
    draws = Draws(seed)
    rows = {"train": [record_of(draws) for _ in range(records)]}
    rows["validation"] = [record_of(draws) for _ in range(12)]
    made = pretokenize(
        rows, folder, tokenizer=tokenizer, shard_size=shard_size, workers=1, **options
    )
    assert not made.rejects
    return folder


def digest_of(values: Iterable[tuple[str, Any]]) -> str:
    """16 hex digits over the name, dtype, shape and bytes of each tensor, array or text."""
    found = hashlib.blake2b(digest_size=8)
    for name, value in values:
        array = np.ascontiguousarray(value)
        found.update(f"{name} {array.dtype.name} {np.shape(value)} ".encode())
        found.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return found.hexdigest()


def order_of(batch: Batch) -> Iterable[tuple[str, Any]]:
    """Where the rows of a batch come from, and whether a step ends with it."""
    for name in ("rows", "starts", "piece_lengths"):
        yield name, np.asarray(getattr(batch, name), np.int64)
    yield from ((name, int(getattr(batch, name))) for name in ("is_filler", "ends_step"))


def values_of(batch: Batch, kept: Iterable[str] = ()) -> Iterable[tuple[str, Any]]:
    """All that a batch has beside that."""
    yield from sorted(batch.items())
    yield from ((name, getattr(batch, name)) for name in (*kept, "targets"))
    for name in ("lengths", "sequence_offsets"):
        yield name, np.asarray(getattr(batch, name), np.int64)
    yield from ((name, int(getattr(batch, name))) for name in ("num_tokens", "num_targets"))
