"""A user's function on rows: it changes the tokens of each row after they were read.

The function runs in the process that makes the window, on whole rows, before they are cut into
pieces. It keeps the number of tokens, because the plan has arranged rows by their lengths. Its
random numbers depend on the seed, the epoch, the window and the row only. So all ranks that get a
piece of a row see the same row, and a resumed run sees the rows of an uninterrupted one.
Torch-free.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.checks import refusal
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS, role_of
from tokenfeed.pipeline.planning.permutation import derive_key
from tokenfeed.pipeline.windows.rank_slice import TARGETS
from tokenfeed.pipeline.windows.reader import Window

MapRow = Callable[[dict[str, np.ndarray], "np.random.Generator"], Mapping[str, np.ndarray]]
"""Takes the columns of a row and random numbers of the row; returns the columns to replace.

Columns have one value per token, shape (n,), int64 or float: `input_ids`, and `token_type_ids`,
`labels` (of task `tag`), `kinds` (if targets depend on them) and kept columns where the data set
has them. The function may change them in place, and return them. It may also return `labels` where
rows have none, for masked language modelling: the target of each slot itself, -100 where no loss
counts. It returns the same columns for every row.
"""

_MAP = 0x6D6170  # separates the random numbers of rows from those of the shuffle


@dataclass(frozen=True, slots=True)
class RowMap:
    """Applies a function to the rows of windows."""

    function: MapRow
    vocabulary_size: int
    seed: int

    @classmethod
    def from_setting(cls, function: MapRow, vocabulary_size: int, seed: int) -> Self:
        """Return the map of a loader's `map`.

        Raises:
            ConfigError: `map` is not a function.
        """
        if not callable(function):
            raise refusal("map", function, "a function of a row's columns and a Generator, or None")
        return cls(function, vocabulary_size, seed)

    def apply(
        self,
        window: Window,
        rows: np.ndarray,
        epoch: int,
        number: int,
        name_of: Callable[[int], str],
    ) -> Window:
        """Return the window with changed rows.

        Args:
            window: The decoded window. It is not changed.
            rows: Which of its rows to change, shape (K,); other rows stay as they are.
            epoch: Number of the epoch.
            number: Number of the window in the epoch.
            name_of: Returns the name of a row for messages, from its number over all sources.

        Raises:
            ConfigError: The function raised an error, changed the number of tokens, or returned
                wrong values. The message names the row.
        """
        columns = {name: values.copy() for name, values in window.rows.per_token.items()}
        if not any(role_of(key) == "target" for key in (*columns, *window.rows.per_row)):
            columns[TARGETS] = np.full(len(columns[INPUT_IDS]), IGNORED, np.int32)
        given, returned = window.rows.per_token.keys(), set[frozenset[str]]()
        bounds = offsets_of(window.rows.lengths)
        for row in rows.tolist():
            place = slice(bounds[row], bounds[row + 1])
            row_number = int(window.numbers[row])
            name = name_of(row_number)
            rng = np.random.default_rng(derive_key(self.seed, _MAP, epoch, number, row_number))
            try:
                row_columns = {key: _wide(columns[key][place]) for key in given}
                changed = self.function(row_columns, rng)
            except Exception as error:
                shown = " ".join(str(error).split())
                raise ConfigError(
                    f"`map`: the function failed on {name}: {type(error).__name__}: {shown}"
                ) from error
            self._write(changed, columns, place, name, has_new_labels=TARGETS not in given)
            returned.add(frozenset(changed))
            if len(returned) > 1:
                raise ConfigError(
                    f"`map`: the function returned {', '.join(sorted(changed)) or 'no column'} for "
                    f"{name}, and other columns for the row before. Return the same columns "
                    "for every row."
                )
        if not any(TARGETS in keys for keys in (given, *returned)):
            columns.pop(TARGETS, None)
        return replace(window, rows=replace(window.rows, per_token=columns))

    def _write(
        self,
        changed: Mapping[str, np.ndarray],
        columns: dict[str, np.ndarray],
        place: slice,
        name: str,
        *,
        has_new_labels: bool,
    ) -> None:
        """Write the returned columns of a row."""
        if not isinstance(changed, Mapping) or not set(changed) <= columns.keys():
            got = list(changed) if isinstance(changed, Mapping) else type(changed).__name__
            raise ConfigError(
                f"`map`: the function returned {got} for {name}. Expected a dict with some of the "
                f"columns {', '.join(columns)}."
            )
        for key, values in changed.items():
            values, tokens = np.asarray(values), place.stop - place.start
            if values.shape != (tokens,):
                raise ConfigError(
                    f"`map`: {name} has {tokens} tokens, but the function returned `{key}` of "
                    f"shape {values.shape}. It must keep the number of tokens, by which rows are "
                    "planned: truncate what is too long, and leave room when you pretokenize."
                )
            if columns[key].dtype.kind == "f":
                least, most, kinds, expected = -np.inf, np.inf, "biuf", "numbers"
            else:
                limits = np.iinfo(columns[key].dtype)
                least, most, kinds, expected = limits.min, limits.max, "biu", "whole numbers"
            if key == INPUT_IDS or (key == TARGETS and has_new_labels):
                least, most = 0, self.vocabulary_size - 1
            checked = np.where(values == IGNORED, 0, values) if key == TARGETS else values
            if values.dtype.kind not in kinds or checked.min() < least or checked.max() > most:
                raise ConfigError(
                    f"`map`: the function returned wrong `{key}` for {name}: {values.dtype} "
                    f"from {values.min()} to {values.max()}. Expected {expected} from {least} to "
                    f"{most}{f', or {IGNORED}' if key == TARGETS else ''}."
                )
            columns[key][place] = values


def _wide(values: np.ndarray) -> np.ndarray:
    """Return a copy for the user's function: integers as int64, floats unchanged."""
    return values.astype(np.int64 if values.dtype.kind in "iu" else values.dtype)
