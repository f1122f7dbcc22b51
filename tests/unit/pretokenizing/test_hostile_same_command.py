"""The same command in the same folder, when names are odd, files are lost or limits are new."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import files_of

from tokenfeed.pipeline.errors import CorpusError, ManifestError
from tokenfeed.tools.pretokenizing import make as make_module
from tokenfeed.tools.pretokenizing.make import make_dataset
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.summary import Summary


def make(corpus: Path, out: Path, tokenizer: Path, **options: Any) -> Summary:
    paths = (str(corpus), str(out))
    return make_dataset(Options(paths=paths, tokenizer=str(tokenizer), **options))


def test_a_corpus_whose_name_is_no_utf_8_continues(
    corpus: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, out = tmp_path / os.fsdecode(b"n\xff"), tmp_path / "out"
    corpus.rename(odd)
    make(odd, tmp_path / "undisturbed", tokenizer)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(make_module, "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(odd, out, tokenizer)
    summary = make(odd, out, tokenizer)
    assert summary.resumed_units == summary.units
    assert files_of(out) == files_of(tmp_path / "undisturbed")
    assert make(odd, out, tokenizer).already_finished


@pytest.mark.parametrize("name", ["train/00000.arrow", "tokenizer.json", "sources.jsonl"])
@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_finished_data_set_that_has_lost_a_file_is_not_called_finished(
    corpus: Path, tmp_path: Path, tokenizer: Path, name: str, spoil: Callable[[Path], object]
) -> None:
    out = tmp_path / "out"
    make(corpus, out, tokenizer)
    spoil(out / name)
    with pytest.raises(ManifestError, match=rf"{name}: is missing or of another size"):
        make(corpus, out, tokenizer)


def test_a_finished_data_set_is_held_to_the_rejects_that_are_allowed_now(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    assert make(corpus, out, tokenizer).rejected == 2
    assert make(corpus, out, tokenizer, max_rejects=2).already_finished
    with pytest.raises(CorpusError, match="with 2 rejected, and `--max-rejects 1` allows fewer"):
        make(corpus, out, tokenizer, max_rejects=1)
    with pytest.raises(CorpusError, match="and `--strict` allows fewer"):
        make(corpus, out, tokenizer, strict=True)
