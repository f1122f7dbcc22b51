"""Ids are those of `tokenizers`, whatever the tokenizer; training is deterministic."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.corpora import ODD_TEXTS
from support.object_server import as_own_process, remote_store
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tokenfeed.pipeline.errors import ConfigError, TokenizerError
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.store import LocalStore
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units
from tokenfeed.tools.encoding.engines import ReferenceEngine
from tokenfeed.tools.encoding.record_blocks import UnitResult
from tokenfeed.tools.encoding.tasks import LmEncoder
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, fetch_tokenizer_json
from tokenfeed.tools.encoding.training import train_tokenizer_json
from tokenfeed.tools.encoding.unit import EncodeSettings, UnitEncoder


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ODD_TEXTS,
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=["<|endoftext|>", "<pad>"],
            show_progress=False,
        ),
    )
    return tokenizer


def word_piece_that_cuts_and_pads() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(ODD_TEXTS, trainer)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


def loaded(tokenizer: Tokenizer, end_token: str | None = None) -> TextTokenizer:
    return TextTokenizer.load(tokenizer.to_str().encode(), origin="test", end_token=end_token)


def reference_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """What the issue demands, said independently: one text at a time, by `Tokenizer.encode`."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def encode_files(
    folder: Path, texts: list[str], tokenizer: TextTokenizer, validation: float = 0.0
) -> UnitResult:
    """Encode texts, a file each, as one unit into `folder`/out."""
    (folder / "in").mkdir(exist_ok=True)
    for index, text in enumerate(texts):
        (folder / f"in/{index:03}.txt").write_text(text, encoding="utf-8", newline="")
    corpus = find_corpus((str(folder / "in"),), out=folder / "out", field="text")
    (unit,) = cut_units(corpus.sources, 10**9)
    task = LmEncoder(text="text")
    job = EncodeSettings(
        output=LocalStore(folder / "out"),
        task=task,
        engine="tokenizers",
        vocabulary_size=tokenizer.vocabulary_size,
        template=task.template(tokenizer),
        validation=validation,
        splits=("train", "validation"),
        splits_special=False,
        max_rejects=None,
    )
    (folder / "out").mkdir(exist_ok=True)
    (folder / "out/tokenizer.json").write_bytes(tokenizer.json_bytes)
    result, _ = UnitEncoder(job).encode(unit)
    return result


def read_rows(folder: Path, result: UnitResult, split: str, size: int) -> dict[int, list[int]]:
    """Ids by source file of one split of a unit."""
    reader = ShardReader(folder / "out", result.shards[split], size)
    found: dict[int, list[int]] = {}
    for index in range(result.shards[split].batches):
        rows, _ = reader.read(index)
        pieces = np.split(rows.ids, np.cumsum(rows.lengths)[:-1])
        found |= {
            int(s): p.tolist() for s, p in zip(rows.per_row["origin_file"], pieces, strict=True)
        }
    return found


@pytest.mark.parametrize(
    ("make", "end"), [(byte_level, "<|endoftext|>"), (word_piece_that_cuts_and_pads, None)]
)
def test_ids_are_those_of_tokenizers_plus_the_end_id(
    tmp_path: Path, make: Callable[[], Tokenizer], end: str | None
) -> None:
    made = make()  # once: training a WordPiece is not deterministic
    tokenizer = loaded(made)
    assert tokenizer.end_token == end
    result = encode_files(tmp_path, ODD_TEXTS, tokenizer)
    rows = read_rows(tmp_path, result, "train", tokenizer.vocabulary_size)
    end_ids = [made.token_to_id(end)] if end else []
    expected = {index: reference_ids(made, text) for index, text in enumerate(ODD_TEXTS)}
    assert rows == {index: ids + end_ids for index, ids in expected.items() if ids}
    assert len(expected[0]) > 100  # far more than the 8 that the file's truncation would leave
    empty = [counts.empty for counts in result.sources]
    assert empty == [int(not ids) for ids in expected.values()]
    assert sum(empty) >= 1


def test_special_ids_are_found_by_usual_names_or_as_said() -> None:
    found = loaded(byte_level())
    assert (found.end_token, found.end_id, found.pad_id) == ("<|endoftext|>", 0, 1)
    assert loaded(byte_level(), end_token="<pad>").end_id == 1
    bert = loaded(word_piece_that_cuts_and_pads())
    assert (bert.end_token, bert.end_id, bert.pad_id) == (None, None, 0)
    with pytest.raises(ConfigError, match="'<nope>' is not in the vocabulary of test"):
        loaded(byte_level(), end_token="<nope>")


def test_a_vocabulary_with_holes_counts_to_its_largest_id() -> None:
    tokenizer = loaded(Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a")))
    assert tokenizer.vocabulary_size == 70_001
    ragged = ReferenceEngine(tokenizer).encode([b"b"])
    ids, lengths = ragged.values, ragged.lengths
    assert (ids.dtype, ids.tolist(), lengths.tolist()) == (np.uint32, [70_000], [1])


def test_tokenizer_is_read_from_an_address(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    as_own_process(monkeypatch)
    with remote_store(monkeypatch) as remote:
        remote.put("out/tokenizer.json", tokenizer.read_bytes())
        remote.put("my own.json", tokenizer.read_bytes())
        web = f"{remote.server.url}/{remote.prefix}"
        for name in (
            f"{remote.store.name}/out/tokenizer.json",
            f"{remote.store.name}/out",
            f"{remote.store.name}/my own.json",
            f"{web}/my%20own.json?signature=1",
            f"{web}/out/?signature=1",
        ):
            assert fetch_tokenizer_json(name) == tokenizer.read_bytes()
        with pytest.raises(TokenizerError, match=r"/nothing/tokenizer.json: not found. Give"):
            fetch_tokenizer_json(f"{web}/nothing?signature=1")


def test_validation_is_chosen_by_the_text_alone(tmp_path: Path) -> None:
    texts = [f"document {index % 100}" for index in range(200)]  # each text twice
    tokenizer = loaded(byte_level())
    forward = encode_files(_folder(tmp_path / "f"), texts, tokenizer, validation=0.3)
    backward = encode_files(_folder(tmp_path / "b"), texts[::-1], tokenizer, validation=0.3)
    size = tokenizer.vocabulary_size
    chosen = [
        {texts_[source] for source in read_rows(folder, result, "validation", size)}
        for folder, result, texts_ in (
            (tmp_path / "f", forward, texts),
            (tmp_path / "b", backward, texts[::-1]),
        )
    ]
    assert chosen[0] == chosen[1]
    assert 15 <= len(chosen[0]) <= 45
    assert forward.shards["validation"].rows == 2 * len(chosen[0])
    assert forward.shards["validation"].rows + forward.shards["train"].rows == 200


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_huge_file_is_not_the_whole_training_sample(tmp_path: Path) -> None:
    (tmp_path / "huge.txt").write_text("zq " * 1_000_000)
    for index in range(40):
        (tmp_path / f"small{index}.txt").write_text("ordinary words of a language " * 1000)
    units = cut_units(
        find_corpus((str(tmp_path),), out=Path("nowhere"), field="text").sources, 10**9
    )
    vocabulary = TextTokenizer.load(
        train_tokenizer_json(units, fields={"text": FieldKind.TEXT}, vocabulary_size=300, seed=0),
        origin="it",
    ).tokenizer.get_vocab()
    assert "Ġlanguage" in vocabulary
