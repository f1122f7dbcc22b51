"""Mixture: several data sets read as one, in proportion to weights by tokens.

Every window has record batches of all sources in proportion, so sorting, packing and steps mix the
sources inside a micro-batch. A mixture is planned, resumed and resized like a single data set: the
number of record batches that a source gave before window k is computed, not stored. Torch-free.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from os import PathLike
from typing import Any, TypeGuard, get_args

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.store import Store, StorePath
from tokenfeed.pipeline.planning.schedule import Exhausted

_LARGEST_RATIO = 10**9
"""Largest ratio of two weights. Above it, an epoch that repeats a source takes too long."""


_WEIGHTS = "a dict from folders to weights, with at least one folder"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Data sets and their weights: `Mixture({"code/": 0.7, "prose/": 0.3})`.

    A list of folders is read as one data set: `Mixture(["2025/", "2026/"])` reads every row of each
    once an epoch, in proportion to their tokens.
    """

    weights: Mapping[StorePath, float] | Sequence[StorePath]
    """Folder or URL -> share of the tokens. Only the proportions matter. Or the folders alone."""
    exhausted: Exhausted = "repeat"
    """What happens when a source runs out: "repeat", "stop" or "continue"."""

    def __post_init__(self) -> None:
        exhausted = checks.choice("exhausted", self.exhausted, get_args(Exhausted))
        object.__setattr__(self, "exhausted", exhausted)
        if are_folders(self.weights):
            object.__setattr__(self, "weights", tuple(self.weights))
        elif isinstance(self.weights, Mapping) and self.weights:
            object.__setattr__(self, "weights", checked_weights(self.weights))
        else:
            raise checks.refusal("weights", self.weights, f"a list of folders, or {_WEIGHTS}")

    def weights_of(self, sources: "Sequence[OpenedSplit]") -> tuple[float, ...]:
        """Return the weight of each opened data set: its tokens, if the mixture has no weights."""
        if isinstance(self.weights, Mapping):
            return tuple(self.weights.values())
        return tuple(float(source.tokens) for source in sources)


def are_folders(data: Any) -> TypeGuard[Sequence[StorePath]]:
    """Return whether a value is a list of at least one folder."""
    is_list = isinstance(data, Sequence) and not isinstance(data, str) and len(data) > 0
    return is_list and all(isinstance(each, str | PathLike | Store) for each in data)


def checked_weights(weights: Any) -> dict[StorePath, float]:
    """Return the weight of each data set of a mixture, or of a stage.

    Raises:
        ConfigError: No data set is named, or a weight is not above 0, or too far from another.
    """
    if not isinstance(weights, Mapping) or not weights:
        raise checks.refusal("weights", weights, _WEIGHTS)
    checked = {folder: _weight(folder, weight) for folder, weight in weights.items()}
    least = min(checked, key=checked.__getitem__)
    most = max(checked, key=checked.__getitem__)
    if checked[most] / _LARGEST_RATIO > checked[least]:
        raise ConfigError(
            f"{most} has weight {checked[most]} and {least} has weight {checked[least]}: no "
            f"weight may be more than {_LARGEST_RATIO:,} times another. Leave {least} out."
        )
    return checked


def proportions(weights: Iterable[float]) -> list[Fraction]:
    """Return the exact share of each weight in their sum."""
    shares = [Fraction(str(weight)) for weight in weights]  # as written: 0.1 is exactly a tenth
    whole = sum(shares)
    return [share / whole for share in shares]


def _weight(folder: object, weight: object) -> float:
    """Return a weight as a float with the same decimal form, so that 0.7 of any type is equal."""
    if not isinstance(folder, str | PathLike | Store):
        raise checks.refusal("path", folder, "a folder or a URL")
    try:
        read = float(Fraction(str(weight)))
    except (ValueError, OverflowError):  # nan and infinity
        read = 0.0
    if isinstance(weight, bool) or not isinstance(weight, Real) or not read > 0:
        raise ConfigError(f"the weight of {folder} is {weight!r}: expected a number above 0.")
    return read
