"""The model `words`, for few rows with labels: no layers, but the texts of tokens.

A tokenizer keeps " happy", "happy" and "Happy" apart, and a model of few rows would learn each by
itself. It also cuts rare words into pieces that say little. So for classes and scores, the model
reads whole words (`_WholeWords`), and for tags the words around a token (`_Window`). Beside the
network, it has a linear model of classes and tags, see `_Linear`.

Shapes: B rows, T tokens, D width, V vocabulary, C outputs, F features, O offsets of words.
"""

import math
import re
import zlib
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.trainer.data.datasets import open_tokenizer
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch
from tokenfeed.trainer.models.gpt import (
    INITIAL_STD,
    TOKEN_TYPES,
    ModelSize,
    Norm,
    Pick,
    Transformer,
    padded_vocabulary,
    sum_dtype,
)

_RATE_OF_CLASS, _MOST_RATE = 1.5e4, 1e5
"""Rate of the linear model for each class, and the largest, in multiples of AdamW's."""
_TAG_DROPOUT = 0.3
"""Largest share of tokens whose own embeddings are dropped for tags."""
_REACH = 2
_OFFSETS = 2 * _REACH + 1
"""Words on each side that count for a tag, and all of them with the word itself."""
BUCKETS, FEATURES = 8192, 5
_LONG_WORDS = 32_768
"""Embeddings for words of several tokens. With 8,192, too many words share one."""
_MULTIPLIER, _MODULUS = 0x9E3779B1, 2**31 - 1
"""Spread ids for a hash: an odd number without pattern, and a prime."""
_SPACES = ("\u0120", "\u2581")
"""Characters that stand for a space at the beginning of a token, and are not in its text. In other
tokenizers they are letters."""
_IN_WORD = re.compile(
    r"[^\W\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Letters and digits, but those of Thai, Lao, Tibetan, Burmese, Khmer, Japanese and Chinese."""
_BROKEN = "\ufffd"
"""Character in the text of a token that is a part of a character's bytes."""


def make_built_in(size: ModelSize, head: Head, dropout: float = 0.0) -> "Transformer | Words":
    """Return the built-in model of a size for a head."""
    by_word = size.by_word and head.kind != "vocabulary"
    return (Words if by_word else Transformer)(size, head, dropout)


class Words(nn.Module):
    """Token ids to logits of a token's tags, or of a row's classes or score."""

    drops_attention = False
    """Whether attention weights are set to 0 at random. There is no attention."""

    def __init__(self, size: ModelSize, head: Head, dropout: float = 0.0) -> None:
        """
        Args:
            size: The width.
            head: What the logits predict.
            dropout: Share of the values that are set to 0 in training, and of whole tokens, so that
                a row is not classified by a single word: for tags at most 0.3 of them, so that the
                model also learns from features of words.
        """
        super().__init__()
        padded, tags = padded_vocabulary(head), head.kind == "token"
        self.words = None if tags else _WholeWords(padded)
        self.window = _Window(padded, size.width, dropout) if tags else None
        self.embedding = nn.Embedding(padded if tags else padded + _LONG_WORDS, size.width)
        self.type_embedding = nn.Embedding(TOKEN_TYPES, size.width) if head.pairs else None
        self.norm = Norm(size.width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.token_dropout = nn.Dropout1d(min(dropout, _TAG_DROPOUT) if tags else dropout)
        self.pick = None if tags else Pick(size)
        self.head = nn.Linear(size.width, head.outputs)
        self.linear = None
        if head.outputs > 1:
            rows = padded + BUCKETS if tags else self.embedding.num_embeddings
            rows *= TOKEN_TYPES if head.pairs else 1
            self.linear = _Linear(rows, head.outputs, _OFFSETS if tags else 1)
        self._initialize()

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Logits: (B, T, C), or (B, C) for a head of rows.

        With `_Linear`, they are the logarithms of the mean probabilities of both models. In
        training, they are the logits of both, (2, B, T, C) or (2, B, C), which learn apart.
        """
        if self.words is not None:
            micro_batch = self.words(micro_batch)
        x_BTD = self._hidden(micro_batch)
        if self.pick is not None:
            x_BTD = self.pick(x_BTD, micro_batch.is_token_BT)
        logits: Tensor = self.head(self.dropout(x_BTD))
        if self.linear is None:
            return logits
        both = torch.stack((logits.float(), self._linear_logits(micro_batch)))
        return both if self.training else both.log_softmax(-1).logsumexp(0) - math.log(2)

    def describe_tokens(self, shards: StorePath) -> None:
        """Tell the model the texts of the tokens of these shards. Tables of these texts are saved
        with the weights, so that the model needs no tokenizer later.

        Raises:
            ConfigError: The tokenizer of the shards cannot be read.
        """
        part, tables = (self.words, words_of) if self.words else (self.window, tag_features)
        assert part is not None
        for buffer, table_V in zip(part.buffers(), tables(*_texts(shards)), strict=True):
            buffer[: len(table_V)] = table_V

    def _hidden(self, micro_batch: MicroBatch) -> Tensor:
        """Return the vectors of tokens, (B, T, D)."""
        x_BTD = self.embedding(micro_batch.ids_BT)
        if self.type_embedding is not None:
            x_BTD = x_BTD + self.type_embedding(micro_batch.token_types_BT)
        x_BTD = self.token_dropout(x_BTD.to(sum_dtype(x_BTD)))
        x_BTD = self.dropout(x_BTD) if self.window is None else self.window(x_BTD, micro_batch)
        out_BTD: Tensor = self.norm(x_BTD)
        return out_BTD

    def _linear_logits(self, micro_batch: MicroBatch) -> Tensor:
        assert self.linear is not None
        ids_BT, types_BT = micro_batch.ids_BT, micro_batch.token_types_BT
        if self.window is not None:
            features_BTF = self.window.features_VF[ids_BT]
            ids_BTF = torch.cat((features_BTF, BUCKETS + ids_BT[:, :, None]), -1)
            near_BTOE = self.window.near(self.linear.table(ids_BTF).sum(2), micro_batch)
            return self.linear.of_word(near_BTOE)
        if self.type_embedding is not None and types_BT is not None:
            ids_BT = ids_BT * TOKEN_TYPES + types_BT
        return self.linear.of_row(ids_BT, micro_batch.is_token_BT)

    def _initialize(self) -> None:
        """Draw the weights. The matrices of `_Window` keep torch's initial values, which learn
        faster, and the linear model keeps its zeros."""
        for name, parameter in self.named_parameters():
            is_drawn = name.startswith(("window.mix", "window.feed", "linear"))
            if parameter.dim() >= 2 and not is_drawn:
                nn.init.normal_(parameter, std=INITIAL_STD)
        if self.pick is not None:
            nn.init.zeros_(self.pick.interest.weight)


class _WholeWords(nn.Module):
    """Rows of words in place of tokens: a word has one embedding, in upper or lower case.

    A word is there at its last token, and the others count as padding. A word of one token has the
    id of a token, and a word of several tokens a hash of these ids. At first each token is a word.
    """

    word_V: Tensor
    begins_V: Tensor
    ends_V: Tensor

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.register_buffer("word_V", torch.arange(vocabulary_size))
        for name in ("begins_V", "ends_V"):
            self.register_buffer(name, torch.ones(vocabulary_size, dtype=torch.bool))

    def forward(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the same rows by words."""
        ids_BT, is_token_BT = micro_batch.ids_BT, micro_batch.is_token_BT
        assert is_token_BT is not None, "rows with one label are not packed"
        word_BT = self.word_V[ids_BT]
        begins_BT = self.begins_V[ids_BT] | ~is_token_BT
        begins_BT = begins_BT | F.pad(self.ends_V[ids_BT], (1, -1), value=True)
        if micro_batch.token_types_BT is not None:
            begins_BT = begins_BT | F.pad(micro_batch.token_types_BT.diff() != 0, (1, 0))
        ends_BT = F.pad(begins_BT, (-1, 1), value=True)
        # The sum over the tokens of a word is a difference of sums over the row. These never fall,
        # so the largest sum before a beginning is the one before the last beginning.
        part_BT = (word_BT + 1) * _MULTIPLIER % _MODULUS
        sum_BT = part_BT.cumsum(1)
        before_BT = ((sum_BT - part_BT) * begins_BT).cummax(1).values
        hash_BT = (sum_BT - before_BT) % _LONG_WORDS + len(self.word_V)
        return replace(
            micro_batch,
            ids_BT=torch.where(begins_BT & ends_BT, word_BT, hash_BT),
            is_token_BT=is_token_BT & ends_BT,
        )


class _Window(nn.Module):
    """A vector for each token, for its tag: a mix of its word and two words on each side.

    The vector of a word is the sum of its tokens: of their embeddings, and of the embeddings of
    features of their texts (`tag_features`). Words of other documents count as 0.
    """

    features_VF: Tensor
    begins_V: Tensor

    def __init__(self, vocabulary_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.register_buffer(
            "features_VF", torch.zeros(vocabulary_size, FEATURES, dtype=torch.int64)
        )
        self.register_buffer("begins_V", torch.ones(vocabulary_size, dtype=torch.bool))
        self.embedding = nn.Embedding(BUCKETS, width)
        self.dropout = nn.Dropout(dropout)
        self.mix = nn.Linear(_OFFSETS * width, width, bias=False)
        self.norm = Norm(width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_back = nn.Linear(4 * width, width, bias=False)

    def forward(self, own_BTD: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return (B, T, D), given the embeddings of the tokens."""
        x_BTD = own_BTD + self.embedding(self.features_VF[micro_batch.ids_BT]).sum(2)
        near_BTOD = self.near(x_BTD, micro_batch)
        x_BTD = self.mix(self.dropout(near_BTOD.flatten(2)))
        hidden = F.gelu(self.feed_in(self.norm(x_BTD)), approximate="tanh")
        out_BTD: Tensor = x_BTD + self.dropout(self.feed_back(hidden))
        return out_BTD

    def near(self, x_BTD: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return the words around each token, (B, T, O, D): the sums of their tokens."""
        ids_BT = micro_batch.ids_BT
        if micro_batch.is_token_BT is not None:
            x_BTD = x_BTD * micro_batch.is_token_BT[:, :, None]
        begins_BT = (micro_batch.positions_BT == 0).expand_as(ids_BT)
        word_BT = (begins_BT | self.begins_V[ids_BT]).cumsum(1) - 1 + _REACH
        document_BT = begins_BT.cumsum(1)
        rows, length, width = x_BTD.shape
        places_BTD = word_BT[:, :, None].expand_as(x_BTD)
        words_BWD = x_BTD.new_zeros((rows, length + 2 * _REACH, width))
        words_BWD = words_BWD.scatter_add(1, places_BTD, x_BTD)
        of_BW = document_BT.new_zeros(words_BWD.shape[:2]).scatter(1, word_BT, document_BT)
        near = []
        for offset in range(-_REACH, _REACH + 1):
            is_same_BT = of_BW.gather(1, word_BT + offset) == document_BT
            near.append(words_BWD.gather(1, places_BTD + offset) * is_same_BT[:, :, None])
        return torch.stack(near, 2)


class _Linear(nn.Module):
    """Logits that are linear in the words of a row, or in the words around a word and the features
    of their texts: a second model, which predicts with the network. On small sets, the mean of both
    is better than each of them.

    Its weights follow their mean gradients. AdamW would move the weight of a rare word as far as
    that of a frequent one, and this model would learn rows by heart. With fewer classes, the loss
    is curved more, and large steps would overshoot.
    """

    def __init__(self, rows: int, outputs: int, offsets: int) -> None:
        super().__init__()
        self._offsets = offsets
        self.by_gradient = min(_RATE_OF_CLASS * outputs, _MOST_RATE)
        self.table = nn.Embedding(rows, offsets * outputs)
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.zeros_(self.table.weight)

    def of_row(self, ids_BT: Tensor, is_token_BT: Tensor | None) -> Tensor:
        """Return the logits of rows, (B, C): the sum over the different ids of a row, by the root
        of their number."""
        assert is_token_BT is not None, "rows with one label are not packed"
        sorted_BT = ids_BT.masked_fill(~is_token_BT, -1).sort(1).values
        is_new_BT = sorted_BT != F.pad(sorted_BT, (1, 0), value=-1)[:, :-1]
        sum_BC = (self.table(sorted_BT.clamp(min=0)) * is_new_BT[:, :, None]).sum(1)
        logits: Tensor = sum_BC / is_new_BT.sum(1, keepdim=True).clamp(min=1).sqrt() + self.bias
        return logits

    def of_word(self, near_BTOE: Tensor) -> Tensor:
        """Return the logits of words, (B, T, C), from sums of the table for the words around. A row
        of the table has weights for each offset."""
        near_BTOOC = near_BTOE.unflatten(-1, (self._offsets, -1))  # type: ignore[no-untyped-call]
        sum_BTC = near_BTOOC.diagonal(dim1=2, dim2=3).sum(-1)
        logits: Tensor = sum_BTC / math.sqrt(self._offsets) + self.bias
        return logits


def words_of(texts: list[str], is_first: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tables of `_WholeWords`: the smallest id of the same text for each token, without case
    and surrounding space; whether a token begins a word; and whether it ends a word; each (V,).

    Ids without text of their own stay. A character that is no letter, digit or `_`, or whose script
    has no spaces, begins and ends a word.
    """
    first: dict[str, int] = {}
    folded = ["" if _BROKEN in text else text.strip().casefold() for text in texts]
    words = [first.setdefault(w, id) if w else id for id, w in enumerate(folded)]
    inside = [text.removeprefix("##") for text in texts]
    begins = [
        begins or not _IN_WORD.match(text) for begins, text in zip(is_first, inside, strict=True)
    ]
    ends = [not _IN_WORD.match(text[-1:]) for text in inside]
    return torch.tensor(words), torch.tensor(begins), torch.tensor(ends)


def _texts(shards: StorePath) -> tuple[list[str], list[bool]]:
    """Return the text of each token, and whether a space is before the token."""
    ids, tokenizer = range(Manifest.read(shards).tokenizer.vocabulary_size), open_tokenizer(shards)
    texts = tokenizer.decode_batch([[id] for id in ids], skip_special_tokens=False)
    tokens = [tokenizer.id_to_token(id) or "" for id in ids]
    begins = [
        text[:1].isspace() or (token[:1] in _SPACES and token[:1] != text[:1])
        for token, text in zip(tokens, texts, strict=True)
    ]
    if not any(begins):  # the tokenizer drops spaces
        begins = [not token.startswith("##") for token in tokens]
    return texts, begins


def tag_features(texts: list[str], is_first: list[bool]) -> tuple[Tensor, Tensor]:
    """Return tables of `_Window`: features of each token's text, (V, F), and `is_first`, (V,).

    The features are the text without case, its shape (Ab-1: Aa-0), its last three and two
    characters, and its first three; each is hashed into `BUCKETS`. Endings are the same in tokens
    that begin a word and in others.
    """
    features = []
    for text, begins in zip(map(str.strip, texts), is_first, strict=True):
        shape = re.sub("[a-z]+", "a", re.sub("[A-Z]+", "A", re.sub("[0-9]+", "0", text)))
        endings = text[-3:].lower(), text[-2:]
        found = *endings, *((begins, part) for part in (text.lower(), shape, text[:3].lower()))
        features.append(
            [zlib.crc32(f"{n}{part}".encode()) % BUCKETS for n, part in enumerate(found)]
        )
    return torch.tensor(features), torch.tensor(is_first)
