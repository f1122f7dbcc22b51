"""What a tokenizer.json can do to the library that loads it ends in one line that names it."""

import json
from typing import Any

import numpy as np
import pytest
from support.tokenizer_shapes import json_of

from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.tools.encoding.engines import ReferenceEngine
from tokenfeed.tools.encoding.tokenizer import TextTokenizer


def changed(**model: Any) -> bytes:
    return json_of("byte-level", **model)


@pytest.mark.parametrize("id_", [10_000_000, 2**31, 2**32 - 1])
def test_an_id_that_would_fill_the_memory_is_refused(id_: int) -> None:
    content = json.loads(json_of("byte-level"))
    content["model"]["vocab"]["huge"] = id_
    with pytest.raises(TokenizerError, match=rf"^my\.json: has the id {id_:,}, but ids are below"):
        TextTokenizer.load(json.dumps(content).encode(), origin="my.json")
    content["model"]["vocab"].pop("huge")
    flags = dict.fromkeys(("special", "normalized", "single_word", "lstrip", "rstrip"), False)
    content["added_tokens"] = [{"id": id_, "content": "huge"} | flags]
    with pytest.raises(TokenizerError, match=r"^my\.json: has the id"):
        TextTokenizer.load(json.dumps(content, separators=(",", ":")).encode(), origin="my.json")


def test_a_long_number_in_a_token_is_no_id() -> None:
    content = json.loads(json_of("byte-level"))
    content["model"]["vocab"]['":1234567890'] = len(content["model"]["vocab"])
    TextTokenizer.load(json.dumps(content).encode(), origin="my.json")


def test_a_panic_of_the_library_is_one_error(capfd: pytest.CaptureFixture[str]) -> None:
    made = changed(continuing_subword_prefix="####")  # longer than the tokens it is cut off from
    with pytest.raises(TokenizerError, match=r"^my\.json: is not a tokenizer\.json"):
        TextTokenizer.load(made, origin="my.json")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"null", b"\xff", b'{"model": {"vocab": 1}}']
)
def test_what_is_no_tokenizer_is_one_error(content: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"^my\.json: is not a tokenizer\.json"):
        TextTokenizer.load(content, origin="my.json")


def test_other_json_with_long_number_is_one_error() -> None:
    with pytest.raises(TokenizerError, match=r"^my\.json: is not a tokenizer\.json"):
        TextTokenizer.load(b'{"rows": 1234567890}', origin="my.json")


def test_bpe_dropout_is_switched_off() -> None:
    ids = ReferenceEngine(TextTokenizer.load(changed(), origin="test")).encode(
        [b"the lazy dog"] * 50
    )
    made = TextTokenizer.load(changed(dropout=0.5), origin="test")
    assert made.dropout == 0.5
    assert np.array_equal(ReferenceEngine(made).encode([b"the lazy dog"] * 50).values, ids.values)
