"""Which tokenizers the fast engine is trusted with, part by part.

A tokenizer.json is parsed into the types below, which name every key and every value that was
proved: the fast engine and the reference gave the same ids for thousands of generated texts of each
shape in the table. Any other key or value makes the file `Unproved`. Decoder and post-processor do
not matter: ids are made before them.

Vocabulary and merges are checked too. The fast engine knows tokens by their bytes, the reference by
their strings, so two strings must not stand for the same bytes. If several merges make one token,
their order does not matter: the earlier merges leave only one pair of its text. The checks compare
100,000s of strings, so they are set operations.
"""

import re
from itertools import chain
from typing import Any, Literal, NamedTuple
from unicodedata import is_normalized

import msgspec

__all__ = [
    "ID_LIMIT",
    "AddedToken",
    "Model",
    "Shape",
    "TokenizerKind",
    "Unproved",
    "byte_letters",
    "check_vocabulary",
]

TokenizerKind = Literal["byte-level", "SentencePiece"]

ID_LIMIT = 10_000_000
"""Ids are below; engines hold tables as long as the largest id."""

_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
_BYTE_LIKE = re.compile("<0x..>", re.DOTALL)
_BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}


class Unproved(Exception):
    """Something about a tokenizer for which no test has shown that the fast engine is right."""


def byte_letters() -> dict[int, str]:
    """The letter that each byte is written as in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def check_vocabulary(
    kind: TokenizerKind, vocab: bytes, merges: bytes, *, findable: set[str] | None
) -> None:
    """Look at a vocabulary and its merges, as JSON.

    Args:
        kind: How its tokens are written.
        vocab: An object of tokens and their ids.
        merges: A list of pairs, or of strings with a space between the two.
        findable: Tokens that are looked for in the text itself; None where that is all the same,
            for a word is merged even if it is a token as a whole.

    Raises:
        Unproved: The message says what is unusual about it.
    """
    ids, pairs = _ids(vocab), _pairs(merges)
    if kind == "byte-level":
        _check_byte_level(ids, pairs, findable)
    else:
        _check_sentence_piece(ids, pairs)


def _ids(vocab: bytes) -> dict[str, int]:
    ids: dict[str, int] = _decoded(vocab, dict[str, int])
    if len(set(ids.values())) < len(ids):
        raise Unproved("two tokens of the vocabulary have the same id")
    return ids


def _pairs(merges: bytes) -> list[tuple[str, str]]:
    listed = _decoded(merges, list[tuple[str, str] | str])
    if listed and isinstance(listed[0], str):
        listed = [tuple(merge.split(" ")) for merge in listed if isinstance(merge, str)]
    pairs: list[Any] = listed
    if len(set(pairs)) < len(pairs):
        raise Unproved("two merges are the same")
    return pairs


def _decoded(raw: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise Unproved(f"the vocabulary or the merges: {error}") from None


def _check_byte_level(
    ids: dict[str, int], pairs: list[tuple[str, str]], findable: set[str] | None
) -> None:
    letters = byte_letters()
    known = set(letters.values())
    if missing := [b for b in letters if letters[b] not in ids and b not in _NEVER_IN_UTF8]:
        raise Unproved(f"a vocabulary without the byte 0x{missing[0]:02X}")
    if not known.issuperset(chain.from_iterable(chain.from_iterable(pairs))):
        raise Unproved("merges of tokens that are not written in bytes")
    for token in ids:
        if known.issuperset(token):
            continue
        written = "".join(letters[byte] for byte in token.encode())
        is_reachable = findable is not None and token not in findable
        if written in ids or len(written) == 1 or is_reachable:
            raise Unproved(f"the token {token!r}, which is not written in bytes")


def _check_sentence_piece(ids: dict[str, int], pairs: list[tuple[str, str]]) -> None:
    for token in filter(_BYTE_LIKE.fullmatch, ids):
        if token not in _BYTE_TOKENS:
            raise Unproved(f"the token {token!r}, which is almost one of a byte")
    for token, byte in _BYTE_TOKENS.items():
        is_covered = byte in _NEVER_IN_UTF8 or (byte < 0x80 and chr(byte) in ids)
        if token not in ids and not is_covered:
            raise Unproved(f"a vocabulary without {token}")
    if any(left in _BYTE_TOKENS or right in _BYTE_TOKENS for left, right in pairs):
        raise Unproved("merges of byte tokens")
    cuts = ((token[:place], token[place:]) for token in _BYTE_TOKENS for place in range(1, 6))
    if not set(cuts).isdisjoint(pairs):
        raise Unproved("merges that make byte tokens")


_MARK = "\u2581"
"""What SentencePiece writes for a space."""
_LONGEST_TOKEN = 256
"""Longer ones may be more than a regular expression has room for."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A part of a tokenizer.json that says its type."""


class Pattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step looks for."""

    String: str | None = None
    Regex: str | None = None


class NFC(_Part, frozen=True, tag="NFC"):
    """Composes characters with their marks."""


class Prepend(_Part, frozen=True, tag="Prepend"):
    """Puts a string in front."""

    prepend: str


class Replace(_Part, frozen=True, tag="Replace"):
    """Replaces a pattern."""

    pattern: Pattern
    content: str


class Normalizers(_Part, frozen=True, tag="Sequence"):
    """Steps one after the other."""

    normalizers: "tuple[Normalizer, ...]"


Normalizer = NFC | Prepend | Replace | Normalizers


class ByteLevel(_Part, frozen=True, tag="ByteLevel"):
    """Bytes as letters."""

    add_prefix_space: bool
    trim_offsets: bool = True
    use_regex: bool = True


class Split(_Part, frozen=True, tag="Split"):
    """Splits at a pattern."""

    pattern: Pattern
    behavior: Literal["Isolated", "Removed", "MergedWithPrevious"]
    invert: bool


class Metaspace(_Part, frozen=True, tag="Metaspace"):
    """SentencePiece's spaces."""

    replacement: Literal["\u2581"]
    prepend_scheme: Literal["always", "first", "never"]
    split: bool


class PreTokenizers(_Part, frozen=True, tag="Sequence"):
    """Steps one after the other."""

    pretokenizers: "tuple[PreTokenizer, ...]"


class Digits(_Part, frozen=True, tag="Digits"):
    """Isolates digits."""

    individual_digits: Literal[True]


PreTokenizer = ByteLevel | Split | Metaspace | Digits | PreTokenizers


class AddedToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token that is looked for in the text itself."""

    id: int
    content: str
    special: bool
    normalized: bool
    single_word: bool
    lstrip: bool
    rstrip: bool


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Byte-pair encoding; files of old leave out its type, newer options and what is null."""

    vocab: msgspec.Raw
    merges: msgspec.Raw
    type: Literal["BPE"] = "BPE"
    dropout: None = None
    unk_token: str | None = None
    continuing_subword_prefix: Literal["", None] = None
    end_of_word_suffix: Literal["", None] = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tokenizer.json."""

    model: Model
    version: Literal["1.0"] | None = None
    truncation: Any = None
    padding: Any = None
    added_tokens: tuple[AddedToken, ...] | None = None
    normalizer: Normalizer | None = None
    pre_tokenizer: PreTokenizer | None = None
    post_processor: Any = None
    decoder: Any = None


GPT_2 = ByteLevel(add_prefix_space=False)
_GPT_2_PREFIXED = ByteLevel(add_prefix_space=True)
_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)

_APART = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_CASED_END = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACE}"
_WORD, _SIGNS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"

REGEXES: dict[str, tuple[str, ...]] = {
    "GPT-2": (rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACE}",),
    "Llama 3, OLMo 2": (rf"{_APART}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_SPACE}",),
    "Qwen 2 and 3": (rf"{_APART}|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]+|{_SPACE}",),
    "Qwen 3.5": (
        rf"{_APART}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACE}",
    ),
    "GPT-4o, gpt-oss": (rf"{_CASED[0]}{_APART}?|{_CASED[1]}{_APART}?|\p{{N}}{{1,3}}|{_CASED_END}",),
    "Nemotron": (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_END}",),
    "DeepSeek V3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+"
        f"|{_SPACE}",
    ),
}
"""The regexes of `Split` steps before a ByteLevel that has none of its own; they leave no gaps, so
that Removed and inverted splits where Isolated does. DeepSeek's do leave gaps."""


def split_steps(
    regexes: tuple[str, ...], behavior: Any, *, invert: bool
) -> tuple[PreTokenizer, ...]:
    return (*(Split(Pattern(Regex=regex), behavior, invert) for regex in regexes), _BYTES)


_OPEN_AI = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    rf"|\s*[\r\n]|{_SPACE}"
)
GPT_4, NANOCHAT = _OPEN_AI % 3, _OPEN_AI % 2
"""Differ from Llama 3's regex in spelling only, and in the length of numbers."""


class Substitute(NamedTuple):
    """How the fast engine, which lacks a pre-tokenizer, gives the ids of this pre-tokenizer."""

    pre_tokenizer: tuple[PreTokenizer, ...]
    """A pre-tokenizer that the fast engine has."""
    digits: Literal[0, 1, 2] = 0
    """The length of the numbers that are cut out of a text before it is encoded; 0: no cuts."""


def _substitutes() -> dict[tuple[PreTokenizer, ...], Substitute]:
    """Return the pre-tokenizers that the fast engine lacks.

    Llama 3's regex ends with `\\s*[\\r\\n]+`. Without this `+`, it cuts at the same places: `\\s*`
    is greedy, so both spellings match up to the last line break of a run of white space.
    """
    found: dict[tuple[PreTokenizer, ...], Substitute] = {}
    found[Digits(True), GPT_2] = Substitute((GPT_2,), 1)
    (llama_3,) = REGEXES["Llama 3, OLMo 2"]
    spellings: dict[str, Literal[0, 2]] = {
        llama_3.replace(r"[\r\n]+|\s+(", r"[\r\n]|\s+("): 0,
        GPT_4: 0,
        NANOCHAT: 2,
    }
    for regex, digits in spellings.items():
        for behavior, invert in (("Isolated", False), ("Removed", True)):
            ours, known = (split_steps((r,), behavior, invert=invert) for r in (regex, llama_3))
            found[ours] = Substitute(known, digits)
    return found


SUBSTITUTES = _substitutes()

SPACES = Replace(Pattern(String=" "), _MARK)
NORMALIZERS: dict[TokenizerKind, set[tuple[Normalizer, ...]]] = {
    "byte-level": {(), (NFC(),)},
    "SentencePiece": {(), (SPACES,), (Prepend(_MARK), SPACES)},
}
PRE_TOKENIZERS: dict[TokenizerKind, set[tuple[PreTokenizer, ...]]] = {
    "byte-level": {
        (GPT_2,),
        (_GPT_2_PREFIXED,),
        *(split_steps(regexes, "Isolated", invert=False) for regexes in REGEXES.values()),
        *(
            split_steps(regexes, "Removed", invert=True)
            for name, regexes in REGEXES.items()
            if name != "DeepSeek V3"
        ),
        *SUBSTITUTES,
    },
    "SentencePiece": {
        (),
        (Split(Pattern(String=" "), "MergedWithPrevious", False),),
        *(
            (Metaspace("\u2581", scheme, split),)
            for scheme in ("always", "first", "never")
            for split in (False, True)
        ),
    },
}
"""The table of shapes: any normalizer of a kind with any pre-tokenizer of that kind, but what
`_check_together` refuses. Sequences are flattened; offsets have no influence on ids."""


class Shape(msgspec.Struct, frozen=True):
    """A tokenizer of a shape that was proved."""

    kind: TokenizerKind
    model: Model
    added_tokens: tuple[AddedToken, ...]
    normalizer: tuple[Normalizer, ...]
    pre_tokenizer: tuple[PreTokenizer, ...]

    @classmethod
    def from_json(cls, json_bytes: bytes) -> "Shape":
        """Find the shape of a tokenizer.json; its vocabulary is looked at by `check_vocabulary`.

        Raises:
            Unproved: It has none of them; the message names what it has instead.
        """
        try:
            file = msgspec.json.decode(json_bytes, type=_File)
        except msgspec.DecodeError as error:  # of which ValidationError is a kind
            raise Unproved(f"tokenizer.json: {error}") from None
        kind: TokenizerKind = "SentencePiece" if file.model.byte_fallback else "byte-level"
        shape = cls(
            kind,
            file.model,
            file.added_tokens or (),
            _normalizers(file.normalizer),
            _pre_tokenizers(file.pre_tokenizer),
        )
        shape._check()
        return shape

    @property
    def substitute(self) -> Substitute:
        """What the fast engine is given for `pre_tokenizer`."""
        return SUBSTITUTES.get(self.pre_tokenizer, Substitute(self.pre_tokenizer))

    def _check(self) -> None:
        if self.normalizer not in NORMALIZERS[self.kind]:
            raise Unproved(f"the normalizer {_words(self.normalizer)} of a {self.kind} tokenizer")
        if self.pre_tokenizer not in PRE_TOKENIZERS[self.kind]:
            raise Unproved(
                f"the pre-tokenizer {_words(self.pre_tokenizer)} of a {self.kind} tokenizer"
            )
        self._check_together()

    def _check_together(self) -> None:
        """Refuse parts that are each in the table, but not with each other."""
        model, contents = self.model, [token.content for token in self.added_tokens]
        if self.kind == "SentencePiece" and model.ignore_merges:
            raise Unproved("`ignore_merges` of a SentencePiece tokenizer")
        if self.kind == "SentencePiece" and (
            any(isinstance(step, Split) for step in self.pre_tokenizer)
            and self.normalizer != (SPACES,)
        ):
            raise Unproved("a Split at spaces which no normalizer has replaced")
        if self.normalizer and any(isinstance(step, Metaspace) for step in self.pre_tokenizer):
            raise Unproved("Metaspace after a normalizer")
        if self.kind == "SentencePiece" and not (self.normalizer or self.pre_tokenizer):
            raise Unproved("a SentencePiece tokenizer that does nothing about spaces")
        if "" in contents or len(set(contents)) < len(contents):
            raise Unproved("added tokens that are empty, or there twice")
        if any(len(text) > _LONGEST_TOKEN for text in contents):
            raise Unproved(f"an added token of more than {_LONGEST_TOKEN} characters")
        if NFC() in self.normalizer and not all(
            is_normalized("NFC", token.content) for token in self.added_tokens
        ):
            raise Unproved("an added token that the normalizer would change")
        if self.pre_tokenizer == (_GPT_2_PREFIXED,) and any(text[0] == " " for text in contents):
            raise Unproved("`add_prefix_space` beside an added token that begins with a space")


def _normalizers(part: Normalizer | None) -> tuple[Normalizer, ...]:
    """The steps of a sequence, those of sequences in it too."""
    if isinstance(part, Normalizers):
        return tuple(step for inner in part.normalizers for step in _normalizers(inner))
    return () if part is None else (part,)


def _pre_tokenizers(part: PreTokenizer | None) -> tuple[PreTokenizer, ...]:
    """The steps of a sequence; what concerns offsets alone is as in the table."""
    if isinstance(part, PreTokenizers):
        return tuple(step for inner in part.pretokenizers for step in _pre_tokenizers(inner))
    if isinstance(part, ByteLevel):
        return (ByteLevel(part.add_prefix_space, use_regex=part.use_regex),)
    return () if part is None else (part,)


def _words(steps: tuple[Normalizer, ...] | tuple[PreTokenizer, ...]) -> str:
    """Steps in one line, as a user finds them in the file."""
    return " then ".join(msgspec.json.encode(step).decode()[:120] for step in steps) or "(none)"
