"""Runs of `pretokenize` that are refused, damaged, repeated or given nonsense."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data_sets import files_of
from support.pretokenizing import interrupt, make

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.storage import file_xxh3
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.pretokenizing.make import make_dataset
from tokenfeed.tools.pretokenizing.options import Options, parse_options


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-9], lambda whole: whole[:50] + b"?" + whole[51:]]
)
def test_a_shard_damaged_before_the_run_goes_on_is_made_again(
    corpus: Path,
    tmp_path: Path,
    tokenizer: Path,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(corpus, tmp_path / "undisturbed", tokenizer, shard_size="30KB")
    out = tmp_path / "out"
    interrupt(corpus, out, tokenizer, shard_size="30KB")
    shard = out / "train/00001.arrow"
    shard.write_bytes(damage(shard.read_bytes()))
    summary = make(corpus, out, tokenizer, shard_size="30KB")
    assert summary.resumed_units == summary.units - 1 > 3
    for info in Manifest.read(out).splits["train"].shards:
        assert file_xxh3(out / info.file) == info.xxh3
    assert files_of(out) == files_of(tmp_path / "undisturbed")
    assert "shards of 1 finished units are missing or damaged" in caplog.text


def test_a_finished_run_repeated_says_the_same_again(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    first = make(corpus, out, tokenizer)
    before = files_of(out)
    again = make(corpus, out, tokenizer)
    assert (first.already_finished, again.already_finished) == (False, True)
    of_a_run = {"already_finished", "resumed_units", "seconds", "tokenizer_seconds", "mb_per_s"}
    one, two = (
        {name: value for name, value in dataclasses.asdict(summary).items() if name not in of_a_run}
        for summary in (first, again)
    )
    assert one == two
    assert files_of(out) == before


def test_a_finished_run_repeated_otherwise_is_refused_by_the_difference(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    make(corpus, out, tokenizer)
    (corpus / "one more.txt").write_text("new")
    with pytest.raises(ConfigError, match="the number of input files: before 61, now 62"):
        make(corpus, out, tokenizer)
    (out / ".made_by.json").write_text("[")
    with pytest.raises(ConfigError, match=r"\.made_by\.json: is damaged"):
        make(corpus, out, tokenizer)
    (out / ".made_by.json").unlink()  # as data sets of before are
    with pytest.raises(ConfigError, match=r"already holds a finished data set, and no \.made_by"):
        make(corpus, out, tokenizer)


OTHERS: dict[str, Any] = {
    "shard_size": "40KB",
    "validation": 0.5,
    "limit": 3,
    "exclude": ("*.none",),
    "split": ("test=*00.txt",),
    "encoding": "latin-1",
    "max_record": 5_000_000,
    "fim_rate": 0.5,
    "add_special_tokens": True,
    "special_tokens_in_text": "split",
    "engine": "tokenizers",
    "tokenizer": None,
}
"""Another value of each option that decides about the bytes."""


def test_every_option_that_decides_about_bytes_is_compared(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    make(corpus, out, tokenizer)
    before = files_of(out)
    for option, value in OTHERS.items():
        given = {"tokenizer": tokenizer, option: value}
        with pytest.raises(ConfigError, match=rf"--{option.replace('_', '-')}.*: before .*, now "):
            make(corpus, out, **given)
    assert files_of(out) == before


def test_a_trained_tokenizer_is_recognised_as_well(corpus: Path, tmp_path: Path) -> None:
    options = Options(paths=(str(corpus), str(tmp_path / "out")), vocab_size=300)
    assert not make_dataset(options).already_finished
    assert make_dataset(options).already_finished
    with pytest.raises(ConfigError, match="--vocab-size and --seed: before 300 0, now 300 1"):
        make_dataset(dataclasses.replace(options, seed=1))


UNIT = {"shards": {}, "histograms": {}, "sources": []}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"result": UNIT | {"unit": "0"}, "written_at": {}},
        {"result": UNIT | {"unit": 0}, "written_at": []},
    ],
)
def test_unit_with_damaged_record_is_made_again(
    corpus: Path,
    tmp_path: Path,
    tokenizer: Path,
    content: Any,
) -> None:
    out = tmp_path / "out"
    interrupt(corpus, out, tokenizer, shard_size="auto")
    (out / ".parts/00000.json").write_text(json.dumps(content))
    assert make(corpus, out, tokenizer, shard_size="auto").resumed_units == 0


def options_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Options:
    monkeypatch.setattr(sys, "argv", ["pretokenize", "corpus", "out", *arguments])
    return parse_options()


def test_fields_are_named_together_or_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    together = ("--field", "text=body", "label=a=b")
    apart = ("--field", "label=a=b", "--json", "--field", "text=body")
    for arguments in (together, apart):
        options = options_of(monkeypatch, "--task", "classify", *arguments)
        assert options.make_task().fields == {"body": FieldKind.TEXT, "a=b": FieldKind.LABEL}
    pair = options_of(monkeypatch, "--task", "classify", "--field", "pair=other").make_task()
    assert list(pair.fields) == ["text", "other", "label"]


def test_a_corpus_whose_name_is_no_utf_8_continues(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    odd, out = tmp_path / os.fsdecode(b"n\xff"), tmp_path / "out"
    corpus.rename(odd)
    make(odd, tmp_path / "undisturbed", tokenizer)
    interrupt(odd, out, tokenizer)
    summary = make(odd, out, tokenizer)
    assert summary.resumed_units == summary.units
    assert files_of(out) == files_of(tmp_path / "undisturbed")
    assert make(odd, out, tokenizer).already_finished


def test_a_finished_data_set_that_has_lost_a_file_is_not_called_finished(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    make(corpus, out, tokenizer)
    for name in ("train/00000.arrow", "tokenizer.json", "sources.jsonl"):
        content = (out / name).read_bytes()
        for spoil in (Path.unlink, lambda path: path.write_bytes(b"")):
            spoil(out / name)
            with pytest.raises(ManifestError, match=rf"{name}: is missing or of another size"):
                make(corpus, out, tokenizer)
        (out / name).write_bytes(content)
    assert make(corpus, out, tokenizer).already_finished
