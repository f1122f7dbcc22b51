"""The encoder `gigatoken`, for tokenizers of which tests compared it with the reference.

`FastEngine.encode` takes UTF-8 texts and returns flat ids and lengths as numpy arrays. It leaves
texts of which only the reference has the right ids to the reference.
"""

import importlib.metadata
import json
from itertools import compress
from typing import Any, Literal

import msgspec
import numpy as np
import psutil

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.format.data_set import NOT_FAILURES
from tokenfeed.pipeline.format.schema import token_dtype
from tokenfeed.tools.encoding.fast.routes import Routes, cut, sort_tokens
from tokenfeed.tools.encoding.fast.shapes import (
    COMPARED_TOKENIZERS,
    Shape,
    Unproved,
    check_vocabulary,
)
from tokenfeed.tools.encoding.fast.words import Encode, woven
from tokenfeed.tools.shell.console import signals_held

_COMPARED = {
    "gigatoken": (("0.10.",), "gigatoken>=0.10,<0.11"),
    "tokenizers": (COMPARED_TOKENIZERS, "tokenizers>=0.21.4,<0.24"),
}
"""Versions that were compared, and what to install. The tables of another version may differ."""


class EngineRejected(Exception):
    """The fast engine cannot be used for a data set."""


class EngineFailure(EngineRejected):
    """The fast engine failed on a text."""


class EngineUnavailable(EngineRejected):
    """The fast engine cannot be used for a tokenizer."""


class EngineUntested(EngineUnavailable):
    """No test compared the engines with the installed version of a package."""


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


def _fast_json(shape: Shape, *, splits_special: bool) -> bytes:
    """Return a tokenizer.json for the fast engine.

    The fast engine always splits at special added tokens. So the file leaves them out if they are
    to be plain text. The file also leaves out NFC, because texts that NFC would change go to the
    reference.
    """
    kept, _ = sort_tokens(shape, splits_special=splits_special)
    is_sentence_piece = shape.kind == "SentencePiece"
    normalizers = {"type": "Sequence", "normalizers": [*map(json.loads, shape.normalizer)]}
    steps = [*map(json.loads, shape.proved.engine)]
    pre_tokenizers = {"type": "Sequence", "pretokenizers": steps}
    (pre_tokenizer, *others) = steps or [None]
    content = {
        "added_tokens": kept,
        "normalizer": normalizers if is_sentence_piece and shape.normalizer else None,
        "pre_tokenizer": pre_tokenizers if others else pre_tokenizer,
        "model": shape.model,
    }
    return msgspec.json.encode(content)


CACHE_BYTES = 512 << 20
"""Growth of the process at which the fast engine is loaded again: its cache has no limit."""


class FastEngine:
    """The `gigatoken` package, for shapes of tokenizers for which tests compared the engines."""

    name: Literal["gigatoken"] = "gigatoken"

    def __init__(
        self, json_bytes: bytes, vocabulary_size: int, *, splits_special: bool, reference: Encode
    ) -> None:
        """Load the package.

        Args:
            json_bytes: A tokenizer.json.
            vocabulary_size: The largest id + 1.
            splits_special: Whether special tokens in a text become their ids. If not, they are
                plain text.
            reference: Encodes the texts that only the reference may encode.

        Raises:
            EngineUnavailable: It is not installed, or cannot be used for this tokenizer.
        """
        self.num_routed = 0
        """Number of texts of the last batch that the reference encoded."""
        self._json, self._splits_special, self._reference = json_bytes, splits_special, reference
        self._vocabulary_size = vocabulary_size
        self._dtype = token_dtype(vocabulary_size)
        shape = supported_shape(json_bytes)
        self._routes = Routes.from_shape(shape, splits_special=splits_special)
        self._digits = shape.proved.digits
        with _raising(EngineUnavailable):
            self._tokenizer: Any = self._load(shape)
        self._largest_bytes = _resident_bytes() + CACHE_BYTES

    @staticmethod
    def check(json_bytes: bytes, added_tokens: dict[int, str]) -> None:
        """Check vocabulary, merges and added tokens, once per run: workers skip this slow check.

        Args:
            json_bytes: A tokenizer.json.
            added_tokens: The added tokens of the reference, by id.

        Raises:
            EngineUnavailable: The encoder cannot be used for this tokenizer.
        """
        shape = supported_shape(json_bytes)
        with _raising(EngineUnavailable):
            model, added = shape.model, shape.added_tokens
            for token in added:
                if added_tokens.get(token.id) != token.content:
                    raise Unproved(
                        f"the added token {token.content!r}, to which the reference gives another "
                        "id"
                    )
            findable = {token.content for token in added} if model.ignore_merges else None
            check_vocabulary(shape.kind, bytes(model.vocab), bytes(model.merges), findable=findable)

    def routed(self, texts: list[bytes]) -> np.ndarray:
        """Return the indexes of the texts that only the reference may encode."""
        return self._routes.find(texts)

    def encode(self, texts: list[bytes]) -> Ragged:
        """Encode UTF-8 texts, uint16 or uint32.

        Raises:
            EngineFailure: The engine failed.
        """
        routed = self.routed(texts)
        self.num_routed = len(routed)
        if not self.num_routed:
            return self._encode(texts)
        is_routed = np.zeros(len(texts), bool)
        is_routed[routed] = True
        others = self._encode([*compress(texts, ~is_routed)])
        return woven(is_routed, self._reference([texts[place] for place in routed]), others)

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

    def _load(self, shape: Shape) -> Any:
        try:
            with signals_held():  # their C extensions turn an interruption into an ImportError
                import awkward  # noqa: F401 - gigatoken would, at some later moment
                import gigatoken  # an extra, and 0.3 s that only its users should pay
        except Exception as error:  # under PYTHONDEVMODE awkward fails by a LookupError
            raise EngineUnavailable(
                f"the fast one is not installed ({error}; pip install 'gigatoken<0.11')"
            ) from None
        return gigatoken.Tokenizer.from_json(_fast_json(shape, splits_special=self._splits_special))


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
