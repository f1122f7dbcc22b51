"""Fetch and check a tokenizer.json, and find its special ids.

The bytes of the file stay unchanged, because their checksum identifies the tokenizer of a data set.
Truncation, padding and BPE dropout are switched off, so no text is cut silently, and the same text
always has the same ids. By default, special tokens in a document are plain text, so no document can
contain an end token.
"""

import contextlib
import json
import logging
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of
from tokenfeed.pipeline.errors import ConfigError, TokenizerError
from tokenfeed.pipeline.format.data_set import decode_tokenizer
from tokenfeed.pipeline.format.manifest import (
    CHAT_TEMPLATE_FILE,
    CHECKSUM_KEY,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Manifest,
    read_checked,
)
from tokenfeed.pipeline.format.store import LocalStore, Store, local_path, open_store
from tokenfeed.pipeline.remote.address import object_address
from tokenfeed.tools.corpus.blocks import LFS_POINTER

_END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
)
"""Usual names of the token that ends a document. [SEP] is not one: it joins the parts of a pair.
Only special tokens count: `</s>` of Gemma is a tag of HTML."""
_PAD_TOKENS = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|padding|>",
    "<|finetune_right_pad_id|>",
    "<\uff5c\u2581pad\u2581\uff5c>",
)
ID_LIMIT = 10_000_000
"""Ids must be smaller. Engines allocate tables as long as the largest id."""
_TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
"""The template of transformers for conversations with tools, beside a tokenizer."""
_ENDINGS = (".json", ".tiktoken", "tokenizer.model")
"""Endings of the addresses of tokenizers. Any other address is the address of a folder."""


class _Content(msgspec.Struct):
    """A token as `AddedToken` of transformers stores it."""

    content: str


class _NamedTemplate(msgspec.Struct):
    """A chat template, if a tokenizer has several."""

    name: str
    template: str


_Token = _Content | str | bool | int | float | list[Any] | None
"""A value of a key that ends with `_token`. Keys such as `add_bos_token` have no token."""
_Templates = str | list[_NamedTemplate] | dict[str, str] | None
_Ids = int | list[int] | None
_ADDING = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
"""Keys with tokens that transformers adds to the vocabulary if it lacks them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """The facts about a model in the files beside its tokenizer.json."""

    tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens by name, such as `eos_token`."""
    added: tuple[str, ...] = ()
    """Tokens that transformers would add to the vocabulary if it lacks them."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Chat templates by name: `default`, and `tool_use` for conversations with tools."""
    end_ids: tuple[int, ...] = ()
    """The ids that end what the model generates."""
    switches: dict[str, bool] = field(default_factory=dict)
    """Values of tokenizer_config.json that are true or false, such as `add_prefix_space`."""

    @classmethod
    def read(cls, name: str) -> "ModelFiles":
        """Read the files from the place of a tokenizer. Missing files are left out.

        Raises:
            TokenizerError: A file is not valid.
        """
        tokens: dict[str, Any] = {}
        config: dict[str, Any] = {}
        added: list[str] = []
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            with _valid(name, file):
                config = msgspec.convert(_json_beside(name, file), dict[str, Any])
                named = {key: value for key, value in config.items() if key.endswith("_token")}
                found = msgspec.convert(named, dict[str, _Token])
                # as in transformers: the map is of its older versions
                tokens = found if "added_tokens_decoder" in config else found | tokens
                added += (text for key in _ADDING for text in _token_texts(config.get(key)))
        with _valid(name, file):
            given = msgspec.convert(config.get("chat_template"), _Templates)
        listed = given if isinstance(given, list) else []
        templates = given if isinstance(given, dict) else {e.name: e.template for e in listed}
        templates |= {"default": given} if isinstance(given, str) else {}
        files = {"default": CHAT_TEMPLATE_FILE, "tool_use": _TOOL_TEMPLATE_FILE}
        for template, file in files.items():
            with _valid(name, file):
                if content := fetch_beside(name, file):
                    templates[template] = content.decode()
        with _valid(name, "generation_config.json"):
            generation = _json_beside(name, "generation_config.json")
            ids = msgspec.convert(
                msgspec.convert(generation, dict[str, Any]).get("eos_token_id"), _Ids
            )
        texts = {k: v.content if isinstance(v, _Content) else v for k, v in tokens.items()}
        return cls(
            tokens={k: v for k, v in texts.items() if v and isinstance(v, str)},
            added=tuple(added),
            chat_templates=templates,
            end_ids=tuple([ids] if isinstance(ids, int) else ids or ()),
            switches={key: each for key, each in config.items() if isinstance(each, bool)},
        )


def _token_texts(given: Any) -> list[str]:
    """Return the texts of tokens in a list or a dict."""
    listed = [*given.values()] if isinstance(given, dict) else given
    texts = [
        each.get("content") if isinstance(each, dict) else each
        for each in (listed if isinstance(listed, list) else ())
    ]
    return [text for text in texts if text and isinstance(text, str)]


@contextlib.contextmanager
def _valid(name: str, file: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"{name}: {file} is not valid ({reason}). Restore it.") from None


def _json_beside(name: str, file: str) -> Any:
    content = fetch_beside(name, file)
    value = json.loads(b"{}" if content is None else content)
    msgspec.json.encode(value)  # raises an error for a lone surrogate
    return value


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer.json, and the facts about it that a data set stores."""

    json_bytes: bytes = field(repr=False)
    tokenizer: Tokenizer
    vocabulary_size: int
    """The largest id + 1. Some ids may be unused."""
    end_token: str | None
    pad_id: int
    splits_special: bool = False
    """Whether special tokens in a document become their ids. If not, they are plain text."""
    end_problem: str = ""
    """What users should know about `end_token`, unless they gave it; empty if nothing."""
    text_problems: tuple[str, ...] = ()
    """What users should know about the ids of texts."""

    @classmethod
    def load(
        cls,
        json_bytes: bytes,
        *,
        origin: object,
        end_token: str | None = None,
        splits_special: bool = False,
        files: ModelFiles | None = None,
    ) -> "TextTokenizer":
        """Load a tokenizer from the bytes of a tokenizer.json.

        Args:
            json_bytes: Content of the file.
            origin: Name of the file, for errors.
            end_token: The token that ends a document. None: the special token with a usual name,
                or the token that `files` name.
            splits_special: Whether special tokens in a document become their ids.
            files: Facts from the files beside it. None: no such files.

        Raises:
            TokenizerError: The file is not a tokenizer, or has no vocabulary.
            ConfigError: The vocabulary lacks `end_token`.
        """
        tokenizer = _parse(json_bytes, origin)
        tokenizer.encode_special_tokens = not splits_special
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None  # ids would be random
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError(f"{origin}: has an empty vocabulary. Give another tokenizer.")
        if end_token is not None and end_token not in vocabulary:
            raise ConfigError(f"`--end-token` {end_token!r} is not in the vocabulary of {origin}.")
        files, problem = files or ModelFiles(), ""
        if end_token is None:
            end_token, problem = _end_token(tokenizer, vocabulary, files)
        end_id = vocabulary[end_token] if end_token else 0
        special = _special_tokens(tokenizer)
        pads = [files.tokens.get("pad_token"), *(name for name in _PAD_TOKENS if name in special)]
        pad_id = next((vocabulary[name] for name in pads if name in vocabulary), end_id)
        size = max(vocabulary.values()) + 1
        if size > ID_LIMIT:
            raise TokenizerError(
                f"{origin}: has the id {size - 1:,}, but ids are below {ID_LIMIT:,}. Give another "
                "tokenizer."
            )
        problems = _text_problems(tokenizer, files)
        return cls(
            json_bytes, tokenizer, size, end_token, pad_id, splits_special, problem, problems
        )

    @property
    def end_id(self) -> int | None:
        """The id of `end_token`."""
        return self.tokenizer.token_to_id(self.end_token) if self.end_token else None

    @property
    def unknown_token(self) -> str:
        """The token in place of characters that the vocabulary lacks; empty if it has bytes."""
        model = self.tokenizer.model
        has_bytes = getattr(model, "byte_fallback", False)
        has_bytes = has_bytes or "ByteLevel(" in repr(self.tokenizer.pre_tokenizer)
        return "" if has_bytes else getattr(model, "unk_token", None) or "<unk>"

    def is_token(self, text: str) -> bool:
        """Return whether a text alone becomes the token of this name."""
        with contextlib.suppress(Exception):  # a model without an unknown token may raise
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            return ids == [self.tokenizer.token_to_id(text)]
        return False

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer adds special tokens around a text."""
        return self.tokenizer.num_special_tokens_to_add(is_pair=False) > 0

    @property
    def before_word(self) -> bytes:
        """The text before a single word that gives the word the same ids as inside a text.

        The property compares the ids of "a a": for GPT-2 and Gemma, the second word has the ids of
        " a", and for BERT and Llama 2, the ids of "a".
        """
        with contextlib.suppress(Exception):  # a model without an unknown token may raise
            alone, spaced, both = (
                self.tokenizer.encode(text, add_special_tokens=False).ids
                for text in ("a", " a", "a a")
            )
            if both != 2 * alone and both == alone + spaced:
                return b" "
        return b""

    @property
    def xxh3(self) -> str:
        """xxh3-64 of tokenizer.json, 16 hex digits."""
        return xxhash.xxh3_64_hexdigest(self.json_bytes)


def _special_tokens(tokenizer: Tokenizer) -> set[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    return {token.content for token in added if token.special}


def _end_token(
    tokenizer: Tokenizer, vocabulary: dict[str, int], files: ModelFiles
) -> tuple[str | None, str]:
    """Return the token that ends a document, and what users should know about it.

    The end token of a chat model ends a message, and another one may end a document. So a special
    token with a usual name is preferred, and the model's own token among several of these.
    """
    special = _special_tokens(tokenizer)
    usual = [name for name in _END_TOKENS if name in special]
    ids = {tokenizer.id_to_token(each) for each in files.end_ids if 0 <= each < 1 << 32}
    own = [files.tokens.get("eos_token"), *sorted(each for each in ids if each)]
    own = [name for name in own if name in vocabulary]
    token = next((name for name in own if name in usual), None) or next(iter([*usual, *own]), None)
    if token is None:
        similar = [name for name in _END_TOKENS if name in vocabulary]
        named = f" ({similar[0]} is in the vocabulary, but not special)" if similar else ""
        return None, (
            f"the tokenizer has no end token{named}: documents follow one another without a "
            "separator. Name one by --end-token"
        )
    if own and token not in own:
        return token, (
            f"documents end with {token}, but the end token of the model is {own[0]}. If this is "
            f"wrong, give --end-token '{own[0]}'"
        )
    return token, ""


_RARE = "\ua66e"
"""A letter that few vocabularies have."""
_SWITCHES: dict[str, tuple[str, type, str]] = {
    "add_prefix_space": ("pre_tokenizer", pre_tokenizers.ByteLevel, "add_prefix_space"),
    "do_lower_case": ("normalizer", normalizers.BertNormalizer, "lowercase"),
    "strip_accents": ("normalizer", normalizers.BertNormalizer, "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", normalizers.BertNormalizer, "handle_chinese_chars"),
}
"""Settings of tokenizer_config.json that transformers puts in place of those of tokenizer.json: the
part of the tokenizer, its type, and its attribute."""


def _text_problems(tokenizer: Tokenizer, files: ModelFiles) -> tuple[str, ...]:
    """Return why texts may have other ids than users expect."""
    problems = []
    for name, (part, type_, attribute) in _SWITCHES.items():
        step, wanted = getattr(tokenizer, part), files.switches.get(name)
        if isinstance(step, type_) and wanted not in (None, getattr(step, attribute)):
            problems.append(
                f"tokenizer_config.json has `{name}` {str(wanted).lower()}, unlike tokenizer.json, "
                "which counts here: transformers gives other ids. To get these, save the "
                "tokenizer anew: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)"
            )
    if isinstance(tokenizer.model, models.BPE):
        with contextlib.suppress(Exception):  # a tokenizer that encodes nothing may raise
            if not tokenizer.encode(_RARE, add_special_tokens=False).ids:
                problems.append(
                    "the tokenizer leaves out characters that its vocabulary lacks, without a "
                    "token in their place: it has neither bytes nor an unknown token"
                )
    return tuple(problems)


_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/=]+ [0-9]+\r?\n")
_SLOW = {
    "tokenizer.model": "a SentencePiece model",
    "vocab.json": "the vocabulary of a slow tokenizer",
    "vocab.txt": "the vocabulary of a slow tokenizer",
}
_CONVERT = (
    "Convert it by transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)."
)


def fetch_beside(name: str, file: str) -> bytes | None:
    """Return another file from the place of a tokenizer; None if there is no such file."""
    store = None
    try:
        store, _ = _place(name)
        return store.read(file) if store else _fetch_from_hub(name, file).read_bytes()
    except (TokenizerError, OSError) as error:
        if isinstance(store, LocalStore) and isinstance(error, PermissionError):
            raise TokenizerError(
                f"{store.path(file)}: cannot be read: {error.strerror}. Make it readable."
            ) from None
    return None


def fetch_tokenizer_json(name: str) -> bytes:
    """Read a tokenizer.json. `name` is a file, a folder with the file, the address of either, or a
    hub id, which may end with `@` and a revision.

    Raises:
        TokenizerError: The tokenizer is missing, or the hub or store cannot be reached.
        ManifestError: A data set has the tokenizer, but not the one that its manifest names.
    """
    store, file = _place(name)
    if store is None and name.endswith(".json"):
        raise TokenizerError(
            f"{name}: not found. Give a tokenizer.json, the folder or address of one, or a hub id."
        )
    if store is None:
        content = _fetch_from_hub(name).read_bytes()
    else:
        try:
            content = store.read(file)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            reason = "not found" if is_missing else f"cannot be read: {error.strerror}"
            slow = (other for other in _SLOW if is_missing and fetch_beside(name, other))
            if other := next(slow, None):
                raise TokenizerError(
                    f"{store.path(file)}: not found, and {other} there is {_SLOW[other]}. "
                    f"{_CONVERT}"
                ) from None
            raise TokenizerError(
                f"{store.path(file)}: {reason}. Give a tokenizer.json, the folder or address of "
                "one, or a hub id."
            ) from None
        _check_in_data_set(store, file)
    return content


def _place(name: str) -> tuple[Store | None, str]:
    """Return the store of a tokenizer and the name of its file there; None for a hub id."""
    if "://" in name:
        folder, file = object_address(name)
        is_file = file.endswith(_ENDINGS)
        return (open_store(folder), file) if is_file else (open_store(name), TOKENIZER_FILE)
    path = local_path(name)
    if path.is_dir():
        return open_store(path), TOKENIZER_FILE
    return open_store(path.parent) if path.exists() else None, path.name


def _check_in_data_set(store: Store, name: str) -> None:
    """Check a tokenizer.json in a finished data set against the manifest there.

    Raises:
        ManifestError: The manifest is damaged, or the tokenizer is not the one it names.
    """
    try:
        content = json.loads(store.read(MANIFEST_FILE)) if name == TOKENIZER_FILE else None
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(content, dict) and CHECKSUM_KEY in content:  # else of another program
        read_checked(store, Manifest.read(store).tokenizer)


def _parse(json_bytes: bytes, origin: object) -> Tokenizer:
    try:
        tokenizer = decode_tokenizer(json_bytes)
    except ValueError as error:
        if b"\x00" in json_bytes[:4096] or json_bytes[:1] == b"\n":  # a message of protobuf
            raise TokenizerError(
                f"{origin}: is a SentencePiece model, not a tokenizer.json. {_CONVERT}"
            ) from None
        if json_bytes.startswith(LFS_POINTER):
            raise TokenizerError(
                f"{origin}: is a pointer of Git LFS, and the file itself is not here. Run `git lfs "
                "pull` in its repository."
            ) from None
        if _TIKTOKEN_LINE.match(json_bytes):
            raise TokenizerError(
                f"{origin}: is a tiktoken file, not a tokenizer.json. Convert it by transformers: "
                "from transformers.integrations.tiktoken import convert_tiktoken_to_fast; "
                "convert_tiktoken_to_fast(tiktoken.get_encoding(NAME), FOLDER)."
            ) from None
        raise TokenizerError(f"{origin}: is not a tokenizer.json ({error}).") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _fetch_from_hub(name: str, file: str = TOKENIZER_FILE) -> Path:
    """Download a file of a hub repository, or find it in the hub's local cache."""
    from huggingface_hub import hf_hub_download  # 0.1 s that only hub ids should cost

    # It would report each of its retries; the one line below says it once.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        identity, _, revision = name.partition("@")
        return Path(hf_hub_download(identity, file, revision=revision or None))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise TokenizerError(
            f"{name}: no such file or folder, and the Hub did not return it: {reason}"
        ) from None  # the cause may show the address of the endpoint


class TokenPlaces:
    """The first bytes of tokens, for one tokenizer."""

    def __init__(self, json_bytes: bytes) -> None:
        """Read the vocabulary of a tokenizer.json. The reference is loaded when it is needed."""
        self._json_bytes = json_bytes
        content = msgspec.json.decode(json_bytes)
        self._lengths = _byte_lengths(content) if _is_byte_level(content) else None
        added = content.get("added_tokens") or []
        self.added = {token["content"]: int(token["id"]) for token in added}
        """The ids of added tokens, such as special tokens."""
        self.unknown = _unknown(content["model"])
        """The token that stands for text outside the vocabulary; None without one."""
        self._normalizer: str | None = (content.get("normalizer") or {}).get("type")

    @cached_property
    def _reference(self) -> Tokenizer:
        loaded = TextTokenizer.load(self._json_bytes, origin="the tokenizer", splits_special=True)
        return loaded.tokenizer

    def starts(self, texts: list[bytes], ids: Ragged) -> tuple[np.ndarray, np.ndarray]:
        """Return where each token begins and ends, counted over all texts, shape (N,) each.

        Args:
            texts: R texts.
            ids: The ids of the texts, without special tokens around a text.
        """
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        text_offsets, rows = offsets_of(sizes), ids.offsets
        if self._lengths is None:
            starts, wrong = np.zeros(len(ids.values), np.int64), np.arange(len(texts))
        else:
            bounds = offsets_of(self._lengths[ids.values])
            starts = bounds[:-1] + np.repeat(text_offsets[:-1] - bounds[rows[:-1]], ids.lengths)
            is_wrong = bounds[rows[1:]] - bounds[rows[:-1]] != sizes
            is_wrong |= np.fromiter(map(self._is_changed, texts), np.bool_, len(texts))
            wrong = np.flatnonzero(is_wrong)
        for row, places in zip(wrong, self._by_reference(texts, ids, wrong), strict=True):
            starts[rows[row] : rows[row + 1]] = places + text_offsets[row]
        ends = np.append(starts[1:], 0)
        has_tokens = ids.lengths > 0
        ends[rows[1:][has_tokens] - 1] = text_offsets[1:][has_tokens]
        return starts, ends

    def _is_changed(self, text: bytes) -> bool:
        """Return whether the normalizer changes a text. The number of bytes may stay the same."""
        if self._normalizer is None:
            return False
        if self._normalizer in ("NFC", "NFD", "NFKC", "NFKD"):
            form: Any = self._normalizer
            return not (text.isascii() or unicodedata.is_normalized(form, text.decode()))
        decoded = text.decode()
        return bool(self._reference.normalizer.normalize_str(decoded) != decoded)

    def _by_reference(
        self, texts: list[bytes], ids: Ragged, chosen: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yield where the tokens of the chosen texts begin."""
        if not len(chosen):
            return
        decoded = [texts[row].decode() for row in chosen]
        encodings = self._reference.encode_batch(decoded, add_special_tokens=False)
        for row, text, encoding in zip(chosen, decoded, encodings, strict=True):
            assert len(encoding.ids) == ids.lengths[row], "the engines differ"
            yield byte_places(text, np.array([start for start, _ in encoding.offsets], np.int64))


def byte_places(text: str, characters: np.ndarray) -> np.ndarray:
    """Return the bytes at which characters of a text begin, given their numbers."""
    if text.isascii():
        return characters
    encoded = np.frombuffer(text.encode(), np.uint8)
    begins = np.append(np.flatnonzero((encoded & 0xC0) != 0x80), len(encoded))
    places: np.ndarray = begins[characters]
    return places


def _is_byte_level(content: dict[str, Any]) -> bool:
    """Return whether each character of the vocabulary represents one byte."""
    step = content.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step])
    is_byte_level = any(each.get("type") == "ByteLevel" for each in steps)
    return is_byte_level and isinstance(content["model"].get("vocab"), dict)


def _unknown(model: dict[str, Any]) -> str | None:
    if (place := model.get("unk_id")) is not None:
        return str(model["vocab"][place][0])
    return model.get("unk_token")


def _byte_lengths(content: dict[str, Any]) -> np.ndarray:
    vocabulary: dict[str, int] = content["model"]["vocab"]
    sizes = {id_: len(token) for token, id_ in vocabulary.items()}
    added = content.get("added_tokens") or []
    sizes |= {token["id"]: len(token["content"].encode()) for token in added}
    lengths = np.zeros(max(sizes, default=-1) + 1, np.int64)
    lengths[[*sizes]] = [*sizes.values()]
    return lengths
