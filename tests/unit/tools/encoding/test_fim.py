"""`--fim-rate`: documents are cut in three, and put together they are the documents again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import call
from support.data_sets import rows_in
from tokenizers import Tokenizer, pre_tokenizers

from tokenfeed import pretokenize
from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.errors import ConfigError, TokenizerError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools import shards
from tokenfeed.tools.encoding.fim import FillInMiddle

NAMES = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
TEXTS = [f"def f{n}(x):\n    return x + {n}  # naïve 🎉 {n * 7919}\n" for n in range(600)]


def with_tokens(tokenizer: Tokenizer, *special: str) -> Tokenizer:
    made = Tokenizer.from_str(tokenizer.to_str())
    made.add_special_tokens([*special])
    return made


@pytest.fixture(scope="module")
def tokenizer(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    with_tokens(byte_level, *NAMES).save(str(file))
    return file


def undone(row: list[int], oracle: Tokenizer) -> tuple[str, str]:
    """Return the layout and the document of a row; check that each part is encoded on its own."""
    prefix, suffix, middle, end = map(oracle.token_to_id, (*NAMES, "<|endoftext|>"))
    assert row[-1] == end
    row = row[:-1]
    marks = [id_ for id_ in row if id_ in (prefix, suffix, middle)]
    if not marks:
        assert row == oracle.encode(oracle.decode(row)).ids
        return "plain", oracle.decode(row)
    assert marks == [prefix, suffix, middle]
    assert row[0] == prefix
    at, end_of_suffix = row.index(suffix), row.index(middle)
    parts = [row[1:at], row[at + 1 : end_of_suffix], row[end_of_suffix + 1 :]]
    before, after, between = map(oracle.decode, parts)
    assert parts == [oracle.encode(part).ids for part in (before, after, between)]
    if at == 1:  # a PSM row with an empty prefix is the same
        return "spm", between + after
    return "psm", before + between + after


@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
        min_size=1,
        max_size=30,
    ),
    rate=st.sampled_from([0.3, 1.0]),
    spm=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 3),
)
@settings(max_examples=10)
@pytest.mark.slow
def test_rows_put_together_are_the_documents(
    tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    rate: float,
    spm: float,
    seed: int,
) -> None:
    out = tmp_path_factory.mktemp("fim") / "out"
    options: dict[str, Any] = {"fim_rate": rate, "fim_spm_rate": spm, "seed": seed}
    made = pretokenize(
        [{"text": text} for text in texts], out, tokenizer=tokenizer, validation=0, **options
    )
    oracle = Tokenizer.from_file(str(tokenizer))
    found = [undone(row, oracle) for row in rows_in(out)]
    assert [text for _, text in found] == texts
    num_cut = sum(layout != "plain" for layout, _ in found)
    assert (made.manifest.counts or {}).get("fim_rows", 0) == num_cut
    if rate == 1:
        assert "plain" not in {layout for layout, _ in found}
    if spm == 1:
        assert "psm" not in {layout for layout, _ in found}


def test_shares_of_documents_and_parts_are_those_asked_for() -> None:
    """On average, the three parts of a document have the same length."""
    documents = [b"ab" * 300 + b"%d" % number for number in range(1000)]
    settings = FillInMiddle(rate=0.5, spm_rate=0.25, seed=0, tokens=(256, 257, 258))
    ids, own, is_cut = settings.encode(documents, letters)
    assert is_cut.mean() == pytest.approx(0.5, abs=0.05)
    assert own.tolist() == [*map(len, documents)]
    is_spm = [row[:2].tolist() == [256, 257] for row in ids.rows()]
    assert sum(is_spm) / is_cut.sum() == pytest.approx(0.25, abs=0.06)
    whole, *_ = replace(settings, rate=1.0, spm_rate=0.0).encode(documents, letters)
    places = np.flatnonzero(whole.values > 255).reshape(-1, 3)
    parts = np.diff(np.column_stack([places, whole.offsets[1:]])) - [1, 1, 1]
    assert (parts / parts.sum(1, keepdims=True)).mean(0) == pytest.approx([1 / 3] * 3, abs=0.06)


def letters(texts: list[bytes]) -> Ragged:
    """Encode each byte as its number."""
    values = np.frombuffer(b"".join(texts), np.uint8).astype(np.uint16)
    return Ragged(values, np.array([*map(len, texts)]))


def test_seed_and_rate_decide_the_rows(tokenizer: Path, tmp_path: Path) -> None:
    made = {}
    for name, rate, seed in (("a", 0.5, 0), ("b", 0.5, 1), ("c", 1.0, 0), ("d", 0.5, 0)):
        records = [{"text": text} for text in TEXTS[:50]]
        pretokenize(
            records, tmp_path / name, tokenizer=tokenizer, fim_rate=rate, seed=seed, validation=0
        )
        made[name] = rows_in(tmp_path / name)
    assert made["a"] == made["d"]
    assert made["a"] != made["b"]
    assert made["a"] != made["c"]
    with pytest.raises(ConfigError, match="--fim-rate, --fim-spm-rate and --seed: before"):
        pretokenize(records, tmp_path / "a", tokenizer=tokenizer, fim_rate=0.25, validation=0)


@pytest.mark.parametrize(
    ("special", "adds_space", "message"),
    [((), False, "has no tokens to fill in the middle"), (NAMES, True, "puts a space before")],
)
def test_tokenizers_that_cannot_fill_in_are_refused(
    tmp_path: Path,
    byte_level: Tokenizer,
    special: tuple[str, ...],
    adds_space: bool,
    message: str,
) -> None:
    made = with_tokens(byte_level, *special)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=message):
        pretokenize([{"text": "a"}], tmp_path / "out", tokenizer=tmp_path, fim_rate=0.5)


def test_only_documents_are_filled_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`--fim-rate` has no effect with `--task complete`"):
        pretokenize([], tmp_path / "out", task="complete", fim_rate=0.5)


def test_selected_rows_have_no_stale_count(tokenizer: Path, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(TEXTS[number])
    files = [tmp_path / f"{number}.txt" for number in range(2)]
    pretokenize(files, tmp_path / "a", tokenizer=tokenizer, validation=0, fim_rate=1.0)
    call(shards.main, "select", tmp_path / "a", tmp_path / "b", "--where", f"origin {files[0]}")
    assert (Manifest.read(tmp_path / "a").counts or {})["fim_rows"] == 2
    assert Manifest.read(tmp_path / "b").counts is None
