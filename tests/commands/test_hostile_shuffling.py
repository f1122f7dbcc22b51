"""Shuffles in folders that others have left, with memory that cannot do, over files that change."""

from pathlib import Path

import pytest
from command import files_of, run

from tokenfeed.pipeline.format.manifest import JOURNAL_FILE, Manifest


@pytest.mark.parametrize("torn", [b"", b'{"CORPUS": ["some'], ids=["empty", "torn"])
def test_a_journal_that_a_kill_left_without_a_line_is_nobodys(
    corpus: Path, tmp_path: Path, tokenizer: Path, torn: bytes
) -> None:
    options = ("--tokenizer", tokenizer, "--shuffle", "--workers", "1")
    run(corpus, tmp_path / "expected", *options)
    out = tmp_path / "out"
    out.mkdir()
    (out / JOURNAL_FILE).write_bytes(torn)
    run(corpus, out, *options)
    assert Manifest.read(out).shuffled is not None
    assert files_of(out) == files_of(tmp_path / "expected")
