"""Ids are those of `tokenizers`, whatever the tokenizer; training is deterministic."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import feather
from support.commands import call
from support.corpora import ODD_TEXTS
from support.object_server import as_own_process, remote_store
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tokenfeed import pretokenize
from tokenfeed.pipeline.errors import ConfigError, TokenizerError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units
from tokenfeed.tools.encoding.engines import ReferenceEngine
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, fetch_tokenizer_json
from tokenfeed.tools.encoding.training import train_tokenizer_json
from tokenfeed.tools.pretokenize import main


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


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    made = word_piece_that_cuts_and_pads()
    ids = ReferenceEngine(loaded(made)).encode([text.encode() for text in ODD_TEXTS])
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    expected = [made.encode(text, add_special_tokens=False).ids for text in ODD_TEXTS]
    assert [row.tolist() for row in ids.rows()] == expected
    assert len(expected[0]) > 100  # far more than the 8 of the truncation


def test_validation_is_chosen_by_the_text_alone(tokenizer: Path, tmp_path: Path) -> None:
    texts = [f"document {index % 100}" for index in range(200)]  # each text twice
    chosen = []
    for name, given in {"forward": texts, "backward": texts[::-1]}.items():
        records = [{"text": text} for text in given]
        pretokenize(records, tmp_path / name, tokenizer=tokenizer, validation=0.3)
        table = feather.read_table(tmp_path / name / "validation/00000.arrow", memory_map=False)
        chosen.append(sorted(given[record] for record in table["origin_record"].to_pylist()))
    assert chosen[0] == chosen[1]
    assert chosen[0] == sorted(2 * [*set(chosen[0])])
    assert 30 <= len(chosen[0]) <= 90


def _of_words(*words: str, special: tuple[str, ...] = ()) -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, words[0]))
    made.add_special_tokens([AddedToken(word, normalized=False) for word in special])
    return made


def test_special_ids_are_found_by_usual_names_or_as_said() -> None:
    gpt = _of_words("<|endoftext|>", "<pad>", special=("<|endoftext|>", "<pad>"))
    found = loaded(gpt)
    assert (found.end_token, found.end_id, found.pad_id) == ("<|endoftext|>", 0, 1)
    assert loaded(gpt, end_token="<pad>").end_id == 1
    bert = loaded(_of_words("[UNK]", "[PAD]", "[SEP]", special=("[PAD]", "[SEP]")))
    assert (bert.end_token, bert.end_id, bert.pad_id) == (None, None, 1)
    with pytest.raises(ConfigError, match="'<nope>' is not in the vocabulary of test"):
        loaded(gpt, end_token="<nope>")


GEMMA = (("<eos>", "<bos>", "<pad>"), ("</s>", "[PAD]"))
QWEN = (("<|endoftext|>", "<|im_end|>"), ())
NO_END = "has no end token: documents follow one another without a separator"


@pytest.mark.parametrize(
    ("tokens", "config", "generation", "expected", "said"),
    [
        (GEMMA, {}, {}, ("<eos>", "<pad>"), ""),
        (GEMMA, {"eos_token": "<eos>"}, {}, ("<eos>", "<pad>"), ""),
        (GEMMA, {"eos_token": {"content": "<bos>"}}, {}, ("<eos>", "<pad>"), "model is <bos>"),
        (
            QWEN,
            {"eos_token": "<|im_end|>"},
            {},
            ("<|endoftext|>", "<|endoftext|>"),
            "is <|im_end|>",
        ),
        (QWEN, {"eos_token": "<|im_end|>"}, {"eos_token_id": [1, 0]}, ("<|endoftext|>",) * 2, ""),
        ((("</s>", "<eos>"), ()), {"eos_token": "<eos>"}, {}, ("<eos>", "<eos>"), ""),
        ((("</s>", "<eos>"), ()), {}, {"eos_token_id": 1}, ("<eos>", "<eos>"), ""),
        ((("<|END|>",), ()), {"eos_token": "<|END|>"}, {}, ("<|END|>", "<|END|>"), ""),
        ((("<|END|>", "b"), ()), {}, {"eos_token_id": 0}, ("<|END|>", "<|END|>"), ""),
        (
            (("[PAD]",), ()),
            {"eos_token": "<gone>", "pad_token": "[PAD]"},
            {},
            (None, "[PAD]"),
            NO_END,
        ),
        (((), ("</s>",)), {}, {}, (None, "</s>"), "(</s> is in the vocabulary, but not special)"),
        (QWEN, {"pad_token": "<|im_end|>"}, {}, ("<|endoftext|>", "<|im_end|>"), ""),
    ],
)
def test_end_and_pad_token_are_those_of_the_model(
    tokens: tuple[tuple[str, ...], tuple[str, ...]],
    config: dict[str, Any],
    generation: dict[str, Any],
    expected: tuple[str | None, str],
    said: str,
    tmp_path: Path,
) -> None:
    special, plain = tokens
    made = _of_words(*special, *plain, "a", special=special)
    made.add_tokens([AddedToken(word, normalized=False) for word in plain])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    out = str(tmp_path / "out")
    warned = call(main, tmp_path / "a.jsonl", out, "--tokenizer", tmp_path).stderr
    info = Manifest.read(out).tokenizer
    end = None if info.end_id is None else made.id_to_token(info.end_id)
    assert (end, made.id_to_token(info.pad_id)) == expected
    assert said in warned
    assert bool(said) == ("end token" in warned)


MALFORMED = {
    "tokenizer_config.json": (
        *(b"[]", b"{", b'{"eos_token": {"a": 1}}', b'{"chat_template": ["x"]}', b"\xff"),
        *(b'{"chat_template": [{"template": "x"}]}', b'{"chat_template": 1}', b"[" * 99_999),
        *(b'{"eos_token": "\\ud800"}', b'{"chat_template": "\\ud800"}'),
    ),
    "special_tokens_map.json": (b"[1]", b"null", b'{"eos_token": {"content": 1}}'),
    "chat_template.jinja": (b"\xff{{ 1 }}", b"{% for a in [1] %}" * 999 + b"{% endfor %}" * 999),
    "generation_config.json": (b"[1]", b'{"eos_token_id": "a"}', b'{"eos_token_id": [null]}'),
    "additional_chat_templates/tool_use.jinja": (b"\xff",),
}


@pytest.mark.parametrize("file", MALFORMED)
def test_a_malformed_file_beside_a_tokenizer_is_one_line(file: str, tmp_path: Path) -> None:
    _of_words("a", "<eos>", special=("<eos>",)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text('{% set x_token = "\\q" %}\n{{ messages }}')
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    (tmp_path / file).parent.mkdir(exist_ok=True)
    words = (tmp_path / "a.jsonl", tmp_path / "out", "--tokenizer", tmp_path, "--task", "chat")
    for content in MALFORMED[file]:
        (tmp_path / file).write_bytes(content)
        error = call(main, *words, expect=1).stderr.strip()
        assert error.startswith("error: ")
        assert "\n" not in error
        assert "not valid" in error


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
