"""Engines turn texts into ids. `tokenizers` is the reference; `gigatoken` is fast.

An engine takes a batch of UTF-8 texts, and returns flat ids and lengths as numpy arrays in storage
dtype. No token becomes a Python object. The fast engine is used only if tests compared the engines
for the shape of the tokenizer and the installed versions. `audit` also compares them in each run.
"""

import contextlib
import importlib.metadata
import itertools
import json
from typing import Any, Literal, Self

import msgspec
import numpy as np
import psutil

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.pipeline.format.data_set import NOT_FAILURES
from tokenfeed.pipeline.format.schema import token_dtype
from tokenfeed.tools.encoding.engine_support import (
    COMPARED_TOKENIZERS,
    Shape,
    Unproved,
    check_vocabulary,
)
from tokenfeed.tools.encoding.routes import Routes, cut, sort_tokens
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, fetch_tokenizer_json
from tokenfeed.tools.encoding.words import Words
from tokenfeed.tools.shell.console import signals_held

_COMPARED = {
    "gigatoken": (("0.10.",), "gigatoken>=0.10,<0.11"),
    "tokenizers": (COMPARED_TOKENIZERS, "tokenizers>=0.21.4,<0.24"),
}
"""Versions that were compared, and what to install. The tables of another version may differ."""


def supported_shape(json_bytes: bytes) -> Shape:
    """Return the shape of a tokenizer.json. The check is fast: see `FastEngine.check`.

    Raises:
        EngineUnavailable: No test compared the engines for the shape. The message names the unusual
            part.
        EngineUntested: No test compared the installed versions.
    """
    with _raising(EngineUnavailable):
        shape = Shape.from_json(json_bytes)
        for package, (versions, requirement) in _COMPARED.items():
            version = importlib.metadata.version(package)
            if not version.startswith(versions):
                raise EngineUntested(
                    f"the fast engine was not compared with {package} {version}: "
                    f"`pip install '{requirement}'` makes this run many times as fast"
                )
    return shape


def fast_json(shape: Shape, *, splits_special: bool) -> bytes:
    """Return a tokenizer.json for the fast engine.

    The fast engine always splits at special added tokens. So the file leaves them out if they are
    to be plain text. The file also leaves out NFC, because texts that NFC would change go to the
    reference.
    """
    kept, _ = sort_tokens(shape, splits_special=splits_special)
    is_sentence_piece = shape.kind == "SentencePiece"
    normalizers = {"type": "Sequence", "normalizers": [*map(json.loads, shape.normalizer)]}
    steps = [*map(json.loads, shape.substitute.pre_tokenizer)]
    pre_tokenizers = {"type": "Sequence", "pretokenizers": steps}
    (pre_tokenizer, *others) = steps or [None]
    content = {
        "added_tokens": kept,
        "normalizer": normalizers if is_sentence_piece and shape.normalizer else None,
        "pre_tokenizer": pre_tokenizers if others else pre_tokenizer,
        "model": shape.model,
    }
    return msgspec.json.encode(content)


EngineName = Literal["tokenizers", "gigatoken"]

CACHE_BYTES = 512 << 20
"""Growth of the process at which the fast engine is loaded again: its cache has no limit."""


class Unencodable(Exception):
    """Texts that the tokenizer cannot encode."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons
        """The reason, by the index of the text in the batch."""


class EngineRejected(Exception):
    """The fast engine cannot be used for a data set."""


class EngineFailure(EngineRejected):
    """The fast engine failed on a text."""


class EngineUnavailable(EngineRejected):
    """The fast engine cannot be used for a tokenizer."""


class EngineUntested(EngineUnavailable):
    """No test compared the engines with the installed version of a package."""


class ReferenceEngine:
    """The `tokenizers` package. Its ids are correct by definition."""

    name: EngineName = "tokenizers"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._dtype = token_dtype(tokenizer.vocabulary_size)
        self._words = Words.of_tokenizer(tokenizer, self._encode_whole)

    def encode(self, texts: list[bytes]) -> Ragged:
        """Encode UTF-8 texts.

        Returns:
            The ids of each text, uint16 or uint32. A text may have no ids.

        Raises:
            Unencodable: Some of the texts cannot be encoded.
        """
        if self._words is not None:
            try:
                made = self._words.encode(texts)
            except NOT_FAILURES:
                raise
            except Exception:  # of the library, about a word: below, the text is named
                return self._encode_whole(texts)
            return Ragged(made.values.astype(self._dtype), made.lengths)
        return self._encode_whole(texts)

    def _encode_whole(self, texts: list[bytes]) -> Ragged:
        decoded = [text.decode() for text in texts]
        try:
            encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        except BaseException as error:  # the library raises what its Rust side gives, panics too
            if isinstance(error, NOT_FAILURES):
                raise
            if reasons := self._reasons(decoded):
                raise Unencodable(reasons) from None
            raise TokenizerError(f"the tokenizer fails over a batch of texts: {error}") from None
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        flat = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        return Ragged(np.fromiter(flat, self._dtype, int(lengths.sum())), lengths)

    def _reasons(self, texts: list[str]) -> dict[int, str]:
        reasons = {}
        for index, text in enumerate(texts):
            try:
                self._tokenizer.encode(text, add_special_tokens=False)
            except BaseException as error:
                if isinstance(error, NOT_FAILURES):
                    raise
                reasons[index] = f"the tokenizer cannot encode it: {error}"
        return reasons


class FastEngine:
    """The `gigatoken` package, for shapes of tokenizers for which tests compared the engines.

    `Routes` selects the texts that go to the reference. The reference is loaded for the first of
    these texts.
    """

    name: EngineName = "gigatoken"

    def __init__(self, json_bytes: bytes, vocabulary_size: int, *, splits_special: bool) -> None:
        """Load the fast engine without the reference.

        Args:
            json_bytes: A tokenizer.json.
            vocabulary_size: The largest id + 1.
            splits_special: Whether special tokens in a text become their ids. If not, they are
                plain text.

        Raises:
            EngineUnavailable: The engine is not installed, or cannot be used for this tokenizer.
        """
        self.routed = 0
        """Number of texts of the last batch that the reference encoded."""
        self._json, self._splits_special = json_bytes, splits_special
        self._vocabulary_size = vocabulary_size
        self._dtype = token_dtype(vocabulary_size)
        shape = supported_shape(json_bytes)
        self.routes = Routes.from_shape(shape, splits_special=splits_special)
        self._digits = shape.substitute.digits
        with _raising(EngineUnavailable):
            self._tokenizer: Any = self._load(shape)
        self.reference: ReferenceEngine | None = None
        self._largest_bytes = _resident_bytes() + CACHE_BYTES

    @classmethod
    def from_tokenizer(cls, tokenizer: TextTokenizer) -> Self:
        """Load the fast engine for a tokenizer that is already loaded, and check its vocabulary.

        Raises:
            EngineUnavailable: The engine is not installed, or cannot be used for this tokenizer.
        """
        cls.check(tokenizer)
        made = cls(
            tokenizer.json_bytes,
            tokenizer.vocabulary_size,
            splits_special=tokenizer.splits_special,
        )
        made.reference = ReferenceEngine(tokenizer)
        return made

    @staticmethod
    def check(tokenizer: TextTokenizer) -> None:
        """Check vocabulary, merges and added tokens, once per run: workers skip this slow check.

        Raises:
            EngineUnavailable: The fast engine cannot be used for this tokenizer.
        """
        shape = supported_shape(tokenizer.json_bytes)
        with _raising(EngineUnavailable):
            model, added = shape.model, shape.added_tokens
            known = tokenizer.tokenizer.get_added_tokens_decoder()
            for token in added:
                if token.id not in known or known[token.id].content != token.content:
                    raise Unproved(
                        f"the added token {token.content!r}, to which the reference gives another "
                        "id"
                    )
            findable = {token.content for token in added} if model.ignore_merges else None
            check_vocabulary(shape.kind, bytes(model.vocab), bytes(model.merges), findable=findable)

    def encode(self, texts: list[bytes]) -> Ragged:
        """Encode UTF-8 texts like `ReferenceEngine.encode`.

        Raises:
            Unencodable: The reference cannot encode some of the texts.
            EngineFailure: The fast engine failed.
        """
        routed = self.routes.find(texts)
        self.routed = len(routed)
        if not self.routed:
            return self._encode(texts)
        others = np.setdiff1d(np.arange(len(texts)), routed)
        parts = (
            self._encode([texts[place] for place in others]),
            self._encode_routed(texts, routed),
        )
        made = Ragged(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )
        return made.take(np.argsort(np.concatenate([others, routed])))

    def _encode(self, texts: list[bytes]) -> Ragged:
        with _raising(EngineFailure):
            if self._digits:
                offsets, ids = self._encode_pieces(texts)
            else:
                offsets, ids = self._encode_batch(texts)
            self._check(ids, len(texts), len(offsets) - 1)
        if _resident_bytes() > self._largest_bytes:
            self._tokenizer = None  # first: two of them would need twice the memory
            with _raising(EngineFailure):
                self._tokenizer = self._load(Shape.from_json(self._json))
            self._largest_bytes = _resident_bytes() + CACHE_BYTES
        return Ragged(ids.astype(self._dtype), np.diff(offsets))

    def _encode_pieces(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Encode what is between numbers, and the numbers, each alone."""
        import awkward

        data, offsets, ends = cut(texts, self._digits)
        bytes_: Any = data  # pyright does not take a numpy array for "ArrayLike"
        letters = awkward.contents.NumpyArray(bytes_, parameters={"__array__": "byte"})
        pieces = awkward.contents.ListOffsetArray(
            awkward.index.Index64(offsets), letters, parameters={"__array__": "bytestring"}
        )
        found, ids = self._encode_batch(awkward.Array(pieces))
        if len(found) != len(offsets):
            raise ValueError(f"gives ids of {len(found) - 1:,} pieces for {len(offsets) - 1:,}")
        return found[np.searchsorted(offsets, np.append(0, ends))], ids

    def _encode_batch(self, texts: Any) -> tuple[np.ndarray, np.ndarray]:
        """Offsets [N + 1] into the ids, and the ids."""
        array = self._tokenizer.encode_batch(texts, parallel=False)
        offsets = np.asarray(array.layout.offsets.data)
        return offsets - offsets[0], np.asarray(array.layout.content.data)[offsets[0] : offsets[-1]]

    def _check(self, ids: np.ndarray, num_texts: int, num_rows: int) -> None:
        """Raise ValueError if the number of texts or an id is impossible."""
        if num_rows != num_texts:
            raise ValueError(f"gives ids of {num_rows:,} texts for {num_texts:,}")
        if len(ids) and (largest := int(ids.max())) >= self._vocabulary_size:
            raise ValueError(f"gives the id {largest:,}, of {self._vocabulary_size:,}")

    def _encode_routed(self, texts: list[bytes], routed: np.ndarray) -> Ragged:
        """Encode the texts with the indexes `routed` by the reference."""
        if self.reference is None:
            tokenizer = TextTokenizer.load(
                self._json, origin="the tokenizer", splits_special=self._splits_special
            )
            self.reference = ReferenceEngine(tokenizer)
            self._largest_bytes = max(self._largest_bytes, _resident_bytes() + CACHE_BYTES)
        try:
            return self.reference.encode([texts[place] for place in routed])
        except Unencodable as error:
            reasons = {int(routed[place]): reason for place, reason in error.reasons.items()}
            raise Unencodable(reasons) from None

    def _load(self, shape: Shape) -> Any:
        try:
            with signals_held():  # their C extensions turn an interruption into an ImportError
                import awkward  # noqa: F401 - gigatoken would, at some later moment
                import gigatoken  # an extra, and 0.3 s that only its users should pay
        except Exception as error:  # under PYTHONDEVMODE awkward fails by a LookupError
            raise EngineUnavailable(
                f"the fast one is not installed ({error}; pip install 'gigatoken<0.11')"
            ) from None
        return gigatoken.Tokenizer.from_json(fast_json(shape, splits_special=self._splits_special))


class NoEngine:
    """Stands for the reference if a task encodes no text. It takes no time to load."""

    name: EngineName = ReferenceEngine.name

    def encode(self, texts: list[bytes]) -> Ragged:
        """Encode nothing."""
        raise AssertionError("the task has no texts")


Engine = ReferenceEngine | FastEngine | NoEngine


class _raising:
    """Convert every error of the fast engine into one exception, including panics of Rust."""

    def __init__(self, kind: type[EngineFailure | EngineUnavailable]) -> None:
        self._kind = kind

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> None:
        if error is None or isinstance(error, (*NOT_FAILURES, EngineUnavailable)):
            return
        if isinstance(error, Unproved):
            raise self._kind(f"the fast one was never compared with it for {error}") from None
        reason = str(error).split("\n")[0].strip() or kind
        raise self._kind(f"gigatoken: {reason}") from error


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


_loaded: list[tuple[tuple[bytes, bool], Engine]] = []
"""Each engine, with the tokenizer.json and `splits_special`."""


def preload(name: str, vocabulary_size: int, *, splits_special: bool) -> None:
    """Load an engine that `load_engine` will return: the fast one, if it knows the tokenizer.

    If this fails, `load_engine` raises the error.

    Args:
        name: The value of `--tokenizer`.
        vocabulary_size: See `FastEngine`.
        splits_special: See `FastEngine`.
    """
    if "://" in name:
        return  # what is forked from a process that has talked to a store could not talk to one
    with contextlib.suppress(Exception):
        json_bytes = fetch_tokenizer_json(name)
        try:
            supported_shape(json_bytes)
            kind: EngineName = FastEngine.name
        except EngineUnavailable:
            kind = ReferenceEngine.name
        engine = load_engine(kind, json_bytes, vocabulary_size, splits_special=splits_special)
        _loaded.append(((json_bytes, splits_special), engine))


def load_engine(
    name: EngineName, json_bytes: bytes, vocabulary_size: int, *, splits_special: bool
) -> Engine:
    """Return the engine that `preload` loaded for this tokenizer, or a new engine.

    Raises:
        EngineUnavailable: The fast engine is wanted, but cannot be used for this tokenizer.
    """
    for made_of, engine in _loaded:
        if made_of == (json_bytes, splits_special) and engine.name == name:
            return engine
    if name == FastEngine.name:
        return FastEngine(json_bytes, vocabulary_size, splits_special=splits_special)
    tokenizer = TextTokenizer.load(
        json_bytes, origin="the tokenizer", splits_special=splits_special
    )
    return ReferenceEngine(tokenizer)
