"""Shards whose tokenizer is another than the one that made them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data_sets import random_rows, write_rows
from support.training import VOCABULARY, make_config, run, word_tokenizer

from tokenfeed.pipeline.errors import ManifestError
from tokenfeed.pipeline.format.manifest import Manifest


def write_shards(folder: Path, tokenizer: bytes) -> Path:
    lengths = np.random.default_rng(1).integers(4, 24, 60)
    rows = random_rows(lengths, "lm", vocabulary_size=VOCABULARY)
    return write_rows(folder, {"train": rows}, VOCABULARY, tokenizer=tokenizer)


def swapped(tokenizer: bytes) -> bytes:
    """One of as many ids, of which two are each other's."""
    content = json.loads(tokenizer)
    ids = content["model"]["vocab"]
    ids["w0"], ids["w1"] = ids["w1"], ids["w0"]
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "settings",
    [{"model": "words"}, {"export": Path("exported")}],
    ids=str,
)
def test_train_refuses_a_tokenizer_that_did_not_make_the_shards(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    shards = write_shards(tmp_path / "shards", word_tokenizer())
    file = shards / Manifest.read(shards).tokenizer.file
    file.write_bytes(swapped(word_tokenizer()))
    with pytest.raises(ManifestError, match=r"has checksum \w{16}, but is \w{16} in") as caught:
        run(make_config(shards, tmp_path / "run", steps=1, **settings))
    assert str(caught.value).startswith(f"{file}: ")
    assert not (tmp_path / "run").exists()
