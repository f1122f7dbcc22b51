"""A fast engine that is wrong about some texts, and a corpus for it."""

import json
import random
from pathlib import Path

__all__ = ["FALSE_ENGINE", "SENTENCES", "write_corpus"]

SENTENCES = [
    "the quick brown fox jumps over the lazy dog ",
    "naïve 漢字 🎉 x = f(y)\n\t",
    "aaa bb ",
]

FALSE_ENGINE = '''
"""Passes for gigatoken: right about all texts but those that say LIE or PANIC."""
from types import SimpleNamespace
import numpy as np
import tokenizers

class Panic(BaseException): ...

class Tokenizer:
    @classmethod
    def from_json(cls, data):
        made = cls()
        made.tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        return made

    def encode_batch(self, texts, parallel):
        rows = [self._encode(text.decode()) for text in texts]
        offsets = np.cumsum([0, *map(len, rows)])
        content = np.array([token for row in rows for token in row], np.uint32)
        layout = SimpleNamespace(
            offsets=SimpleNamespace(data=offsets), content=SimpleNamespace(data=content))
        return SimpleNamespace(layout=layout)

    def _encode(self, text):
        if "PANIC" in text:
            raise Panic("index out of bounds")
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids[::-1] if "LIE" in text else ids
'''


def write_corpus(folder: Path, extra: str) -> Path:
    folder.mkdir()
    draw = random.Random(0)
    texts = ["".join(draw.choices(SENTENCES, k=draw.randint(1, 60))) for _ in range(300)]
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts, extra, *texts[:50]]]
    lines.append(json.dumps({"text": "", "unused": "x" * 2_000_000}) + "\n")  # enough for a crew
    (folder / "lines.jsonl").write_text("".join(lines))
    return folder
