"""tiktoken files get the ids of a plain encoder: `regex` splits, the lowest rank joins first."""

import base64
import itertools
import random
from pathlib import Path

import pytest
import regex
from support.tokenizer_shapes import SENTENCES, made_texts, trained_model

from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.tools.encoding.engine_support import byte_letters
from tokenfeed.tools.encoding.engines import FastEngine, ReferenceEngine
from tokenfeed.tools.encoding.tiktoken_files import KNOWN, KnownFile, tiktoken_to_json
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, fetch_tokenizer_json

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_APART = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = {
    "r50k_base": _GPT_2,
    "p50k_base": _GPT_2,
    "cl100k_base": _WORDS + _ENDS,
    "Llama 3": _WORDS + _ENDS,
    "o200k_base": rf"{_CASED}{_UPPER}*{_LOWER}+{_APART}|{_CASED}{_UPPER}+{_LOWER}*{_APART}|"
    rf"\p{{N}}{{1,3}}{_ENDS.replace('[', '[/', 2).replace('[/^', '[^')}",
}


def small_ranks() -> dict[bytes, int]:
    """Bytes, trained merges, and slices of words, of which merges make some in no way."""
    letters = {letter: byte for byte, letter in byte_letters().items()}
    trained = [bytes(letters[c] for c in token) for token in trained_model("byte-level")["vocab"]]
    draw = random.Random(0)
    words = [word for line in SENTENCES for word in line.encode().split(b" ") if len(word) > 2]
    slices = []
    for _ in range(400):
        word = draw.choice(words)
        start = draw.randrange(len(word) - 1)
        slices.append(word[start : draw.randint(start + 2, len(word))])
    longer = [token for token in dict.fromkeys(trained + slices) if len(token) > 1]
    draw.shuffle(longer)
    singles = [bytes([byte]) for byte in range(256)]
    return {token: rank for rank, token in enumerate(singles + longer)}


def file_of(ranks: dict[bytes, int]) -> bytes:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    return "".join(lines).encode()


def ids_of(text: str, pattern: "regex.Pattern[str]", ranks: dict[bytes, int]) -> list[int]:
    found = []
    for word in map(str.encode, pattern.findall(text)):
        parts = [word] if word in ranks else [bytes([byte]) for byte in word]
        while True:
            pairs = [(ranks.get(parts[n] + parts[n + 1]), n) for n in range(len(parts) - 1)]
            best = min((pair for pair in pairs if pair[0] is not None), default=None)
            if best is None:
                break
            parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
        found += [ranks[part] for part in parts]
    return found


@pytest.mark.parametrize("known", KNOWN.values(), ids=lambda known: known.name)
def test_ids_equal_those_of_plain_encoder(known: KnownFile) -> None:
    ranks, pattern = small_ranks(), regex.compile(SPLITS[known.name])
    texts = made_texts(random.Random(1), [*known.special_tokens][:3], 400)
    expected = [ids_of(text.decode(), pattern, ranks) for text in texts]
    json_bytes = tiktoken_to_json(file_of(ranks), "small", {len(ranks): known})
    tokenizer = TextTokenizer.load(json_bytes, origin="small")
    for engine in (ReferenceEngine(tokenizer), FastEngine.from_tokenizer(tokenizer)):
        assert [ids.tolist() for ids in engine.encode(texts).rows()] == expected
    assert {tokenizer.tokenizer.token_to_id(t) for t in known.special_tokens} == {
        *known.special_tokens.values()
    }


def test_known_file_is_read_by_its_number_of_tokens(tmp_path: Path) -> None:
    ranks = small_ranks()
    ranks |= {b"\xff%d" % rank: rank for rank in range(len(ranks), 50_256)}  # in no UTF-8
    file = tmp_path / "tokenizer.model"
    file.write_bytes(file_of(ranks))
    made = TextTokenizer.load(fetch_tokenizer_json(str(file)), origin=file)
    assert (made.vocabulary_size, made.end_token, made.end_id) == (50_257, "<|endoftext|>", 50_256)


def test_unknown_or_damaged_tiktoken_file_is_one_error(tmp_path: Path) -> None:
    ranks = small_ranks()
    whole = file_of(ranks)
    file = tmp_path / "my.tiktoken"
    known = {len(ranks): KNOWN[50_256], len(ranks) - 1: KNOWN[50_256]}
    for content, reason in (
        (whole, rf"a tiktoken file of {len(ranks):,} tokens\..* Give the tokenizer\.json"),
        *(
            (whole + line, r"line \d+ is .*, expected another token in base64 and its rank")
            for line in (b"YQ==", b"//8= -1", b"//8= 99999999999", b"/ 5", b"//8= 1 2")
        ),
        *(
            (b"%s%s %d" % (whole, token, len(ranks)), r"line \d+ is .*, expected another token")
            for token in (b"YQ==", b"/!/8=", b"=")
        ),
    ):
        file.write_bytes(content)
        with pytest.raises(TokenizerError, match=f"^{file}: {reason}"):
            fetch_tokenizer_json(str(file))
    tiktoken_to_json(whole.replace(b"\n", b"\r\n") + b"\n", "my", known)
    del ranks[b"\0"]
    lacks_byte = {token: rank - 1 for token, rank in ranks.items()}
    *most, last = small_ranks()
    has_special_token = dict(zip((*most, b"<|endoftext|>"), itertools.count()))
    has_gap, has_rank_twice = small_ranks() | {last: 40_000}, small_ranks() | {last: 1}
    for damaged in (lacks_byte, has_special_token, has_gap, has_rank_twice):
        with pytest.raises(TokenizerError, match=r"^my: its ranks have gaps, or its tokens lack"):
            tiktoken_to_json(file_of(damaged), "my", known)
