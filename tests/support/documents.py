"""A data set of documents that `pretokenize` made, with texts that tell their number."""

import json
from pathlib import Path

from command import run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["DOCUMENTS", "make_documents"]

DOCUMENTS = [f"document {index}: déjà vu 漢字 🎉\n" * (index + 1) for index in range(120)]


def make_documents(folder: Path) -> Path:
    """A data set of `DOCUMENTS` in several shards, both splits, with one reject."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>"],
        vocab_size=300,
        show_progress=False,
    )
    tokenizer.train_from_iterator(DOCUMENTS[:3], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (folder / "in.jsonl").write_text(lines + "{\n")
    options = ("--tokenizer", folder, "--shard-size", "40KB", "--validation", 0.2)
    run(folder / "in.jsonl", folder / "out", *options)
    return folder / "out"
