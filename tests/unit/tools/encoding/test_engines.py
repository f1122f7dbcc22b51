"""Engines: the fast one gives the reference's ids, and where it would not, that is found out."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.false_engine import SENTENCES, SPECIAL
from support.tokenizer_shapes import differing_texts
from tokenizers import Tokenizer, models, pre_tokenizers

from tokenfeed.tools.encoding.audit import adversarial_texts, beginning
from tokenfeed.tools.encoding.engines import (
    EngineName,
    ReferenceEngine,
    Unencodable,
    fast_engine,
    load_engine,
    preload,
)
from tokenfeed.tools.encoding.fast import engine as fast_module
from tokenfeed.tools.encoding.tokenizer import TextTokenizer


def loaded(tokenizer: Tokenizer, *, splits_special: bool = False) -> TextTokenizer:
    json_bytes = tokenizer.to_str().encode()
    return TextTokenizer.load(json_bytes, origin="test", splits_special=splits_special)


@pytest.mark.parametrize("splits_special", [False, True])
def test_the_fast_engine_gives_the_reference_ids(
    byte_level: Tokenizer, splits_special: bool
) -> None:
    tokenizer = loaded(byte_level, splits_special=splits_special)
    fast, reference = fast_engine(tokenizer), ReferenceEngine(tokenizer)

    @given(st.lists(st.text(max_size=60) | st.sampled_from([*SPECIAL, "a<pad>snake_case"])))
    def agree(texts: list[str]) -> None:
        assert differing_texts(fast, reference, [text.encode() for text in texts]) == []

    agree()
    assert differing_texts(fast, reference, adversarial_texts(tokenizer)) == []
    end = tokenizer.tokenizer.token_to_id("<|endoftext|>")
    assert (end in fast.encode([b"a<|endoftext|>b"]).values) == splits_special


def test_dropping_the_cache_changes_no_id(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_module, "CACHE_BYTES", -(1 << 40))  # after every batch
    fast = fast_engine(loaded(byte_level))
    before = fast._tokenizer
    texts = [text.encode() for text in SENTENCES]
    first, second = fast.encode(texts), fast.encode(texts)
    assert fast._tokenizer is not before
    assert np.array_equal(first.values, second.values)


def test_preloaded_engine_is_used_for_its_tokenizer(tmp_path: Path, byte_level: Tokenizer) -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    names: tuple[EngineName, EngineName] = ("gigatoken", "tokenizers")
    for name, tokenizer in zip(names, (byte_level, words), strict=True):
        json_bytes = tokenizer.to_str().encode()
        (tmp_path / name).write_bytes(json_bytes)
        fresh = load_engine(name, json_bytes, 60_000, splits_special=True)
        preload(str(tmp_path / name), 60_000, splits_special=True)
        found = load_engine(name, json_bytes, 60_000, splits_special=True)
        assert found is load_engine(name, json_bytes, 60_000, splits_special=True) is not fresh
        assert found is not load_engine(name, json_bytes, 60_000, splits_special=False)


def test_batches_without_texts_or_tokens_are_fine(byte_level: Tokenizer) -> None:
    for engine in (
        fast_engine(loaded(byte_level)),
        ReferenceEngine(loaded(byte_level)),
    ):
        assert len(engine.encode([])) == 0
        ragged = engine.encode([b"", b"", b"a"])
        assert ragged.lengths.tolist() == [0, 0, 1]
        assert ragged.values.dtype == np.uint16


def test_a_text_without_ids_is_named() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="missing"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(Unencodable, match="the tokenizer cannot encode it"):
        ReferenceEngine(loaded(tokenizer)).encode([b"a", b"b", b"a a"])


@given(text=st.text(), longest=st.integers(0, 20))
def test_a_beginning_is_whole_characters(text: str, longest: int) -> None:
    cut = beginning(text.encode(), longest)
    assert len(cut) <= longest or cut == text.encode()
    assert text.startswith(cut.decode())
