"""The parts of tokenizers for which tests found that both engines give the same ids.

A tokenizer.json is parsed into the types below. They allow the keys and values for which tests
found the same ids with the fast engine and the reference, in thousands of generated texts for each
row of the table `PROVED`. Any other key or value raises `Unproved`. Decoder and post-processor may
have any value, because they do not change ids.

Vocabulary and merges are checked too. The fast engine identifies tokens by bytes and the reference
by strings, so two strings must not stand for the same bytes. If several merges make the same token,
their order does not matter: earlier merges leave only one pair for its text. The checks compare
hundreds of thousands of strings, so they use set operations.
"""

import functools
import itertools
import json
import re
from typing import Any, Literal, NamedTuple
from unicodedata import is_normalized

import msgspec

TokenizerKind = Literal["byte-level", "SentencePiece"]

COMPARED_TOKENIZERS = ("0.21.", "0.22.", "0.23.")
"""Versions of `tokenizers` whose ids were compared."""

_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
_BYTE_LIKE = re.compile("<0x..>", re.DOTALL)
_BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}


class Unproved(Exception):
    """A tokenizer has a property for which no test compared the engines."""


def byte_letters() -> dict[int, str]:
    """Return the letter that represents each byte in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def check_vocabulary(
    kind: TokenizerKind, vocab: bytes, merges: bytes, *, findable: set[str] | None
) -> None:
    """Check a vocabulary and its merges, as JSON.

    Args:
        kind: How tokens are written.
        vocab: An object from token to id.
        merges: A list of pairs, or of strings with a space between the two parts.
        findable: The added tokens, if the model ignores merges for words in the vocabulary. None if
            it merges every word.

    Raises:
        Unproved: The message names the unusual property.
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
    if not known.issuperset(itertools.chain.from_iterable(itertools.chain.from_iterable(pairs))):
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
"""The character that SentencePiece writes for a space."""
_LONGEST_TOKEN = 256
"""Characters of an added token. Longer tokens may exceed the memory of a regular expression."""


Step = str
"""A step of a normalizer or a pre-tokenizer: its JSON with sorted keys."""


def step_of(part: Any) -> Step:
    """Return a part of a tokenizer.json as a step, without options that only change offsets."""
    if isinstance(part, dict) and part.get("type") == "ByteLevel":
        part = {"use_regex": True, **part, "trim_offsets": True}  # old files lack `use_regex`
    return json.dumps(part, sort_keys=True, ensure_ascii=False)


def _steps(part: Any, name: str) -> tuple[Step, ...]:
    """Return the steps of a normalizer or a pre-tokenizer, with nested sequences flattened.

    Args:
        part: The part of the tokenizer.json.
        name: The key of the steps of a sequence.
    """
    if isinstance(part, dict) and part.keys() == {"type", name} and part["type"] == "Sequence":
        return tuple(step for inner in part[name] for step in _steps(inner, name))
    return (step_of(part),)


class AddedToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token that is searched for in the text, before the model splits it."""

    id: int
    content: str
    special: bool
    normalized: bool
    single_word: bool
    lstrip: bool
    rstrip: bool


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Byte-pair encoding. Old files lack the type, newer options, and values that are null."""

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


class _TokenizerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tokenizer.json."""

    model: Model
    version: Literal["1.0"] | None = None
    truncation: Any = None
    padding: Any = None
    added_tokens: tuple[AddedToken, ...] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: Any = None
    decoder: Any = None


GPT_2 = step_of({"type": "ByteLevel", "add_prefix_space": False})
_GPT_2_PREFIXED = step_of({"type": "ByteLevel", "add_prefix_space": True})
_BYTES = step_of({"type": "ByteLevel", "add_prefix_space": False, "use_regex": False})
_DIGITS = step_of({"type": "Digits", "individual_digits": True})

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
"""The regexes of `Split` steps before a ByteLevel without a regex. All but DeepSeek's match every
character, so an inverted Removed splits like Isolated."""


def _split(pattern: dict[str, str], behavior: str, *, invert: bool = False) -> Step:
    return step_of({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert})


def split_steps(regexes: tuple[str, ...], behavior: str, *, invert: bool) -> tuple[Step, ...]:
    """Return steps that split by each regex, then the ByteLevel step."""
    return (*(_split({"Regex": regex}, behavior, invert=invert) for regex in regexes), _BYTES)


_OPEN_AI = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    rf"|\s*[\r\n]|{_SPACE}"
)
GPT_4, NANOCHAT = _OPEN_AI % 3, _OPEN_AI % 2
"""Regexes that differ from Llama 3's only in spelling and in the length of numbers."""


NFC = step_of({"type": "NFC"})
PREPEND = step_of({"type": "Prepend", "prepend": _MARK})
SPACES = step_of({"type": "Replace", "pattern": {"String": " "}, "content": _MARK})
_AT_SPACES = (_split({"String": " "}, "MergedWithPrevious"),)
_METASPACE = {"type": "Metaspace", "replacement": _MARK}


class Proved(NamedTuple):
    """What tests compared for a pre-tokenizer, and how the fast engine cuts texts like it."""

    kind: TokenizerKind
    normalizers: tuple[tuple[Step, ...], ...]
    """The normalizers that may stand before it."""
    engine: tuple[Step, ...]
    """Steps for the fast engine. They may differ from the tokenizer's if the ids are equal."""
    digits: Literal[0, 1, 2] = 0
    """Digits per piece, if texts are cut at numbers before they are encoded; 0: no cuts."""


def _table() -> dict[tuple[Step, ...], Proved]:
    """Return what is proved, by the steps of the pre-tokenizer.

    Llama 3's regex ends with `\\s*[\\r\\n]+`. Without this `+`, it cuts at the same places:
    `\\s*` is greedy, so both spellings match up to the last line break of a run of white space.
    """
    table: dict[tuple[Step, ...], Proved] = {}

    def pieces(steps: tuple[Step, ...], *normalizers: tuple[Step, ...]) -> None:
        table[steps] = Proved("SentencePiece", normalizers, steps)

    def of_bytes(
        steps: tuple[Step, ...], engine: tuple[Step, ...], digits: Literal[0, 1, 2] = 0
    ) -> None:
        table[steps] = Proved("byte-level", ((), (NFC,)), engine, digits)

    pieces((), (SPACES,), (PREPEND, SPACES))
    pieces(_AT_SPACES, (SPACES,))
    for scheme, split in itertools.product(("always", "first", "never"), (False, True)):
        pieces((step_of(_METASPACE | {"prepend_scheme": scheme, "split": split}),), ())

    for step in (GPT_2, _GPT_2_PREFIXED):
        of_bytes((step,), (step,))
    of_bytes((_DIGITS, GPT_2), (GPT_2,), 1)
    (llama_3,) = REGEXES["Llama 3, OLMo 2"]
    for behavior, invert in (("Isolated", False), ("Removed", True)):
        split_by = functools.partial(split_steps, behavior=behavior, invert=invert)
        for name, regexes in REGEXES.items():
            if not (invert and name == "DeepSeek V3"):
                of_bytes(split_by(regexes), split_by(regexes))
        of_bytes(
            split_by((llama_3.replace(r"[\r\n]+|\s+(", r"[\r\n]|\s+("),)), split_by((llama_3,))
        )
        of_bytes(split_by((GPT_4,)), split_by((llama_3,)))
        of_bytes(split_by((NANOCHAT,)), split_by((llama_3,)), 2)
    return table


PROVED = _table()
"""The table of proofs. Sequences are flattened. Options that only change offsets do not matter."""


class Shape(msgspec.Struct, frozen=True):
    """The parts of a tokenizer for which tests compared the engines."""

    kind: TokenizerKind
    model: Model
    added_tokens: tuple[AddedToken, ...]
    normalizer: tuple[Step, ...]
    pre_tokenizer: tuple[Step, ...]

    @classmethod
    def from_json(cls, json_bytes: bytes) -> "Shape":
        """Return the shape of a tokenizer.json. `check_vocabulary` checks its vocabulary.

        Raises:
            Unproved: A part is not in the table. The message names the part.
        """
        try:
            file = msgspec.json.decode(json_bytes, type=_TokenizerFile)
        except msgspec.DecodeError as error:  # of which ValidationError is a kind
            raise Unproved(f"tokenizer.json: {error}") from None
        kind: TokenizerKind = "SentencePiece" if file.model.byte_fallback else "byte-level"
        shape = cls(
            kind,
            file.model,
            file.added_tokens or (),
            _steps(file.normalizer, "normalizers") if file.normalizer else (),
            _steps(file.pre_tokenizer, "pretokenizers") if file.pre_tokenizer else (),
        )
        shape._check()
        return shape

    @property
    def proved(self) -> Proved:
        """The row of the table."""
        return PROVED[self.pre_tokenizer]

    def _check(self) -> None:
        contents = [token.content for token in self.added_tokens]
        proved, of_kind = PROVED.get(self.pre_tokenizer), f"of a {self.kind} tokenizer"
        if proved is None or proved.kind != self.kind:
            raise Unproved(f"the pre-tokenizer {_words(self.pre_tokenizer)} {of_kind}")
        if self.normalizer not in proved.normalizers:
            raise Unproved(
                f"the normalizer {_words(self.normalizer)} before the pre-tokenizer "
                f"{_words(self.pre_tokenizer)} {of_kind}"
            )
        if self.kind == "SentencePiece" and self.model.ignore_merges:
            raise Unproved("`ignore_merges` of a SentencePiece tokenizer")
        if "" in contents or len(set(contents)) < len(contents):
            raise Unproved("added tokens that are empty, or there twice")
        if any(len(text) > _LONGEST_TOKEN for text in contents):
            raise Unproved(f"an added token of more than {_LONGEST_TOKEN} characters")
        if NFC in self.normalizer and not all(
            is_normalized("NFC", token.content) for token in self.added_tokens
        ):
            raise Unproved("an added token that the normalizer would change")
        if self.pre_tokenizer == (_GPT_2_PREFIXED,) and any(text[0] == " " for text in contents):
            raise Unproved("`add_prefix_space` beside an added token that begins with a space")


def _words(steps: tuple[Step, ...]) -> str:
    """Return steps as one line."""
    return " then ".join(step[:120] for step in steps) or "(none)"
