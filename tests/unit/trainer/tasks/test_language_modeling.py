"""Bits per byte: the bytes of tokens, and the metric beside a slow count."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.data_sets import byte_tokenizer
from support.pretokenizing import make
from support.training import make_config, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.planning.policies import Fixed
from tokenfeed.trainer.data.datasets import read_tokenizer
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.loop.model_export import load_exported
from tokenfeed.trainer.tasks.language_modeling import token_bytes

TEXTS = ["the cat sat on the mat", "déjà vu, 猫 and 🙂!", "a b  c\n\td"]


def byte_level() -> Tokenizer:
    return byte_tokenizer(TEXTS, end="<end>", vocabulary_size=280)


def byte_fallback() -> Tokenizer:
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b", "é", "▁the"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = [("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


@pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback])
def test_token_bytes_add_up_to_the_bytes_of_texts(make_tokenizer: object) -> None:
    tokenizer = make_tokenizer()  # type: ignore[operator]
    sizes = token_bytes(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert int(sizes[ids].sum()) == len(text.encode())
    assert sizes[tokenizer.token_to_id("<end>")] == 0


def test_token_bytes_of_word_pieces_have_the_space_before_words() -> None:
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "é": 3}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]"])
    assert token_bytes(tokenizer).tolist() == [0, 5, 3, 3]


def test_bits_per_byte_equal_a_slow_count(tmp_path: Path) -> None:
    texts = [f"{TEXTS[n % 3]} {n * n}" for n in range(400)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "corpus.jsonl").write_text(lines)
    shards = tmp_path / "shards"
    make(tmp_path / "corpus.jsonl", shards, None, validation=0.2, vocab_size=300)
    apart = {"attention": "documents", "sequence_length": 64}
    config = make_config(shards, tmp_path / "run", export=tmp_path / "exported", **apart)
    report = run(config)

    tokenizer = Tokenizer.from_buffer(read_tokenizer(shards))
    model = load_exported(tmp_path / "exported")
    nats, num_bytes, rows = 0.0, 0, 0
    for batch in ShardLoader(shards, batching=Fixed(1), split="validation", num_workers=0):
        ids_BT = batch["input_ids"]
        with torch.no_grad():
            log_shares_TV = model(MicroBatch.of_ids(ids_BT, causal=True))[0].log_softmax(-1)
        ids = ids_BT[0].tolist()
        nats -= sum(float(log_shares_TV[at, id]) for at, id in enumerate(ids[1:]))
        text = tokenizer.decode(ids)
        num_bytes += len(text.encode()) - len(tokenizer.decode(ids[:1]).encode())
        rows += 1
    assert rows > 20
    expected = nats / math.log(2) / num_bytes
    assert report.metrics["validation"]["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
