"""Runs of `pretokenize` that are refused, damaged, repeated or given nonsense."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import write_ballast

from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.tools.encoding.engines import EngineUnavailable, FastEngine
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.pretokenizing.make import make_dataset
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.summary import Summary


def make(corpus: Path, out: Path, tokenizer: Path, **options: Any) -> Summary:
    paths = (str(corpus), str(out))
    return make_dataset(Options(paths=paths, tokenizer=str(tokenizer), **options))


def test_workers_that_have_begun_leave_nothing_when_the_engine_is_refused(
    corpus: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ballast(corpus)
    out = tmp_path / "out"

    def check(tokenizer: TextTokenizer) -> None:
        while not list((out / "train").glob("*.arrow")):
            pass
        raise EngineUnavailable("there is none")

    monkeypatch.setattr(FastEngine, "check", check)
    with pytest.raises(TokenizerError, match="there is none"):
        make(corpus, out, tokenizer, engine="gigatoken", shard_size="30KB")
    assert not out.exists()


def check(tokenizer: str | None = None, **options: Any) -> None:
    Options(**{"paths": ("corpus", "out"), "tokenizer": tokenizer} | options).check()


def test_what_is_small_needs_no_second_engine(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    small = make(corpus, tmp_path / "small", tokenizer)
    write_ballast(corpus)
    large = make(corpus, tmp_path / "large", tokenizer)
    assert small.engine.startswith("tokenizers")
    assert large.engine.startswith("gigatoken")
    assert (small.tokens, small.documents) == (large.tokens, large.documents)
    shards = [
        json.loads((tmp_path / name / "manifest.json").read_text())["splits"]
        for name in ("small", "large")
    ]
    assert shards[0] == shards[1]
