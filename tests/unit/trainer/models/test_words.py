"""The model `words`: what it knows of the texts of tokens, and how it predicts."""

import dataclasses
import math
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import byte_tokenizer, random_rows, write_rows
from support.host_waits import HostWaits
from support.training import (
    VOCABULARY,
    assert_same_run,
    make_config,
    make_head,
    read_metrics,
    run,
    write_labelled,
)
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import Unigram, WordPiece
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.data.micro_batch import IGNORED, HeadKind, MicroBatch
from tokenfeed.trainer.loop.model_export import load_exported
from tokenfeed.trainer.models.gpt import SIZES
from tokenfeed.trainer.models.words import Words, make_built_in
from tokenfeed.trainer.tasks.label_tasks import Classify

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


def tables_of(kind: HeadKind, tokenizer: Tokenizer, folder: Path) -> dict[str, torch.Tensor]:
    """What the model `words` knows of each token."""
    size = tokenizer.get_vocab_size()
    model = Words(SIZES["words"], make_head(size, kind=kind))
    model.describe_tokens(shards_of(tokenizer, folder))
    names = dict(model.named_buffers())
    return {name.rpartition(".")[2]: table[:size] for name, table in names.items()}


def test_words_are_those_of_a_comparison_of_all_pairs(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(TEXTS, special=["<s>", "<S>", " "], vocabulary_size=320)
    words = tables_of("row", tokenizer, tmp_path)["word_V"].tolist()
    ids = range(tokenizer.get_vocab_size())
    assert words == words_by_pairs(
        [tokenizer.decode([id], skip_special_tokens=False) for id in ids]
    )
    assert {words[id] for id in tokenizer.encode("Happy happy HAPPY").ids} < set(ids)
    assert all(words[word] == word <= id for id, word in enumerate(words))


def test_bytes_that_are_no_character_stay_apart(tmp_path: Path) -> None:
    """Their names in the file are letters, of upper and lower case."""
    tokenizer = byte_tokenizer(TEXTS, vocabulary_size=320)
    words = tables_of("row", tokenizer, tmp_path)["word_V"].tolist()
    upper, lower = (tokenizer.token_to_id(name) for name in "\u00d0\u00f0")
    assert words[upper] != words[lower]


def test_case_makes_no_difference_to_words_and_does_to_others(labelled: Path) -> None:
    ids_BT = torch.randint(0, VOCABULARY, (3, 9))
    rows, folded = (MicroBatch.of_ids(each, causal=False) for each in (ids_BT, ids_BT // 2 * 2))
    head = make_head(kind="row")
    for name, is_same in (("words", True), ("shallow", False)):
        model = make_built_in(SIZES[name], head)  # type: ignore[index]
        torch.nn.init.normal_(model.head.weight)  # type: ignore[union-attr, arg-type]
        if isinstance(model, Words):
            model.describe_tokens(labelled)
        assert torch.equal(model(rows), model(folded)) == is_same


def words_by_hand(tokenizer: Tokenizer, text: str) -> list[tuple[int, str]]:
    """The place of the last token of each word, and the word: found token by token."""
    words: list[tuple[int, str]] = []
    before = " "
    for place, id in enumerate(tokenizer.encode(text).ids):
        token = tokenizer.id_to_token(id).replace("\u0120", " ")
        if isinstance(tokenizer.model, WordPiece):
            goes_on = token.startswith("##")
        else:
            goes_on = bool(re.match(r"\w", token) and re.search(r"\w$", before))
        word = words.pop()[1] + "|" if goes_on else ""
        words.append((place, word + token.strip().lower()))
        before = token
    return words


def word_pieces() -> Tokenizer:
    pieces = ["[UNK]", "un", "##un", "##happy", "##able", "happy", "able", ",", "-", "##s"]
    tokenizer = Tokenizer(
        WordPiece({piece: id for id, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = Lowercase(), BertPreTokenizer()
    return tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "Unhappy unhappys happy, un-happy able unable",
        "happy unable,unhappy HAPPY able un unun",
    ],
)
@pytest.mark.parametrize("tokenizer", [word_pieces(), byte_tokenizer(TEXTS, vocabulary_size=290)])
def test_a_row_has_its_words_at_their_last_tokens(
    tokenizer: Tokenizer, text: str, tmp_path: Path
) -> None:
    model = Words(SIZES["words"], make_head(kind="row", vocabulary_size=320))
    assert model.words is not None
    model.describe_tokens(shards_of(tokenizer, tmp_path))
    ids = tokenizer.encode(text).ids
    batch = MicroBatch.of_ids(torch.tensor([ids + [1] * 3]), causal=False)
    batch = dataclasses.replace(batch, is_token_BT=torch.arange(len(ids) + 3)[None] < len(ids))
    rows = model.words(batch)
    assert rows.is_token_BT is not None
    expected = words_by_hand(tokenizer, text)
    assert rows.is_token_BT[0].nonzero().flatten().tolist() == [place for place, _ in expected]
    found = rows.ids_BT[rows.is_token_BT].tolist()
    # One id for each word, and one word for each id.
    pairs = {(id, word) for id, (_, word) in zip(found, expected, strict=True)}
    assert len(pairs) == len(set(found)) == len({word for _, word in expected}) < len(expected)
    assert max(found) >= 320 > min(found)


def test_a_script_without_spaces_has_a_word_for_each_token(tmp_path: Path) -> None:
    text = "\u7530\u4e2d \u0e44\u0e17\u0e22 de"
    tokenizer = byte_tokenizer(TEXTS, special=[*text.replace(" ", "")], vocabulary_size=320)
    tables = tables_of("row", tokenizer, tmp_path)
    ids = [tokenizer.token_to_id(letter) for letter in text.replace(" ", "")]
    for name in ("begins_V", "ends_V"):
        assert tables[name][ids].tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("kind", ["row", "token"])
def test_words_make_the_host_wait_for_nothing(kind: HeadKind) -> None:
    model = Words(SIZES["words"], make_head(kind=kind), dropout=0.3)
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


@pytest.mark.parametrize("kind", ["row", "token"])
def test_words_predict_by_the_mean_of_two_models_that_learn_apart(
    kind: HeadKind, labelled: Path
) -> None:
    torch.manual_seed(0)
    model = Words(SIZES["words"], head := make_head(kind=kind))
    assert model.linear is not None
    torch.nn.init.normal_(model.linear.table.weight)
    batch = MicroBatch.of_ids(torch.randint(0, VOCABULARY, (3, 9)), causal=False)
    wanted = torch.randint(0, head.outputs, (3,) if kind == "row" else (3, 9))
    batch = dataclasses.replace(batch, targets=wanted.masked_fill(wanted == 1, IGNORED))
    both = model(batch)
    assert both.shape == (2, *wanted.shape, head.outputs)
    task = Classify(Manifest.read(labelled))
    loss = task.loss_of(both, batch)
    losses = [task.loss_of(each, batch) for each in both]
    torch.testing.assert_close(loss.sum, sum(each.sum for each in losses) / 2)
    assert {int(each.targets) for each in (loss, *losses)} == {int((wanted != 1).sum())}
    for mine, (own, other) in zip(losses, [("head", "linear"), ("linear", "head")], strict=True):
        model.zero_grad()
        mine.sum.backward(retain_graph=True)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert any(name.startswith(own) for name in grads)
        assert not any(grad.any() for name, grad in grads.items() if name.startswith(other))
    mean = both.softmax(-1).mean(0)
    torch.testing.assert_close(model.eval()(batch), mean.log())


def test_the_loss_of_labels_without_a_rule_does_not_rise(tmp_path: Path) -> None:
    """With two classes and words that many rows have, the loss is curved most."""
    rows = write_labelled(tmp_path / "rows", "classify", count=400)
    sizes: dict[str, Any] = {"step_rows": 32, "micro_batch_tokens": 1024, "steps": 60}
    rates = {"learning_rate": 1e-3, "warmup_steps": 6, "dropout": 0.3, "eval_every": 60}
    run(make_config(rows, tmp_path / "run", model="words", **sizes, **rates))
    losses = list(read_metrics(tmp_path / "run", "loss").values())
    means = np.convolve(losses, np.ones(10) / 10, "valid")  # one batch has 32 rows
    assert means.max() < 1.2 * math.log(2)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 5), st.randoms())
def test_linear_logits_of_a_row_depend_on_which_words_it_has(
    ids: list[int], padding: int, random: Random
) -> None:
    model = Words(SIZES["words"], make_head(kind="row"))
    assert model.linear is not None
    torch.nn.init.normal_(model.linear.table.weight)
    words = sorted(set(ids))
    expected = model.linear.table.weight[words].sum(0) / len(words) ** 0.5
    random.shuffle(ids)
    ids_BT = torch.tensor([ids + [7] * padding])
    is_token_BT = torch.arange(ids_BT.shape[1])[None] < len(ids)
    torch.testing.assert_close(model.linear.of_row(ids_BT, is_token_BT)[0], expected)


def test_a_word_ends_with_the_first_text_of_a_pair() -> None:
    model = Words(SIZES["words"], dataclasses.replace(make_head(kind="row"), pairs=True))
    assert model.words is not None
    model.words.begins_V[:] = model.words.ends_V[:] = False
    batch = MicroBatch.of_ids(torch.tensor([[5, 6, 7, 8]]), causal=False)
    batch = dataclasses.replace(batch, token_types_BT=torch.tensor([[0, 0, 0, 1]]))
    rows = model.words(batch)
    assert rows.is_token_BT.tolist() == [[False, False, True, True]]
    assert rows.ids_BT[0, 3] == 8


@torch.no_grad()
def test_linear_logits_of_a_pair_know_the_text_of_a_word() -> None:
    model = Words(SIZES["words"], dataclasses.replace(make_head(kind="row"), pairs=True))
    torch.nn.init.normal_(model.linear.table.weight)  # type: ignore[union-attr]
    batch = MicroBatch.of_ids(torch.tensor([[5, 6]]), causal=False)
    types = torch.tensor([[0, 1]])
    one, other = (dataclasses.replace(batch, token_types_BT=t) for t in (types, 1 - types))
    assert not torch.allclose(model(one)[1], model(other)[1])


def tagger() -> Words:
    """A model of tags whose words have one or two tokens."""
    torch.manual_seed(0)
    model = Words(SIZES["words"], make_head(kind="token")).eval()
    assert model.window is not None
    assert model.linear is not None
    torch.nn.init.normal_(model.linear.table.weight)
    features = torch.randint(0, 8192, (VOCABULARY, 5))
    model.window.features_VF[:VOCABULARY] = features
    model.window.begins_V[:VOCABULARY] = torch.arange(VOCABULARY) % 3 > 0
    return model


@torch.no_grad()
def test_tags_depend_on_two_words_each_side_and_on_no_padding() -> None:
    model, ids_BT = tagger(), torch.tensor([[1, 3, 2, 4, 6, 5, 7, 8]])  # words of tokens 0, 2, 3, 5
    whole_BTC = model(MicroBatch.of_ids(ids_BT, causal=False))
    for place, changed in ((6, [3, 4, 5, 6, 7]), (0, [0, 1, 2, 3, 4])):
        other_BT = ids_BT.clone()
        other_BT[0, place] = 10
        differs = (model(MicroBatch.of_ids(other_BT, causal=False)) != whole_BTC).any(-1)[0]
        assert differs.nonzero().flatten().tolist() == changed
    padded_BT = torch.cat((ids_BT, torch.full((1, 5), 4)), 1)
    padded = dataclasses.replace(
        MicroBatch.of_ids(padded_BT, causal=False), is_token_BT=torch.arange(13)[None] < 8
    )
    torch.testing.assert_close(model(padded)[:, :8], whole_BTC)


@torch.no_grad()
def test_tags_of_packed_documents_are_those_of_each_document() -> None:
    model, ids_BT = tagger(), torch.randint(0, VOCABULARY, (1, 16))
    packed = dataclasses.replace(
        MicroBatch.of_ids(ids_BT, causal=False),
        positions_BT=torch.cat((torch.arange(7), torch.arange(9)))[None],
        is_token_BT=None,
    )
    alone = [model(MicroBatch.of_ids(part, causal=False)) for part in ids_BT.split([7, 9], 1)]
    torch.testing.assert_close(model(packed), torch.cat(alone, 1))


def test_features_of_tags_tell_shape_case_ends_and_beginnings_of_words(tmp_path: Path) -> None:
    special = ["Otto", " Otto", " otto", " lotto", " 1998", " 2024"]
    tokenizer = byte_tokenizer(TEXTS, special=special, vocabulary_size=320)
    tables = tables_of("token", tokenizer, tmp_path)
    features_VF, begins_V = tables["features_VF"], tables["begins_V"]
    inner, name, word, longer, year, other = map(tokenizer.token_to_id, special)
    assert begins_V[[name, word, longer, year]].all()
    assert not begins_V[inner]
    for one, two, same in (
        (name, word, [True, True, True, False, True]),
        (word, longer, [True, True, False, True, False]),
        (year, other, [False, False, False, True, False]),
        (inner, name, [True, True, False, False, False]),
    ):
        assert (features_VF[one] == features_VF[two]).tolist() == same


def test_a_letter_that_marks_spaces_elsewhere_does_not_join_words(tmp_path: Path) -> None:
    """\u0120 is a letter of Maltese, and byte-level tokenizers write a space so."""
    pieces = ["[UNK]", "\u0120", "\u0120gan", "##tija", "il", "##\u0120", "\u2581"]
    wordpiece = Tokenizer(WordPiece({piece: id for id, piece in enumerate(pieces)}))
    wordpiece.decoder = WordPieceDecoder()
    begins_V = tables_of("token", wordpiece, tmp_path / "wordpiece")["begins_V"]
    assert begins_V.tolist() == [not piece.startswith("##") for piece in pieces]
    texts = ["\u2581gan", "tija", "\u2581"]
    unigram = Tokenizer(Unigram([("<unk>", 0.0), *((text, -1.0) for text in texts)], unk_id=0))
    unigram.decoder = Metaspace()
    begins_V = tables_of("token", unigram, tmp_path / "unigram")["begins_V"]
    assert begins_V.tolist() == [False, True, False, True]
