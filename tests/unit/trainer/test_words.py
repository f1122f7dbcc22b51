"""Tokens that are one word but for case and space have one embedding; all others keep their own."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from data_sets import random_rows, write_rows
from host_waits import HostWaits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training import (
    VOCABULARY,
    assert_same_run,
    load_weights,
    make_config,
    make_head,
    run,
    write_labelled,
)

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.loop.export import load_exported
from tokenfeed.trainer.models.transformer import SIZES, Transformer, words_of

TEXTS = [
    "Happy happy HAPPY x X  x",
    "\u00c9t\u00e9 \u00e9t\u00e9, \u00c9T\u00c9! \U0001f600 \u7530 d\u00e9",
] * 3


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("words") / "shards", "classify")


def words_by_pairs(texts: list[str]) -> list[int]:
    """By comparing each token with all before it."""
    found: list[int] = []
    for id, text in enumerate(texts):
        folded = text.strip().casefold()
        is_text = bool(folded) and "\ufffd" not in text
        same = (one for one in range(id) if texts[one].strip().casefold() == folded)
        found.append(next(same, id) if is_text else id)
    return found


def shards_of(tokenizer: Tokenizer, folder: Path) -> Path:
    size = tokenizer.get_vocab_size()
    rows = {"train": random_rows(torch.tensor([3, 2]).numpy(), vocabulary_size=size)}
    return write_rows(folder, rows, size, tokenizer=tokenizer.to_str().encode())


def byte_level(special: Iterable[str] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=[*special], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def test_words_are_those_of_a_comparison_of_all_pairs(tmp_path: Path) -> None:
    tokenizer = byte_level(["<s>", "<S>", " "])
    words = words_of(shards_of(tokenizer, tmp_path)).tolist()
    ids = range(tokenizer.get_vocab_size())
    assert words == words_by_pairs(
        [tokenizer.decode([id], skip_special_tokens=False) for id in ids]
    )
    assert {words[id] for id in tokenizer.encode("Happy happy HAPPY").ids} < set(ids)
    assert all(words[word] == word <= id for id, word in enumerate(words))


def test_bytes_that_are_no_character_stay_apart(tmp_path: Path) -> None:
    """Their names in the file are letters, of upper and lower case."""
    tokenizer = byte_level()
    words = words_of(shards_of(tokenizer, tmp_path))
    upper, lower = (tokenizer.token_to_id(name) for name in "\u00d0\u00f0")
    assert words[upper] != words[lower]


def test_words_of_a_missing_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    shards = write_labelled(tmp_path / "shards", "classify")
    (shards / Manifest.read(shards).tokenizer.file).unlink()
    with pytest.raises(ConfigError, match=r"tokenizer.*: cannot be read.*another copy"):
        words_of(shards)


def test_case_makes_no_difference_to_words_and_does_to_others(labelled: Path) -> None:
    ids_BT = torch.randint(0, VOCABULARY, (3, 9))
    rows, folded = (MicroBatch.of_ids(each, causal=False) for each in (ids_BT, ids_BT // 2 * 2))
    head = make_head(kind="row", causal=False)
    for name, is_same in (("words", True), ("shallow", False)):
        model = Transformer(SIZES[name], head)  # type: ignore[index]
        torch.nn.init.normal_(model.head.weight)  # type: ignore[union-attr, arg-type]
        if model.words is not None:
            model.words.share(words_of(labelled))
        assert torch.equal(model(rows), model(folded)) == is_same


def test_words_make_the_host_wait_for_nothing() -> None:
    model = Transformer(SIZES["words"], make_head(kind="row", causal=False))
    rows = MicroBatch.of_ids(torch.randint(0, VOCABULARY, (3, 9)), causal=False)
    with HostWaits() as waits:
        model(rows).sum().backward()
    assert waits.seen == []


def test_an_interrupted_run_goes_on_and_what_it_exports_knows_words(
    labelled: Path, tmp_path: Path
) -> None:
    config = make_config(
        labelled, tmp_path / "whole", model="words", dropout=0.3, export=tmp_path / "exported"
    )
    run(config)
    parted = dataclasses.replace(config, run_dir=tmp_path / "parted", export=None)
    run(parted, stop_after=3)
    run(dataclasses.replace(parted, resume=True))
    assert_same_run(tmp_path / "whole", tmp_path / "parted", 8)
    words = load_exported(tmp_path / "exported").state_dict()["words.word_V"]
    assert torch.equal(words[:VOCABULARY], torch.arange(VOCABULARY) // 2 * 2)


def test_a_run_starts_from_the_weights_of_another(labelled: Path, tmp_path: Path) -> None:
    config = make_config(labelled, tmp_path / "first", model="words")
    run(config)
    later = dataclasses.replace(config, run_dir=tmp_path / "later", init_from=str(config.run_dir))
    run(dataclasses.replace(later, learning_rate=1e-30, weight_decay=0.0))
    best = load_weights(tmp_path / "later", 8)["embedding.weight"]
    firsts = [load_weights(tmp_path / "first", step)["embedding.weight"] for step in (4, 8)]
    assert any(torch.equal(best, first) for first in firsts)
