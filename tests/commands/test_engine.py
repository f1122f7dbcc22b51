"""Engines: the fast one gives the reference's ids, and where it would not, that is found out."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import xxhash
from pyarrow import feather
from support.commands import kill_at, records_in, run, run_json
from support.data_sets import files_of
from support.false_engine import FALSE_ENGINE, sampled_document, write_corpus
from support.tokenizer_shapes import differing_texts
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.encoding.engines import ReferenceEngine, fast_engine
from tokenfeed.tools.encoding.fast.engine import EngineFailure
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

UseEngine = Callable[[str], None]
BROKEN = 'raise ImportError("no such library")'


@pytest.fixture
def use_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold_workers: None) -> UseEngine:
    """Has `import gigatoken` find a module of the given source, here and in other processes."""
    before = os.environ.get("PYTHONPATH", "")

    def use(source: str) -> None:
        folder = tmp_path / f"engine {xxhash.xxh3_64_hexdigest(source.encode())}"
        folder.mkdir(exist_ok=True)
        (folder / "gigatoken.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{before}")
        monkeypatch.syspath_prepend(folder)
        module = ModuleType("gigatoken")
        if source != BROKEN:
            exec(source, module.__dict__)
        monkeypatch.setitem(sys.modules, "gigatoken", module if source != BROKEN else None)  # type: ignore[arg-type]

    return use


def shards_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.arrow")
    }


LONG = "the lazy dog " * 8_000
EXTRAS = ("ALPHA at once", sampled_document("BETA"), f"{LONG}GAMMA")
"""Texts that the first comparison, that of the run's sample, and no comparison has."""
OPTIONS = ("--shard-size", "60KB", "--validation", "0.1")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory, byte_level: Tokenizer) -> Path:
    """A folder with a tokenizer, a corpus, and the data set that `tokenizers` makes of it."""
    folder = tmp_path_factory.mktemp("right")
    byte_level.save(str(folder / "tokenizer.json"))
    given = (write_corpus(folder / "corpus", *EXTRAS), folder / "out", "--tokenizer", folder)
    run(*given, *OPTIONS, "--engine", "tokenizers", "--workers", 1)
    return folder


@pytest.mark.parametrize(
    ("word", "said", "crews"),
    [("LIE", "BETA", (1, 2)), ("PANIC", "GAMMA", (2,))],
    ids=["in the sample", "a panic"],
)
def test_an_engine_that_is_wrong_once_makes_no_id_of_the_data_set(
    tmp_path: Path, use_engine: UseEngine, right: Path, word: str, said: str, crews: tuple[int, ...]
) -> None:
    use_engine(FALSE_ENGINE.replace(word, said))
    options = ("--tokenizer", right, *OPTIONS)
    manifests = []
    for workers in crews:
        out = tmp_path / f"out{workers}"
        result = run(right / "corpus", out, *options, "--workers", workers)
        assert "`tokenizers` encodes everything" in result.stderr
        assert shards_of(out) == shards_of(right / "out")
        manifests.append((out / "manifest.json").read_bytes())
    assert len(set(manifests)) == 1
    made = Manifest.read(tmp_path / f"out{crews[0]}").tokenizer
    assert made.engine == "tokenizers"
    assert made.audited > 150
    assert made.differences == (0 if word == "PANIC" else 1)


def test_an_engine_that_is_right_is_used_and_its_audit_kept(tmp_path: Path, right: Path) -> None:
    run(right / "corpus", tmp_path / "out", "--tokenizer", right, *OPTIONS, "--workers", 1)
    assert shards_of(tmp_path / "out") == shards_of(right / "out")
    made = Manifest.read(tmp_path / "out").tokenizer
    assert (made.engine, made.differences) == ("gigatoken", 0)
    assert made.audited > 150
    assert Manifest.read(right / "out").tokenizer.audited == 0


def test_special_tokens_in_text_become_their_ids(tmp_path: Path, byte_level: Tokenizer) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    corpus = write_corpus(tmp_path / "corpus", "forged <|endoftext|> end")
    options = ("--tokenizer", tmp_path, "--validation", 0, "--special-tokens-in-text", "split")
    run(corpus, tmp_path / "out", *options, "--workers", 1)
    made = Manifest.read(tmp_path / "out").tokenizer
    assert (made.engine, made.special_tokens_in_text) == ("gigatoken", "split")
    table = feather.read_table(tmp_path / "out/train/00000.arrow", memory_map=False)
    end = byte_level.token_to_id("<|endoftext|>")
    assert sum(end in row[:-1] for row in table["input_ids"].to_pylist()) == 1


def test_what_the_tokenizer_cannot_encode_is_a_reject(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="missing"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n{"text": "b"}\n')
    given = (tmp_path / "in.jsonl", tmp_path / "out", "--tokenizer", tmp_path)
    summary = run_json(*given)
    assert (summary["documents"], summary["rejected"]) == (2, 1)
    (reject,) = map(json.loads, (tmp_path / "out/rejects.jsonl").read_text().splitlines())
    assert (reject["line"], reject["record"]) == (2, 1)
    assert "cannot encode it" in reject["reason"]


def test_routed_texts_are_counted_and_a_matter_of_the_input_alone(
    tmp_path: Path, byte_level: Tokenizer
) -> None:
    made = Tokenizer.from_str(byte_level.to_str())
    made.add_tokens([AddedToken("lazy", single_word=True), AddedToken("zy dog", rstrip=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    corpus = write_corpus(tmp_path / "corpus", "nothing")
    options = ("--tokenizer", tmp_path, "--shard-size", "60KB")
    for workers in (1, 2):
        run(corpus, tmp_path / f"{workers}", *options, "--workers", workers)
    assert shards_of(tmp_path / "1") == shards_of(tmp_path / "2")
    tokenizer = Manifest.read(tmp_path / "1").tokenizer
    assert tokenizer.engine == "gigatoken"
    assert 100 < (tokenizer.routed or 0) < 351
    assert Manifest.read(tmp_path / "2") == Manifest.read(tmp_path / "1")


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


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_no_array_can_hold_is_a_breakdown(
    tokenizer: Path, use_engine: UseEngine, lie: str
) -> None:
    assert LIES[lie][0] in FALSE_ENGINE
    use_engine(FALSE_ENGINE.replace(*LIES[lie]))
    loaded = TextTokenizer.load(tokenizer.read_bytes(), origin="test")
    engine = fast_engine(loaded)
    with pytest.raises(EngineFailure):
        engine.encode([b"right", b"LIE"])
    texts = [b"right", b"LIE", b""]
    assert b"LIE" in differing_texts(engine, ReferenceEngine(loaded), texts)


def test_units_count_only_for_the_engine_that_made_them(
    tmp_path: Path, tokenizer: Path, use_engine: UseEngine
) -> None:
    corpus = write_corpus(tmp_path / "corpus", "LIE")
    options = ("--tokenizer", tokenizer, "--shard-size", "60KB", "--workers", "1")
    use_engine(BROKEN)
    run(corpus, tmp_path / "expected", *options)
    use_engine(FALSE_ENGINE)
    out = tmp_path / "out"
    moment = 22  # job, plan, tokenizer, audit and a record
    assert kill_at(moment, "pretokenize", corpus, out, *options)
    assert records_in(out)
    use_engine(BROKEN)
    run(corpus, out, *options)
    assert files_of(out) == files_of(tmp_path / "expected")
