"""A format is one file and one line: all of `pretokenize` reads one that was only registered."""

from pathlib import Path
from typing import Any

import pytest
from support.corpora import FASTA, texts, write_fasta
from support.data_sets import files_of

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.jobs import executors
from tokenfeed.tools.pretokenizing.make import make_dataset
from tokenfeed.tools.pretokenizing.options import Options


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the format, here and in the processes of workers."""
    monkeypatch.setitem(FORMATS, FASTA.name, FASTA)
    (tmp_path / "registers_fasta.py").write_text(
        "from support.corpora import FASTA\n"
        "from tokenfeed.tools.corpus.formats.registry import FORMATS\n"
        "FORMATS[FASTA.name] = FASTA\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(executors, "MODULES", (*executors.MODULES, "registers_fasta"))


def made(corpus: Path, out: Path, tokenizer: Path, **options: Any) -> Manifest:
    paths = (str(corpus), str(out))
    make_dataset(Options(paths=paths, tokenizer=str(tokenizer), **options))
    return Manifest.read(out)


def test_workers_read_parts_of_a_file_of_a_new_format(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    write_fasta(tmp_path / "in/a.fasta", texts(3000))  # enough for worker processes
    whole = made(tmp_path / "in", tmp_path / "whole", tokenizer, workers=1)
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        parts = made(tmp_path / "in", out, tokenizer, workers=workers, shard_size="300KB")
        assert len(parts.splits["train"].shards) > 5
        assert parts.ledger == whole.ledger
        for name, split in whole.splits.items():
            assert parts.splits[name].tokens == split.tokens
            assert parts.splits[name].length_histogram == split.length_histogram
    assert files_of(tmp_path / "out1") == files_of(tmp_path / "out2")


def test_a_file_given_by_name_is_known_by_what_a_new_format_begins_with(tmp_path: Path) -> None:
    write_fasta(tmp_path / "a.sequences", ["ACGT"])
    write_fasta(tmp_path / "a.txt", ["ACGT"])

    def format_of(path: Path, field: str) -> str:
        return find_corpus((str(path),), out=tmp_path / "out", field=field).sources[0].format

    assert format_of(tmp_path / "a.sequences", "text") == "fasta"
    assert format_of(tmp_path / "a.sequences", "body") == "text"
    with pytest.raises(CorpusError, match=r"Rename it to end in \.fasta"):
        format_of(tmp_path / "a.txt", "text")
    (tmp_path / "in").mkdir()
    write_fasta(tmp_path / "in/a.sequences", ["ACGT"])
    assert format_of(tmp_path / "in", "text") == "text"
