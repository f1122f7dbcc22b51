"""How micro-batches are made: the policies a user chooses among.

Each says what a micro-batch may be, and arranges the rows of a window for it. Frozen, hashable, and
part of a saved state. Torch-free.
"""

import ast
import contextlib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_args

import numpy as np

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.planning.length_bands import sort_by_length
from tokenfeed.pipeline.planning.order import Draw
from tokenfeed.pipeline.planning.packing import concatenate, pack
from tokenfeed.pipeline.planning.pieces import Pieces, cut_rows, random_order
from tokenfeed.pipeline.planning.policy import Arranged, Batching, ByLength, LongRows

__all__ = ["POLICIES", "Fixed", "Packed", "Padded", "described_policy", "offered", "policy_of"]

SPREAD = 0.033
"""The part of a window's micro-batches, neighbours in length, among which rows are dealt anew in
every epoch. 0 is strictly by length, with the least padding; 1 a random order, with the most. An
epoch of several windows needs less, and takes it: there chance decides which rows share a window.
A data set of labelled rows takes more where the labels in a micro-batch would be too much alike."""


@dataclass(frozen=True, slots=True)
class Padded(ByLength):
    """Rows of like length side by side, as many as a token budget allows."""

    max_tokens: int
    """Rows x padded length of a micro-batch never exceed this."""
    multiple_of: int = 1
    """Padded lengths are rounded up to this; 8 suits tensor cores, at some padding."""
    long_rows: LongRows = "cut"
    """A row of more than `max_tokens` is cut into pieces; "truncate" drops all but its first
    piece, "refuse" makes no loader."""
    spread: float = SPREAD
    """How far rows may be from their place in order of length, to meet others in every epoch."""
    sequence_length: int | None = None
    """A row of more than this counts as too long; by default one of more than `max_tokens`."""

    def __post_init__(self) -> None:
        _check_sizes(self, "max_tokens", "multiple_of")
        if self.max_tokens < self.multiple_of:
            raise ConfigError(
                f"`max_tokens`={self.max_tokens} is smaller than `multiple_of`={self.multiple_of}. "
                "Raise it."
            )
        if self.sequence_length is not None:
            _check_sizes(self, "sequence_length")
        _check_long_rows(self)
        _check_spread(self)

    @property
    def longest_piece(self) -> int:
        """Rows are cut into pieces of this many tokens."""
        fitting = self.max_tokens // self.multiple_of * self.multiple_of
        return min(fitting, self.sequence_length or fitting)

    def tokens_per_batch(self, mean_tokens: float) -> int:
        """The token budget."""
        return self.max_tokens

    def rows_of(self, longest: int) -> int:
        """Rows of a micro-batch whose longest row is `longest`."""
        return self.max_tokens // round_up(longest, self.multiple_of)

    def batches_of(self, lengths: np.ndarray) -> float:
        """About how many micro-batches rows of some lengths become."""
        return float(lengths.sum()) / self.max_tokens


@dataclass(frozen=True, slots=True)
class Fixed(ByLength):
    """A fixed number of rows of like length; rows are never cut, so memory follows the longest."""

    batch_size: int
    """Rows of a micro-batch."""
    multiple_of: int = 1
    """Padded lengths are rounded up to this."""
    spread: float = SPREAD
    """See `Padded.spread`."""

    def __post_init__(self) -> None:
        _check_sizes(self, "batch_size", "multiple_of")
        _check_spread(self)

    @property
    def long_rows(self) -> LongRows:
        """No row is too long."""
        return "cut"

    @property
    def longest_piece(self) -> int:
        """Rows are not cut."""
        return np.iinfo(np.int32).max

    def tokens_per_batch(self, mean_tokens: float) -> int:
        """The rows of a micro-batch, as long as rows are."""
        return int(self.batch_size * mean_tokens)

    def rows_of(self, longest: int) -> int:
        """Rows of a micro-batch, whatever their length."""
        return self.batch_size

    def batches_of(self, lengths: np.ndarray) -> float:
        """About how many micro-batches rows of some lengths become."""
        return len(lengths) / self.batch_size


@dataclass(frozen=True, slots=True)
class Packed(Batching):
    """Documents packed into sequences of one length, by best fit or by plain concatenation."""

    packs = True
    sequence_length: int
    batch_size: int
    """Sequences of a micro-batch; fewer at a window's tail."""
    split: bool = False
    """False: best fit, and only documents longer than a sequence are cut. True: documents one after
    the other, split wherever a sequence is full, as most pre-training does."""
    long_rows: LongRows = "cut"
    """A document longer than a sequence is cut into pieces; "truncate" drops all but its first
    piece, "refuse" makes no loader."""

    def __post_init__(self) -> None:
        _check_sizes(self, "sequence_length", "batch_size")
        object.__setattr__(self, "split", checks.flag("split", self.split))
        _check_long_rows(self)
        if self.split and self.long_rows != "cut":
            raise ConfigError(
                f"`split`=True cuts documents, `long_rows`={self.long_rows!r} forbids it."
            )

    @property
    def longest_piece(self) -> int:
        """Documents are cut into pieces of at most this many tokens."""
        return self.sequence_length

    @property
    def multiple_of(self) -> int:
        """Every sequence is padded to the one length."""
        return self.sequence_length

    def tokens_per_batch(self, mean_tokens: float) -> int:
        """Full sequences."""
        return self.sequence_length * self.batch_size

    def arrange(
        self, lengths: np.ndarray, step_size: int, draw: Draw | None, labels: np.ndarray | None
    ) -> Arranged:
        """Pack by best fit, or lay rows one after the other; sequences come in random order."""
        cut, packed = self._split(lengths, draw) if self.split else self._fit(lengths, draw)
        count = len(packed[1]) - 1
        order = random_order(count, draw.key ^ 1) if draw else np.arange(count)
        step_offsets = np.append(np.arange(0, count, self.batch_size * step_size), count)
        return Arranged(cut, order, step_offsets, packed)

    def _fit(
        self, lengths: np.ndarray, draw: Draw | None
    ) -> tuple[Pieces, tuple[np.ndarray, np.ndarray]]:
        cut = cut_rows(lengths, self.longest_piece)
        longest_first = sort_by_length(cut.lengths, draw.key if draw else None)[::-1]
        if self.long_rows == "truncate":
            begins = np.zeros(len(cut.lengths), np.bool_)
            begins[cut.beginnings] = True
            longest_first = longest_first[begins[longest_first]]
        packed, sequence_offsets = pack(cut.lengths[longest_first], self.sequence_length)
        return cut, (longest_first[packed], sequence_offsets)

    def _split(
        self, lengths: np.ndarray, draw: Draw | None
    ) -> tuple[Pieces, tuple[np.ndarray, np.ndarray]]:
        order = random_order(len(lengths), draw.key) if draw else np.arange(len(lengths))
        cut_from, offsets, pieces, sequence_offsets = concatenate(
            lengths, order, self.sequence_length
        )
        return Pieces(offsets, np.diff(offsets), cut_from), (pieces, sequence_offsets)


POLICIES: tuple[type[Batching], ...] = (Padded, Packed, Fixed)
"""Ours, as messages offer them. A class elsewhere that is called like one changes no state."""
_NO_LITERALS = (SyntaxError, TypeError, ValueError, MemoryError, RecursionError)
"""What `ast` raises of text that is no Python, is no literal, or is too deep."""


def offered(policies: Iterable[type[Batching]] = POLICIES) -> str:
    """Policies as a message offers them: Padded, Packed or Fixed."""
    *others, last = (policy.__name__ for policy in policies)
    return f"{', '.join(others)} or {last}" if others else last


def described_policy(described: object) -> tuple[str, dict[str, Any]] | None:
    """The class name and the value of every field that the repr of a policy says; None where it is
    the repr of none that is known here.

    A field that it does not name has its default, so that a policy saved before the field came is
    the same as one that leaves it alone.
    """
    try:
        call = ast.parse(str(described), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            return None
        values = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except _NO_LITERALS:
        return None
    policy: Any = _policies().get(call.func.id)
    if policy is None:
        return None
    defaults = {field.name: field.default for field in fields(policy)}
    return policy.__name__, {k: v for k, v in (defaults | values).items() if v is not MISSING}


def policy_of(described: object) -> Batching:
    """The policy that a repr describes, as a saved state has it.

    Raises:
        ConfigError: There is none of that name here, or it does not take what the repr says.
    """
    if found := described_policy(described):
        name, values = found
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return _policies()[name](**values)
    raise ConfigError(
        f"{described}: is no policy that is known here. Use {offered()}, or a program that imports "
        "its class."
    )


def _policies(family: type[Batching] = Batching) -> dict[str, type[Batching]]:
    """Every policy with fields by its name, those of other projects too; ours keep their names."""
    found: dict[str, type[Batching]] = {}
    for policy in family.__subclasses__():
        found |= _policies(policy) | ({policy.__name__: policy} if is_dataclass(policy) else {})
    return found | {policy.__name__: policy for policy in POLICIES}


def _check_sizes(policy: Padded | Packed | Fixed, *names: str) -> None:
    for name in names:
        size = checks.whole(name, getattr(policy, name), least=1, most=checks.MOST)
        object.__setattr__(policy, name, size)  # a plain int, whatever was given


def _check_spread(policy: Padded | Fixed) -> None:
    object.__setattr__(policy, "spread", checks.share("spread", policy.spread))


def _check_long_rows(policy: Padded | Packed) -> None:
    word = checks.choice("long_rows", policy.long_rows, get_args(LongRows))
    object.__setattr__(policy, "long_rows", word)
