"""What a tokenizer.json can do to the library that loads it ends in one line that names it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tokenizer_shapes import json_of

from tokenfeed.pipeline.errors import ManifestError, TokenizerError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.encoding.engines import ReferenceEngine
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, fetch_tokenizer_json


def changed(**model: Any) -> bytes:
    return json_of("byte-level", **model)


@pytest.mark.parametrize("id_", [10_000_000, 2**32 - 1])
def test_id_that_would_fill_the_memory_is_rejected(id_: int) -> None:
    content = json.loads(json_of("byte-level"))
    content["model"]["vocab"]["huge"] = id_
    with pytest.raises(TokenizerError, match=rf"^my\.json: has the id {id_:,}, but ids are below"):
        TextTokenizer.load(json.dumps(content).encode(), origin="my.json")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b"null", b"\xff", b'{"model": {"vocab": 1}}'),
        changed(continuing_subword_prefix="####"),  # longer than the tokens: a panic
    ],
)
def test_what_is_no_tokenizer_is_one_error(content: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"^my\.json: is not a tokenizer\.json"):
        TextTokenizer.load(content, origin="my.json")


def test_empty_vocabulary_or_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^my\.json: has an empty vocabulary"):
        TextTokenizer.load(changed(vocab={}, merges=[]), origin="my.json")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not found\. Give"):
        fetch_tokenizer_json(str(tmp_path))


def test_bpe_dropout_is_switched_off() -> None:
    ids = ReferenceEngine(TextTokenizer.load(changed(), origin="test")).encode(
        [b"the lazy dog"] * 50
    )
    made = TextTokenizer.load(changed(dropout=0.5), origin="test")
    assert np.array_equal(ReferenceEngine(made).encode([b"the lazy dog"] * 50).values, ids.values)


def test_fetch_checks_tokenizer_of_a_data_set(documents: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(documents, folder)
    info = Manifest.read(folder).tokenizer
    file = folder / info.file
    assert fetch_tokenizer_json(str(folder)) == fetch_tokenizer_json(str(file)) == file.read_bytes()
    file.write_bytes(file.read_bytes() + b" ")
    for name in (folder, file):
        with pytest.raises(ManifestError, match=rf"^{file}: has checksum \w+, but is {info.xxh3}"):
            fetch_tokenizer_json(str(name))
    for other in (b"", b"[1]", b"{}", b"[" * 100_000):  # a manifest.json of another program
        (folder / "manifest.json").write_bytes(other)
        assert fetch_tokenizer_json(str(folder)) == file.read_bytes()
