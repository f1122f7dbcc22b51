"""One rank's share of a window: its micro-batches one after the other, as a few flat arrays.

A share is made in a worker, laid into one flat buffer, and read from it in the training process
without a copy; its micro-batches are views of it. Torch-free.

Sizes: N tokens, P pieces, S sequences, M micro-batches (one a round).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from tokenfeed.pipeline.format.schema import LABEL

__all__ = ["Header", "RaggedBatch", "RankSlice"]

_ALIGNMENT = 64  # of each array: a cache line


@dataclass(frozen=True, slots=True)
class Header:
    """What a share is, without its arrays."""

    epoch: int
    window: int
    num_per_token: int
    """How many of the arrays have a value a token; they come first."""
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of each array, in the order of the buffer."""


@dataclass(frozen=True, slots=True)
class RankSlice:
    """Flat arrays of one window."""

    epoch: int
    window: int
    per_token: dict[str, np.ndarray]
    """`input_ids` and the task's columns a token, in storage dtype, shape (N,)."""
    index: dict[str, np.ndarray]
    """Everything else:

    A value a piece (P,): `lengths` int32; `numbers` int64, the row within all sources; `starts`
    int64, first token within the row, absent where no row was cut; the task's columns a row.

    A value a sequence: `sequence_lengths` (S,) int32; `sequences` (S + 1,) int64, where each begins
    among the pieces, absent where every piece is one.

    A value a micro-batch (M,): `padded` int32, its length T; `targets` int64, labels that a loss
    counts; `filler` bool; `position` int64, micro-batches of the window delivered after it;
    `ends_step` bool; over all ranks `digests` uint64 and `tokens` (M, sources) int64.
    Offsets (M + 1,) int64: `batches` into sequences, `piece_offsets`, `token_offsets`.

    Slots, int32: `segments`, with `segment_offsets`, where a document or padding begins, and the
    end of the batch (packed only); `ignored`, with `ignored_offsets`, tokens that are no target,
    where these are not simply the first of each piece.
    """
    staged: dict[str, np.ndarray]
    """The arrays of `index` where a device can copy them from; the same ones without a buffer."""

    @property
    def num_batches(self) -> int:
        """Micro-batches of this share."""
        return len(self.index["padded"])

    @property
    def num_bytes(self) -> int:
        """Bytes that `write` fills."""
        return sum(_aligned(array.nbytes) for _, array in self._named())

    def write(self, buffer: memoryview) -> Header:
        """Lay all arrays into a buffer of at least `num_bytes`."""
        at, described = 0, []
        for name, array in self._named():
            described.append((name, array.dtype.str, array.shape))
            np.copyto(np.frombuffer(buffer, array.dtype, array.size, at), array.reshape(-1))
            at += _aligned(array.nbytes)
        return Header(self.epoch, self.window, len(self.per_token), tuple(described))

    @classmethod
    def read(cls, header: Header, buffer: memoryview) -> "RankSlice":
        """The share in a buffer; all but `index` are views, gone when it is filled again."""
        at, arrays = 0, []
        for name, dtype, shape in header.arrays:
            array = np.frombuffer(buffer, dtype, prod(shape), at).reshape(shape)
            arrays.append((name, array))
            at += _aligned(array.nbytes)
        per_token, staged = arrays[: header.num_per_token], arrays[header.num_per_token :]
        index = {name: array.copy() for name, array in staged}
        return cls(header.epoch, header.window, dict(per_token), index, dict(staged))

    def batches(self) -> Iterator["RaggedBatch"]:
        """The micro-batches, as views, unpadded."""
        return (RaggedBatch(self, number) for number in range(self.num_batches))

    def _named(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from self.per_token.items()
        yield from self.index.items()


class RaggedBatch:
    """A micro-batch before padding, as views: B sequences of P pieces, N tokens."""

    __slots__ = (
        "_index",
        "_number",
        "_pieces",
        "_share",
        "_tokens",
        "is_filler",
        "num_targets",
        "num_tokens",
        "padded_length",
        "sequence_lengths",
    )

    def __init__(self, share: RankSlice, number: int) -> None:
        index = share.index
        batches, tokens, pieces = index["batches"], index["token_offsets"], index["piece_offsets"]
        self._index, self._number = index, number
        self._share: RankSlice | None = share
        self._tokens = slice(int(tokens[number]), int(tokens[number + 1]))
        self._pieces = slice(int(pieces[number]), int(pieces[number + 1]))
        self.sequence_lengths = index["sequence_lengths"][batches[number] : batches[number + 1]]
        """Tokens of each sequence, shape (B,), int32."""
        self.padded_length = int(index["padded"][number])
        """T: the longest sequence, rounded up as the policy says."""
        self.is_filler = bool(index["filler"][number])
        """Whether this repeats another rank's sequence, so that no rank stands idle."""
        self.num_tokens = 0 if self.is_filler else self._tokens.stop - self._tokens.start
        """Tokens delivered; a filler delivers none."""
        self.num_targets = 0 if self.is_filler else int(index["targets"][number])
        """Labels that a loss counts."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return len(self.sequence_lengths), self.padded_length

    @property
    def is_full(self) -> bool:
        """Whether there is no padding."""
        rows, length = self.shape
        return self._tokens.stop - self._tokens.start == rows * length

    @property
    def is_last(self) -> bool:
        """Whether its window ends with it."""
        return self._number + 1 == len(self._index["padded"])

    def of_round(self, name: str) -> np.ndarray:
        """What the share says of this micro-batch alone: `position`, `digests`, ..."""
        value: np.ndarray = self._index[name][self._number]
        return value

    def of_tokens(self, name: str) -> np.ndarray:
        """A column with a value a token, shape (N,), in storage dtype."""
        assert self._share, "its tokens were dropped"
        return self._share.per_token[name][self._tokens]

    def staged(self) -> dict[str, np.ndarray]:
        """What a device needs to pad and label, besides the tokens, where it can copy it from."""
        assert self._share, "its tokens were dropped"
        staged = self._share.staged
        batches = self._index["batches"]
        cuts = {"sequence_lengths": slice(batches[self._number], batches[self._number + 1])}
        cuts |= {LABEL: self._pieces} if LABEL in staged else {}
        cuts |= {name: self._slots(name) for name in ("segments", "ignored") if name in staged}
        return {name: staged[name][cut] for name, cut in cuts.items()}

    def of_pieces(self, name: str) -> np.ndarray:
        """A value a piece, shape (P,)."""
        return self._index[name][self._pieces]

    def slots(self, name: str) -> np.ndarray:
        """`segments` or `ignored`: places in the flattened [B, T] batch, int32."""
        return self._index[name][self._slots(name)]

    def has(self, name: str) -> bool:
        """Whether there is a column a token, or an array beside the tokens, of that name."""
        return name in self._index or bool(self._share and name in self._share.per_token)

    @property
    def sequence_offsets(self) -> np.ndarray:
        """Where each sequence begins among the pieces of the batch, shape (B + 1,), int64."""
        if "sequences" not in self._index:
            return np.arange(len(self.sequence_lengths) + 1)
        batches = self._index["batches"]
        first, last = batches[self._number], batches[self._number + 1]
        offsets: np.ndarray = self._index["sequences"][first : last + 1] - self._pieces.start
        return offsets

    def drop_tokens(self) -> None:
        """Let go of the share's tokens: the batch was built, their buffer may be filled again."""
        self._share = None

    def _slots(self, name: str) -> slice:
        offsets = self._index[f"{name.removesuffix('s')}_offsets"]
        return slice(offsets[self._number], offsets[self._number + 1])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
