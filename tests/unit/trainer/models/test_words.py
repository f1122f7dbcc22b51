"""The model `words`: what it knows of the texts of tokens, and how it predicts."""

import dataclasses
from pathlib import Path

import pytest
import torch
from support.data_sets import byte_tokenizer, random_rows, write_rows
from support.host_waits import HostWaits
from support.training import VOCABULARY, make_head
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import Unigram, WordPiece

from tokenfeed.trainer.data.micro_batch import HeadKind, MicroBatch
from tokenfeed.trainer.models.gpt import SIZES
from tokenfeed.trainer.models.words import BUCKETS, FEATURES, Words

SPECIAL = ["Otto", " Otto", " otto", " lotto", " 1998", " 2024"]


def tables_of(tokenizer: Tokenizer, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model `words` knows of each token: features, and whether it begins a word."""
    size = tokenizer.get_vocab_size()
    rows = {"train": random_rows(torch.tensor([3, 2]).numpy(), vocabulary_size=size)}
    shards = write_rows(folder, rows, size, tokenizer=tokenizer.to_str().encode())
    model = Words(SIZES["words"], make_head(size, kind="token"))
    model.describe_tokens(shards)
    return model.features_VF[:size], model.begins_V[:size]


def test_features_tell_shape_case_ends_and_beginnings_of_words(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(["x X"], special=SPECIAL, vocabulary_size=320)
    features_VF, begins_V = tables_of(tokenizer, tmp_path)
    inner, name, word, longer, year, other = map(tokenizer.token_to_id, SPECIAL)
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
    _, begins_V = tables_of(wordpiece, tmp_path / "wordpiece")
    assert begins_V.tolist() == [not piece.startswith("##") for piece in pieces]
    texts = ["\u2581gan", "tija", "\u2581"]
    unigram = Tokenizer(Unigram([("<unk>", 0.0), *((text, -1.0) for text in texts)], unk_id=0))
    unigram.decoder = Metaspace()
    _, begins_V = tables_of(unigram, tmp_path / "unigram")
    assert begins_V.tolist() == [False, True, False, True]


def made(kind: HeadKind, *, pairs: bool = False) -> Words:
    """A model whose words have one or two tokens, some with features in common."""
    torch.manual_seed(0)
    head = dataclasses.replace(make_head(kind=kind), pairs=pairs)
    model = Words(SIZES["words"], head, dropout=0.3).eval()
    model.features_VF[:VOCABULARY] = torch.randint(0, BUCKETS, (VOCABULARY, FEATURES))
    model.begins_V[:VOCABULARY] = torch.arange(VOCABULARY) % 3 > 0
    return model


@pytest.mark.parametrize("kind", ["row", "token"])
def test_words_make_the_host_wait_for_nothing(kind: HeadKind) -> None:
    rows = MicroBatch.of_ids(torch.randint(0, VOCABULARY, (3, 9)), causal=False)
    with HostWaits() as waits:
        made(kind).train()(rows).sum().backward()
    assert waits.seen == []


@torch.no_grad()
def test_a_row_depends_on_its_tokens_whatever_their_order_and_on_their_text() -> None:
    model, ids_BT = made("row", pairs=True), torch.tensor([[1, 3, 2, 4, 6, 9, 9]])
    rows = dataclasses.replace(
        MicroBatch.of_ids(ids_BT, causal=False), is_token_BT=torch.arange(7)[None] < 5
    )
    whole = model(rows)
    changed = ids_BT.clone()
    changed[0, 5:] = 7
    torch.testing.assert_close(model(dataclasses.replace(rows, ids_BT=changed)), whole)
    turned = ids_BT[:, [4, 3, 2, 1, 0, 5, 6]]
    torch.testing.assert_close(model(dataclasses.replace(rows, ids_BT=turned)), whole)
    types_BT = (torch.arange(7) > 2).long()[None]
    assert not torch.allclose(model(dataclasses.replace(rows, token_types_BT=types_BT)), whole)
    model.features_VF[3] += 1
    assert not torch.allclose(model(rows), whole)


@torch.no_grad()
def test_tags_depend_on_two_words_each_side_and_on_no_padding() -> None:
    model, ids_BT = made("token"), torch.tensor([[1, 3, 2, 4, 6, 5, 7, 8]])
    whole_BTC = model(MicroBatch.of_ids(ids_BT, causal=False))  # words of tokens 0, 2, 3, 5, 6, 7
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
    model, ids_BT = made("token"), torch.randint(0, VOCABULARY, (1, 16))
    packed = dataclasses.replace(
        MicroBatch.of_ids(ids_BT, causal=False),
        positions_BT=torch.cat((torch.arange(7), torch.arange(9)))[None],
        is_token_BT=None,
    )
    alone = [model(MicroBatch.of_ids(part, causal=False)) for part in ids_BT.split([7, 9], 1)]
    torch.testing.assert_close(model(packed), torch.cat(alone, 1))
