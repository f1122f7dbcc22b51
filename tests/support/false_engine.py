"""A fast engine that is wrong about some texts, and a corpus and tokenizers for it."""

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SENTENCES = [
    "the quick brown fox jumps over the lazy dog ",
    "naïve 漢字 🎉 x = f(y)\n\t",
    "aaa bb ",
]

SPECIAL = ["<|endoftext|>", "<pad>"]

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


def false_engine() -> ModuleType:
    """The false engine as a module of this process."""
    module = ModuleType("gigatoken")
    exec(FALSE_ENGINE, module.__dict__)
    return module


def sampled_document(word: str, times: int = 8_000) -> str:
    """A long text that the run's own sample will contain, with `word` beyond the first audit."""
    begin = f"{'the lazy dog ' * times}{word} "
    hash_of_begin = xxhash.xxh3_64(begin.encode())
    for number in range(100_000):
        hash_of_text = hash_of_begin.copy()
        hash_of_text.update(str(number).encode())
        if hash_of_text.intdigest() % 1000 == 0:
            return f"{begin}{number}"
    raise AssertionError("no text found")


def trained(pre_tokenizer: Any, decoder: Any, unknown: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=unknown, byte_fallback=unknown is not None))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if unknown else []
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*([unknown] if unknown else []), *SPECIAL, *bytes_],
        initial_alphabet=[] if unknown else sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 20, trainer)
    return tokenizer


def write_corpus(folder: Path, *extras: str) -> Path:
    folder.mkdir()
    draw = random.Random(0)
    texts = ["".join(draw.choices(SENTENCES, k=draw.randint(1, 60))) for _ in range(300)]
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts, *extras, *texts[:50]]]
    lines.append(json.dumps({"text": "", "unused": "x" * 2_000_000}) + "\n")  # enough for a crew
    (folder / "lines.jsonl").write_text("".join(lines))
    return folder
