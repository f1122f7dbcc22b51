"""A fast engine that is wrong in any way, and runs that go on without it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import xxhash
from command import files_of, kill_at, records_in
from command import start as run
from false_engine import FALSE_ENGINE, write_corpus

from tokenfeed.tools.encoding.audit import Answers
from tokenfeed.tools.encoding.engines import EngineFailure, FastEngine, ReferenceEngine
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

Engines = Callable[[str], None]
BROKEN = 'raise ImportError("no such library")'
LIES = {
    "an id beyond the vocabulary": ("ids[::-1]", "[token + 60_000 for token in ids]"),
    "an id that fits the vocabulary once it is cut": ("ids[::-1]", "[i + 65_536 for i in ids]"),
    "a text left out": ("for text in texts]", 'for text in texts if b"LIE" not in text]'),
    "a text twice": (
        "for text in texts]",
        'for text in texts for _ in range(1 + (b"LIE" in text))]',
    ),
    "no array": ("SimpleNamespace(layout=layout)", "None"),
}


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    """Has `import gigatoken` find a module that consists of what is given."""
    before = os.environ.get("PYTHONPATH", "")

    def use(source: str) -> None:
        folder = tmp_path / f"engine {xxhash.xxh3_64_hexdigest(source.encode())}"
        folder.mkdir(exist_ok=True)
        (folder / "gigatoken.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{before}")

    return use


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_no_array_can_hold_is_a_breakdown(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    before, after = LIES[lie]
    assert before in FALSE_ENGINE
    false = ModuleType("gigatoken")
    exec(FALSE_ENGINE.replace(before, after), false.__dict__)
    monkeypatch.setitem(sys.modules, "gigatoken", false)
    loaded = TextTokenizer.load(tokenizer.read_bytes(), origin="test")
    engine = FastEngine.from_tokenizer(loaded)
    with pytest.raises(EngineFailure):
        engine.encode([b"right", b"LIE"])
    texts = [b"right", b"LIE", b""]
    assert b"LIE" in Answers.from_engine(engine, texts).differing(ReferenceEngine(loaded))


def test_an_id_beyond_the_vocabulary_has_the_reference_do_the_work(
    tmp_path: Path, tokenizer: Path, engines: Engines
) -> None:
    engines(FALSE_ENGINE.replace(*LIES["an id beyond the vocabulary"]))
    corpus = write_corpus(tmp_path / "corpus", "LIE")
    options = ("--tokenizer", tokenizer, "--shard-size", "60KB", "--validation", "0")
    said = run(corpus, tmp_path / "out", *options, "--workers", "2").stderr
    assert "`tokenizers` encodes everything" in said.splitlines()[-1]
    run(corpus, tmp_path / "right", *options, "--engine", "tokenizers")
    assert files_of(tmp_path / "out/train") == files_of(tmp_path / "right/train")


@pytest.mark.parametrize(
    ("first", "then"),
    [(FALSE_ENGINE, BROKEN), pytest.param(BROKEN, FALSE_ENGINE, marks=pytest.mark.slow)],
    ids=["lost", "found"],
)
def test_units_count_only_for_the_engine_that_made_them(
    tmp_path: Path, tokenizer: Path, engines: Engines, first: str, then: str
) -> None:
    corpus = write_corpus(tmp_path / "corpus", "LIE" if then is BROKEN else "nothing")
    options = ("--tokenizer", tokenizer, "--shard-size", "60KB", "--workers", "1")
    engines(then)
    run(corpus, tmp_path / "expected", *options)
    engines(first)
    out = tmp_path / "out"
    moment = 13 if first is BROKEN else 22  # job, plan, tokenizer, audit if any, and a record
    assert kill_at(moment, "pretokenize", corpus, out, *options)
    assert records_in(out)
    engines(then)
    run(corpus, out, *options)
    assert files_of(out) == files_of(tmp_path / "expected")
