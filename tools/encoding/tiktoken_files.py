"""Convert a tiktoken file to a tokenizer.json with the same ids.

A tiktoken file has a line per token: its bytes in base64, and its rank, which is also its id. The
encoder joins two neighbours if the file has their concatenation, the lowest rank first. So each
pair of tokens whose concatenation is a token is a merge, in the order of the concatenations. The
order of several pairs of one concatenation does not matter: earlier merges leave only one of them.
A word that is a token needs no merge, which is `ignore_merges`.

The file lacks the regex that splits a text into words, and the special tokens. `KNOWN` has both for
known files.
"""

import base64
import logging
import re
from collections.abc import Mapping
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.tools.encoding.engine_support import (
    GPT_4,
    ID_LIMIT,
    REGEXES,
    byte_letters,
)

logger = logging.getLogger(__name__)

_LINE = re.compile(rb"[A-Za-z0-9+/=]+ [0-9]+\r?\n")


class KnownFile(NamedTuple):
    """What a known tiktoken file lacks."""

    name: str
    regex: str
    special_tokens: dict[str, int]


def _llama_3() -> dict[str, int]:
    """Return the special tokens of Llama 3.1 to 3.3. Llama 3.0 names three of them otherwise."""
    named = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id"}
    named |= {6: "start_header_id", 7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}
    unnamed = [place for place in range(256) if place not in named]
    named |= {place: f"reserved_special_token_{n}" for n, place in enumerate(unnamed)}
    return {f"<|{name}|>": 128_000 + place for place, name in sorted(named.items())}


_END = "<|endoftext|>"
_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
KNOWN = {
    50_256: KnownFile("r50k_base", REGEXES["GPT-2"][0], {_END: 50_256}),
    50_280: KnownFile("p50k_base", REGEXES["GPT-2"][0], {_END: 50_256}),
    100_256: KnownFile(
        "cl100k_base",
        GPT_4,
        dict(zip((_END, *_FIM), range(100_257, 100_261), strict=True))
        | {"<|endofprompt|>": 100_276},
    ),
    128_000: KnownFile("Llama 3", REGEXES["Llama 3, OLMo 2"][0], _llama_3()),
    199_998: KnownFile(
        "o200k_base", REGEXES["GPT-4o, gpt-oss"][0], {_END: 199_999, "<|endofprompt|>": 200_018}
    ),
}
"""Known files by the number of their tokens."""


def is_tiktoken(content: bytes) -> bool:
    """Return whether a file begins like a tiktoken file."""
    return _LINE.match(content) is not None


def tiktoken_to_json(
    content: bytes, origin: object, known_files: Mapping[int, KnownFile] = KNOWN
) -> bytes:
    """Convert a tiktoken file to a tokenizer.json.

    Args:
        content: The file.
        origin: Name of the file, for errors.
        known_files: See `KNOWN`.

    Raises:
        TokenizerError: The file is damaged, or its regex and special tokens are not known.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.rstrip().splitlines(), 1):
        try:
            written_token, rank = line.split()
            token = base64.b64decode(written_token, validate=True)
            if token in ranks or not 0 <= int(rank) < ID_LIMIT:
                raise ValueError
            ranks[token] = int(rank)
        except ValueError:
            raise TokenizerError(
                f"{origin}: line {number:,} is {line[:40]!r}, expected another token in base64 and "
                "its rank. Download the file again."
            ) from None
    known = known_files.get(len(ranks))
    if known is None:
        raise TokenizerError(
            f"{origin}: a tiktoken file of {len(ranks):,} tokens. Such a file lacks the split "
            "pattern and the special tokens, which are known only for "
            f"{', '.join(each.name for each in KNOWN.values())}. Give the tokenizer.json of the "
            "model, for example by its Hub id."
        )
    logger.info("%s: read as %s, by its %s tokens", origin, known.name, f"{len(ranks):,}")
    letters = byte_letters()
    written = {token.decode("latin-1").translate(letters): ranks[token] for token in ranks}
    special_tokens = known.special_tokens
    free = {*range(len(ranks) + len(special_tokens))} - {*special_tokens.values()}
    are_ranks_whole = sorted(ranks.values()) == sorted(free)[: len(ranks)]
    are_tokens_whole = written.keys() >= {*letters.values()}
    if not are_ranks_whole or not are_tokens_whole or written.keys() & special_tokens.keys():
        raise TokenizerError(
            f"{origin}: its ranks have gaps, or its tokens lack a byte or include a special token. "
            "Download the file again."
        )
    merges = [
        (left, right)
        for token in sorted(written, key=written.__getitem__)
        for cut in range(1, len(token))
        if (left := token[:cut]) in written and (right := token[cut:]) in written
    ]
    model = models.BPE(written | special_tokens, merges, ignore_merges=True)
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(known.regex), "isolated")
    letters_of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters_of_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special_tokens])
    return tokenizer.to_str().encode()
