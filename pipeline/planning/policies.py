"""The batching policies: Padded, Fixed and Packed, and their base classes.

A policy limits the size of a micro-batch and arranges the rows of a window in sequences. A row that
is too long is cut into pieces. `batching` makes micro-batches of the sequences. Policies are
frozen, hashable, and part of a saved state. Torch-free.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.arithmetic import ceil_div, offsets_of, ranges, round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.planning.arrangement import (
    concatenate,
    crop,
    next_fit,
    pack,
    sort_by_length,
    steps_by_length,
)
from tokenfeed.pipeline.planning.permutation import evenly, mix64
from tokenfeed.pipeline.planning.schedule import Draw


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a window, in the order of its rows."""

    offsets: np.ndarray
    """Where each piece begins in the tokens of the window, and the end, shape (P + 1,), int64."""
    lengths: np.ndarray
    """Tokens of each piece, shape (P,), int64."""
    cut_from: np.ndarray | None
    """Row of each piece, shape (P,), int64; None: no row was cut, and P = R."""

    @property
    def beginnings(self) -> np.ndarray:
        """First piece of each row, shape (R,), int64."""
        if self.cut_from is None:
            return np.arange(len(self.lengths))
        return np.flatnonzero(np.diff(self.cut_from, prepend=-1))

    def in_order_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the pieces row by row, where `rows` are all rows in some order, shape (P,)."""
        if self.cut_from is None:
            return rows
        return ranges(self.beginnings[rows], np.bincount(self.cut_from)[rows])

    @property
    def rows(self) -> np.ndarray:
        """Row of each piece, shape (P,), int64."""
        return np.arange(len(self.lengths)) if self.cut_from is None else self.cut_from


def cut_rows(lengths: np.ndarray, longest: int) -> Pieces:
    """Cut rows into pieces of at most `longest` tokens."""
    if lengths.max() <= longest:
        return Pieces(offsets_of(lengths), lengths, None)
    counts = ceil_div(lengths, longest)
    rows = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.cumsum(lengths) - lengths)[rows] + nth * longest
    offsets = np.append(starts, lengths.sum())
    return Pieces(offsets, np.diff(offsets), rows)


def regroup(
    items: np.ndarray, offsets: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Take groups of consecutive items in another order, keeping the order inside each.

    Returns:
        The items, and the offsets of the groups into them, shape (len(order) + 1,).
    """
    starts, sizes = offsets[:-1][order], np.diff(offsets)[order]
    new_offsets = offsets_of(sizes)
    if len(items) > 64 * len(offsets):  # few large groups: a copy per group is cheaper
        pairs = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        taken = [items[start:stop] for start, stop in pairs]
        return np.concatenate(taken) if taken else items[:0], new_offsets
    return items[ranges(starts, sizes)], new_offsets


def random_order(count: int, key: int) -> np.ndarray:
    """Return a permutation of range(count), int64, that depends on a 64-bit key."""
    keys = mix64(np.arange(count, dtype=np.uint64) ^ np.uint64(key))
    return np.argsort(keys)  # all keys differ, so every sort gives the same order


LongRows = Literal["cut", "truncate", "refuse", "crop"]
"""What happens to a row that is too long for a micro-batch. "cut": it becomes several pieces.
"truncate": only the first piece is used. "refuse": the loader raises a ConfigError. "crop": see
`Packed`."""


Last = Literal["short", "fill", "drop"]
"""What happens at the end of a window, where too few rows are left for a full step. "short": the
last step is shorter. "fill": the same, and rows of padding fill micro-batches. "drop": there is no
such step, and as many rows of the window as it would have are left out: random ones, or the last
ones with `order`="file"."""


class Arranged(NamedTuple):
    """The sequences of a window in delivery order, and which of them form a step."""

    cut: Pieces
    """The pieces of the rows."""
    order: np.ndarray
    """Numbers of all sequences, shape (S,), int64. Without packing, a sequence is a piece of
    `cut`."""
    step_offsets: np.ndarray
    """Where each step begins in `order`, shape (steps + 1,), int64."""
    packed: tuple[np.ndarray, np.ndarray] | None = None
    """With packing: the pieces of all sequences, shape (P,), and where each sequence begins in
    them, shape (S + 1,)."""


class Batching(ABC):
    """Base class of batching policies. A policy is a frozen dataclass; see `saved_policy` for
    saved states."""

    __slots__ = ()
    packs: ClassVar[bool] = False
    """Whether a sequence may have several documents."""

    def __repr__(self) -> str:
        return describe(self)

    def __eq__(self, other: object) -> bool:
        """Compare the rows and their order, which do not depend on rows of padding."""
        if not isinstance(other, Batching):
            return False
        return type(self) is type(other) and describe(self) == describe(other)

    def __hash__(self) -> int:
        return hash(describe(self))

    @property
    @abstractmethod
    def multiple_of(self) -> int:
        """Padded lengths are rounded up to a multiple of this."""

    @property
    def begin_token(self) -> int | None:
        """Id that is put before every piece; None for no such token."""
        return None

    @property
    def last(self) -> Last:
        """What happens to rows at the end of a window that are too few for a step."""
        return "short"

    @property
    @abstractmethod
    def long_rows(self) -> LongRows:
        """What happens to rows longer than `longest_piece`."""

    @property
    @abstractmethod
    def longest_piece(self) -> int:
        """Largest number of tokens of a piece."""

    def rows_to_fill(self, padded_length: int) -> int:
        """Return the number of rows of a full micro-batch of this padded length.

        Rows of padding fill smaller micro-batches. 0: do not fill.
        """
        return 0

    @abstractmethod
    def tokens_per_batch(self, mean_tokens: float) -> int:
        """Return the approximate tokens of a micro-batch, if rows have `mean_tokens` on average.

        It determines the default size of a window.
        """

    @abstractmethod
    def arrange(
        self, lengths: np.ndarray, step_size: int, draw: Draw | None, labels: np.ndarray | None
    ) -> Arranged:
        """Cut the rows of a window into pieces, and arrange these in sequences and steps.

        A pure function: the result must depend on the arguments only.

        Args:
            lengths: Tokens of each row, shape (R,), every value at least 1.
            step_size: Micro-batches of a step.
            draw: The random keys of the window; None without shuffling.
            labels: Label of each row, shape (R,); None if rows have none. Labelled rows are not
                cut.
        """

    def in_order(self, lengths: np.ndarray, rows: np.ndarray) -> Arranged:
        """Arrange rows strictly one after the other, for `order`="file".

        Args:
            lengths: Tokens of each row of the window, shape (R,).
            rows: All rows in the order of delivery, a permutation of range(R).

        Returns:
            Sequences in the order of rows. Each step has one micro-batch.

        Raises:
            ConfigError: The policy chooses rows by their lengths.
        """
        raise ConfigError(
            f"`order`='file': {self} does not keep the order of rows. Use another policy."
        )


class ByLength(Batching):
    """Base class of Padded and Fixed: a sequence is a row, and a micro-batch has similar
    lengths."""

    __slots__ = ()

    spread: float
    """Width of a length band, from 0 to 1."""
    last: Last
    """See `Last`. With "fill", micro-batches are filled up to `rows_of` their padded length."""

    @abstractmethod
    def rows_of(self, longest: int) -> int:
        """Return the number of rows of a micro-batch whose longest row has `longest` tokens."""

    def rows_to_fill(self, padded_length: int) -> int:
        """Return `rows_of` if `last` is "fill", else 0."""
        return self.rows_of(padded_length) if self.last == "fill" else 0

    @abstractmethod
    def batches_of(self, lengths: np.ndarray) -> float:
        """Return the approximate number of micro-batches of rows with these lengths."""

    def arrange(
        self, lengths: np.ndarray, step_size: int, draw: Draw | None, labels: np.ndarray | None
    ) -> Arranged:
        """Sort by length, deal length bands to steps, and put the steps in an order in
        which short and long ones alternate."""
        cut = cut_rows(lengths, self.longest_piece)
        kept = cut.beginnings if self.long_rows == "truncate" else slice(None)
        pieces, step_offsets = steps_by_length(
            cut.lengths[kept], self, step_size=step_size, draw=draw, labels=labels
        )
        if isinstance(kept, np.ndarray):
            pieces = kept[pieces]
        if draw:
            count, key = len(step_offsets) - 1, draw.key ^ 2
            order = evenly(np.arange(count), count, key)
            pieces, step_offsets = regroup(pieces, step_offsets, order)
        return Arranged(cut, pieces, step_offsets)

    def in_order(self, lengths: np.ndarray, rows: np.ndarray) -> Arranged:
        """Fill each micro-batch with the next rows, as many as fit."""
        cut = cut_rows(lengths, self.longest_piece)
        pieces = cut.beginnings[rows] if self.long_rows == "truncate" else cut.in_order_of(rows)
        sizes, edges = cut.lengths[pieces], [0]
        while edges[-1] < len(sizes):
            edges.append(edges[-1] + self._fitting(sizes[edges[-1] :]))
        rest = sizes[edges[-2] :]
        if self.last == "drop" and len(rest) < self.rows_of(int(rest.max())):
            edges.pop()
        return Arranged(cut, pieces[: edges[-1]], np.array(edges))

    def _fitting(self, sizes: np.ndarray) -> int:
        """Return how many of the first pieces fit into a micro-batch, at least 1."""
        longest = np.maximum.accumulate(sizes[: self.rows_of(int(sizes[0]))])
        counts = range(1, len(longest) + 1)
        return bisect_left(counts, True, key=lambda n: n > self.rows_of(int(longest[n - 1])))


SPREAD = 0.033
"""Default width of a length band, as a share of the window's micro-batches. Every epoch deals the
rows of a band to its micro-batches anew. 0 is strict order by length, with the least padding; 1 is
random order, with the most. An epoch of several windows uses a smaller width, because the shuffle
of the windows already mixes rows. Labelled rows use a larger width if the labels in a micro-batch
would be too similar."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Padded(ByLength):
    """Micro-batches of rows with similar lengths, as many as fit a token budget.

    Raises:
        ConfigError: A value is out of range.
    """

    max_tokens: int
    """Largest number of rows times padded length of a micro-batch, in tokens."""
    multiple_of: int = 1
    """Padded lengths are rounded up to a multiple of this. 8 suits tensor cores. Default: 1."""
    long_rows: LongRows = "cut"
    """What happens to a row that is too long. "cut" (default): it is cut into pieces. "truncate":
    only its first piece is used. "refuse": the loader raises a ConfigError."""
    spread: float = SPREAD
    """Width of a length band, from 0 (strict order by length) to 1 (random order). Default:
    0.033."""
    sequence_length: int | None = None
    """Tokens above which a row is too long. Default: `max_tokens`."""
    last: Last = field(default="short", repr=False)
    """What happens where a window has too few rows left for a step. "short" (default): the last
    step is shorter. "fill": rows of padding fill each micro-batch up to `max_tokens`, so it has one
    shape for each multiple of `multiple_of`; see `ShardLoader.shapes`. Neither the order of rows
    nor a saved state differs from "short". "drop": so many random rows are left out of the window
    that all steps are full, others in each epoch; see `Stats.left_out_rows`."""

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.max_tokens < self.multiple_of:
            raise ConfigError(
                f"`max_tokens`={self.max_tokens} is smaller than `multiple_of`={self.multiple_of}. "
                "Raise it."
            )
        if (length := self.sequence_length) and length > self.max_tokens:
            raise ConfigError(
                f"`sequence_length`={length} is larger than `max_tokens`={self.max_tokens}, so no "
                "row could be that long. Raise `max_tokens`, or lower `sequence_length`."
            )

    @property
    def longest_piece(self) -> int:
        """Largest number of tokens of a piece."""
        fitting = self.max_tokens // self.multiple_of * self.multiple_of
        return min(fitting, self.sequence_length or fitting)

    def tokens_per_batch(self, mean_tokens: float) -> int:
        """Return the token budget."""
        return self.max_tokens

    def rows_of(self, longest: int) -> int:
        """Return the number of rows of a micro-batch whose longest row has `longest` tokens."""
        return self.max_tokens // round_up(longest, self.multiple_of)

    def batches_of(self, lengths: np.ndarray) -> float:
        """Return the approximate number of micro-batches of rows with these lengths."""
        return float(lengths.sum()) / self.max_tokens


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Fixed(ByLength):
    """Micro-batches with a fixed number of rows of similar lengths. Rows are never cut, so the
    memory depends on the longest row.

    Raises:
        ConfigError: A value is out of range.
    """

    batch_size: int
    """Number of rows of a micro-batch."""
    multiple_of: int = 1
    """Padded lengths are rounded up to a multiple of this. Default: 1."""
    spread: float = SPREAD
    """See `Padded.spread`."""
    last: Last = field(default="short", repr=False)
    """See `Padded.last`. "fill" fills micro-batches up to `batch_size`."""

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def long_rows(self) -> LongRows:
        """No row is too long."""
        return "cut"

    @property
    def longest_piece(self) -> int:
        """No limit: rows are not cut."""
        return np.iinfo(np.int32).max

    def tokens_per_batch(self, mean_tokens: float) -> int:
        """Return the average tokens of a micro-batch."""
        return int(self.batch_size * mean_tokens)

    def rows_of(self, longest: int) -> int:
        """Return the number of rows of a micro-batch, for any length."""
        return self.batch_size

    def batches_of(self, lengths: np.ndarray) -> float:
        """Return the approximate number of micro-batches of rows with these lengths."""
        return len(lengths) / self.batch_size


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Packed(Batching):
    """Micro-batches of sequences of one length, packed from documents.

    Raises:
        ConfigError: A value is out of range, or `split` contradicts `long_rows`.
    """

    packs = True
    sequence_length: int
    """Tokens of a sequence."""
    batch_size: int
    """Number of sequences of a micro-batch; the last ones of a window may have fewer, see
    `last`."""
    split: bool = False
    """False (default): best fit; only documents longer than a sequence are cut. True: concatenate
    the documents and cut wherever a sequence is full, as most pre-training does."""
    long_rows: LongRows = "cut"
    """What happens to a document longer than a sequence. "cut" (default): it is cut into pieces.
    "truncate": only its first piece is used. "refuse": the loader raises a ConfigError. "crop":
    only beginnings of documents are used, and there is no padding except in the last sequence of a
    window. Where no document fits into the rest of a sequence, the shortest one is cropped to fill
    it. The remaining tokens of cropped documents are not delivered."""
    last: Last = field(default="short", repr=False)
    """See `Padded.last`. "fill" fills micro-batches with sequences of padding up to `batch_size`,
    so all have one shape."""
    begin_token: int | None = field(default=None, repr=False)
    """Id that is put before every piece of a document, and so before every sequence. No loss counts
    it, but it is the context of the first token of the piece. Not with `split` or "crop". Default:
    None, which puts nothing there."""
    balance_attention: bool = field(default=False, repr=False)
    """True: a step has sequences whose sums of squared document lengths are similar, so ranks spend
    equal time in attention that skips other documents (FlashAttention, flex). Steps with few long
    and with many short documents come in random order. Default: False, sequences in random
    order."""

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.split and self.long_rows != "cut":
            raise ConfigError(
                f"`split`=True cuts documents, but `long_rows`={self.long_rows!r} forbids cutting. "
                "Use `long_rows`='cut'."
            )
        slots = self.sequence_length * self.batch_size
        if self.last == "fill" and slots > checks.MOST:
            raise ConfigError(
                f"`last`='fill': {self.batch_size} sequences of {self.sequence_length} tokens are "
                f"{slots:,} tokens, but a micro-batch may have {checks.MOST:,}. Lower `batch_size`."
            )
        if self.begin_token is None:
            return
        if self.split or self.long_rows == "crop":
            other = "`split`=True" if self.split else "`long_rows`='crop'"
            raise ConfigError(
                f"`begin_token`={self.begin_token} cannot be added with {other}. Leave one of them "
                "out, or write the token at the beginning of each document (`pretokenize`)."
            )
        if self.sequence_length < 2:
            raise ConfigError(
                f"`begin_token`={self.begin_token} leaves no room in "
                f"`sequence_length`={self.sequence_length}. Raise it."
            )

    @property
    def longest_piece(self) -> int:
        """Largest number of tokens of a piece, without a begin token."""
        return self.sequence_length - self._added

    @property
    def _added(self) -> int:
        """Number of tokens that are added to a piece."""
        return int(self.begin_token is not None)

    @property
    def multiple_of(self) -> int:
        """Every sequence is padded to `sequence_length`."""
        return self.sequence_length

    def rows_to_fill(self, padded_length: int) -> int:
        """Return `batch_size` if `last` is "fill", else 0."""
        return self.batch_size if self.last == "fill" else 0

    def tokens_per_batch(self, mean_tokens: float) -> int:
        """Return the tokens of a full micro-batch, without begin tokens."""
        slots = self.sequence_length * self.batch_size
        return int(slots * mean_tokens / (mean_tokens + 1)) if self._added else slots

    def arrange(
        self, lengths: np.ndarray, step_size: int, draw: Draw | None, labels: np.ndarray | None
    ) -> Arranged:
        """Pack by best fit or concatenation, and put the sequences in random order."""
        if self.split:
            rows = random_order(len(lengths), draw.key) if draw else np.arange(len(lengths))
            cut, packed = self._split(lengths, rows)
        else:
            crops = self.long_rows == "crop"
            cut, packed = self._crop(lengths, draw) if crops else self._fit(lengths, draw)
        count = len(packed[1]) - 1
        order = random_order(count, draw.key ^ 1) if draw else np.arange(count)
        of_step = self.batch_size * step_size
        if self.last == "drop":
            count -= count % of_step
            order = order[:count]
        if self.balance_attention:
            costs = np.add.reduceat(cut.lengths[packed[0]] ** 2, packed[1][:-1])
            order = order[np.argsort(costs[order], kind="stable")]
            if draw:
                steps = random_order(count // of_step, draw.key ^ 2)  # a shorter step stays last
                whole = order[: len(steps) * of_step]
                whole[:] = whole.reshape(-1, of_step)[steps].reshape(-1)
        step_offsets = _offsets_of_groups(count, of_step)
        return Arranged(cut, order, step_offsets, packed)

    def in_order(self, lengths: np.ndarray, rows: np.ndarray) -> Arranged:
        """Fill each sequence with the next documents: as many as fit whole, or with `split`, cut
        wherever a sequence is full."""
        if self.long_rows == "crop" or self.balance_attention:
            return Batching.in_order(self, lengths, rows)  # raises
        if self.split:
            cut, (pieces, offsets) = self._split(lengths, rows)
        else:
            cut = cut_rows(lengths, self.longest_piece)
            truncates = self.long_rows == "truncate"
            pieces = cut.beginnings[rows] if truncates else cut.in_order_of(rows)
            offsets = next_fit(cut.lengths[pieces] + self._added, self.sequence_length)
        count = len(offsets) - 1
        if self.last == "drop":
            count -= count % self.batch_size
        batches = _offsets_of_groups(count, self.batch_size)
        return Arranged(cut, np.arange(count), batches, (pieces, offsets))

    def _fit(
        self, lengths: np.ndarray, draw: Draw | None
    ) -> tuple[Pieces, tuple[np.ndarray, np.ndarray]]:
        cut = cut_rows(lengths, self.longest_piece)
        longest_first = sort_by_length(cut.lengths, draw.key if draw else None)[::-1]
        lengths = cut.lengths
        if self.long_rows == "truncate":
            begins = np.zeros(len(cut.lengths), np.bool_)
            begins[cut.beginnings] = True
            longest_first, lengths = longest_first[begins[longest_first]], lengths[begins]
        return cut, pack(longest_first, lengths + self._added, self.sequence_length)

    def _crop(
        self, lengths: np.ndarray, draw: Draw | None
    ) -> tuple[Pieces, tuple[np.ndarray, np.ndarray]]:
        ascending = sort_by_length(lengths, draw.key if draw else None)
        cropped, order, sequence_offsets = crop(lengths[ascending], self.sequence_length)
        kept = np.empty_like(lengths)
        kept[ascending] = cropped
        has_rest = kept < lengths
        cut_from = np.repeat(np.arange(len(lengths)), 1 + has_rest)
        begins = offsets_of(1 + has_rest)[:-1]
        piece_lengths = np.empty(len(cut_from), lengths.dtype)
        piece_lengths[begins] = kept
        piece_lengths[begins[has_rest] + 1] = (lengths - kept)[has_rest]
        pieces = Pieces(
            offsets_of(piece_lengths), piece_lengths, cut_from if has_rest.any() else None
        )
        return pieces, (begins[ascending[order]], sequence_offsets)

    def _split(
        self, lengths: np.ndarray, order: np.ndarray
    ) -> tuple[Pieces, tuple[np.ndarray, np.ndarray]]:
        cut_from, offsets, pieces, sequence_offsets = concatenate(
            lengths, order, self.sequence_length
        )
        return Pieces(offsets, np.diff(offsets), cut_from), (pieces, sequence_offsets)


def _offsets_of_groups(count: int, size: int) -> np.ndarray:
    """Return where each group of `size` items begins, and the end; the last group may be
    smaller."""
    return np.append(np.arange(0, count, size), count)


POLICIES: tuple[type[Batching], ...] = (Padded, Packed, Fixed)
"""All policies."""


def offered(policies: Iterable[type[Batching]] = POLICIES) -> str:
    """Return the names of policies for a message: Padded, Packed or Fixed."""
    *others, last = (policy.__name__ for policy in policies)
    return f"{', '.join(others)} or {last}"


def describe(policy: Batching) -> str:
    """Return the repr of a policy.

    The repr of a dataclass is not used, because it is not reentrant: a signal handler that asks for
    it while it is being made gets `...`. A field with `repr=False` is left out if it has its
    default. `last`="fill" is left out too, because the rows are those of "short".
    """
    values = [(field, getattr(policy, field.name)) for field in fields(policy)]  # type: ignore[arg-type]
    shown = ", ".join(
        f"{field.name}={value!r}"
        for field, value in values
        if field.repr or value not in (field.default, "fill")
    )
    return f"{type(policy).__qualname__}({shown})"


def saved_policy(policy: Batching) -> dict[str, Any]:
    """Return a policy for a saved state: its name, and the values that are not defaults. Rows of
    padding do not change which rows come when, so `last`="fill" is left out."""
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}  # type: ignore[arg-type]
    defaults = {field.name: field.default for field in fields(policy)}  # type: ignore[arg-type]
    kept = {name: value for name, value in values.items() if value not in (defaults[name], "fill")}
    return {"policy": type(policy).__name__, **kept}


def policy_of(saved: object) -> Batching:
    """Return the policy of a saved state: the inverse of `saved_policy`.

    Raises:
        ConfigError: The name is unknown, or the class rejects the values.
    """
    try:
        values: dict[str, Any] = dict(saved)  # type: ignore[call-overload]
        names: dict[str, Any] = {policy.__name__: policy for policy in POLICIES}
        made: Batching = names[values.pop("policy")](**values)
    except Exception:  # anything may be in a state that was changed
        raise ConfigError(f"{saved!r}: unknown policy. Use {offered()}.") from None
    return made


def _check_fields(policy: Padded | Packed | Fixed) -> None:
    """Check each field, and replace numpy scalars by plain values. None is valid where it is the
    default."""
    words = get_args(LongRows)
    for each in fields(policy):
        name, value = each.name, getattr(policy, each.name)
        if value is None and each.default is None:
            continue
        if name == "long_rows":
            value = checks.choice(name, value, words if policy.packs else words[:-1])
        elif name == "last":
            value = checks.choice(name, value, get_args(Last))
        elif name == "spread":
            value = checks.share(name, value)
        elif isinstance(each.default, bool):
            value = checks.flag(name, value)
        else:
            least = 0 if name == "begin_token" else 1
            value = checks.whole(name, value, least=least, most=checks.MOST)
        object.__setattr__(policy, name, value)
