"""The sample that trains a tokenizer."""

import time
from pathlib import Path

import pytest
from support.commands import error_of
from support.pretokenizing import make


def test_word_of_400000_letters_trains_in_seconds(tmp_path: Path) -> None:
    """Without a cut, the time grows with the square of the longest word: minutes."""
    (tmp_path / "a.txt").write_text("ab" * 200_000 + " and some words\n" * 50)
    started = time.process_time()
    make(tmp_path / "a.txt", tmp_path / "out", None, vocab_size=400)
    assert time.process_time() - started < 15


@pytest.mark.parametrize("is_folder", [False, True])
def test_sentencepiece_model_is_named_with_the_conversion(is_folder: bool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "tok").mkdir()
    model = tmp_path / "tok" / "tokenizer.model"
    model.write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    given = model.parent if is_folder else model
    message = error_of(tmp_path / "a.txt", tmp_path / "out", "--tokenizer", given)
    assert "SentencePiece model" in message
    assert "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)" in message


@pytest.mark.parametrize("file", ["vocab.json", "vocab.txt"])
def test_slow_tokenizer_is_named_with_the_conversion(file: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / file).write_text("{}")
    message = error_of(tmp_path / "a.txt", tmp_path / "out", "--tokenizer", tmp_path / "tok")
    assert f"{file} there is the vocabulary of a slow tokenizer" in message
    assert "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)" in message
