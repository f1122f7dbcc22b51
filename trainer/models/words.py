"""The model `words`, for few rows with labels: no layers, but the texts of tokens.

A tokenizer keeps " happy", "happy" and "Happy" apart, and a model of few rows would learn each by
itself. So the vector of a token is the sum of its embedding and those of features of its text
(`text_features`). A row is a weighted mean of its tokens, and a tag depends on the words around.

Shapes: B rows, T tokens, D width, V vocabulary, C outputs, F features, O offsets of words.
"""

import re
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.trainer.data.datasets import open_tokenizer
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch
from tokenfeed.trainer.models import gpt

_TAG_DROPOUT = 0.3  # largest share of tokens whose own embeddings are dropped for tags
_REACH = 2  # words on each side that count for a tag
BUCKETS, FEATURES = 8192, 5
_SPACES = ("\u0120", "\u2581")
"""Stand for a space at the beginning of a token whose text lacks them. Elsewhere, letters."""


def make_built_in(size: gpt.ModelSize, head: Head, dropout: float = 0.0) -> nn.Module:
    """Return the built-in model of a size for a head."""
    by_word = size.by_word and head.kind != "vocabulary"
    return (Words if by_word else gpt.Transformer)(size, head, dropout)


class Words(nn.Module):
    """Token ids to logits of a token's tags, or of a row's classes or score."""

    drops_attention = False  # there is no attention
    features_VF: Tensor
    begins_V: Tensor

    def __init__(self, size: gpt.ModelSize, head: Head, dropout: float = 0.0) -> None:
        """
        Args:
            size: The width.
            head: What the logits predict.
            dropout: Share of the values that are set to 0 in training, and of whole tokens, so that
                the model also learns from other words and from features: for tags at most 0.3.
        """
        super().__init__()
        vocabulary, width, tags = gpt.padded_vocabulary(head), size.width, head.kind == "token"
        self.register_buffer("features_VF", torch.zeros(vocabulary, FEATURES, dtype=torch.int64))
        self.register_buffer("begins_V", torch.ones(vocabulary, dtype=torch.bool))
        self.embedding = nn.Embedding(vocabulary, width)
        self.feature_embedding = nn.Embedding(BUCKETS, width)
        self.type_embedding = nn.Embedding(gpt.TOKEN_TYPES, width) if head.pairs else None
        self.token_dropout = nn.Dropout1d(min(dropout, _TAG_DROPOUT) if tags else dropout)
        self.dropout = nn.Dropout(dropout)
        self.norm = gpt.Norm(width, bias=False)
        self.pick = None if tags else gpt.Pick(size)
        self.head = nn.Linear(width, head.outputs)
        for module in (self.embedding, self.feature_embedding, self.type_embedding, self.head):
            if module is not None:
                nn.init.normal_(module.weight, std=gpt.INITIAL_STD)
        if self.pick is not None:
            nn.init.zeros_(self.pick.interest.weight)
            return  # the matrices for tags keep torch's initial values, which learn faster
        self.mix = nn.Linear((2 * _REACH + 1) * width, width, bias=False)
        self.feed_norm = gpt.Norm(width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_back = nn.Linear(4 * width, width, bias=False)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Logits: (B, T, C), or (B, C) for a head of rows."""
        ids_BT = micro_batch.ids_BT
        x_BTD = self.embedding(ids_BT)
        if self.type_embedding is not None:
            x_BTD = x_BTD + self.type_embedding(micro_batch.token_types_BT)
        x_BTD = self.token_dropout(x_BTD.to(gpt.sum_dtype(x_BTD)))
        x_BTD = x_BTD + self.feature_embedding(self.features_VF[ids_BT]).sum(2)
        if self.pick is not None:
            x_BTD = self.pick(self.norm(self.dropout(x_BTD)), micro_batch.is_token_BT)
        else:
            x_BTD = self.mix(self.dropout(self._near(x_BTD, micro_batch)))
            hidden = F.gelu(self.feed_in(self.feed_norm(x_BTD)), approximate="tanh")
            x_BTD = self.norm(x_BTD + self.dropout(self.feed_back(hidden)))
        logits: Tensor = self.head(self.dropout(x_BTD))
        return logits

    def describe_tokens(self, shards: StorePath) -> None:
        """Tell the model the texts of the tokens of these shards. Tables of these texts are saved
        with the weights, so that the model needs no tokenizer later.

        Raises:
            ConfigError: The tokenizer of the shards cannot be read.
        """
        texts, begins = _texts(shards)
        self.features_VF[: len(texts)] = text_features(texts, begins)
        self.begins_V[: len(texts)] = torch.tensor(begins)

    def _near(self, x_BTD: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return the words around each token, (B, T, O D): the sums of their tokens. Words of other
        documents count as 0."""
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
        return torch.cat(near, 2)


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


def text_features(texts: list[str], begins: list[bool]) -> Tensor:
    """Return the features of each token's text, (V, F), hashed into `BUCKETS`.

    They are the last three and two characters, the text without case, its shape (Ab-1: Aa-0), and
    its first three characters. Endings are the same in tokens that begin a word and in others.
    """
    features = []
    for text, is_first in zip(map(str.strip, texts), begins, strict=True):
        shape = re.sub("[a-z]+", "a", re.sub("[A-Z]+", "A", re.sub("[0-9]+", "0", text)))
        endings = text[-3:].lower(), text[-2:]
        found = *endings, *((is_first, part) for part in (text.lower(), shape, text[:3].lower()))
        hashes = [zlib.crc32(f"{n}{part}".encode()) % BUCKETS for n, part in enumerate(found)]
        features.append(hashes)
    return torch.tensor(features)
