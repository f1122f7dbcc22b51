"""Make windows: one rank's slice of each window, from the plan and the data.

`WindowMaker.make` is the whole way of a window: read its record batches, plan its micro-batches,
deal them to the ranks, copy those of this rank. Worker processes get a `WindowMaker` as a pickle
and make the same slices as the parent would. Torch-free.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged, join, offsets_of, round_up, take
from tokenfeed.pipeline.errors import ResumeError, memory_explained
from tokenfeed.pipeline.format.kinds import TargetRule
from tokenfeed.pipeline.format.schema import (
    KINDS,
    Role,
    is_target,
    no_target,
    role_of,
)
from tokenfeed.pipeline.planning.batching import (
    Rounds,
    WindowPlan,
    deal_rounds,
    digests,
    file_order,
    missing_rounds,
    plan_part,
    tokens_by_source,
    with_fillers,
)
from tokenfeed.pipeline.planning.permutation import derive_key
from tokenfeed.pipeline.planning.plan import Ahead, Plan, Position
from tokenfeed.pipeline.planning.policies import Batching, Pieces, regroup
from tokenfeed.pipeline.planning.resized import plan_resized
from tokenfeed.pipeline.windows.rank_slice import (
    IS_IGNORED,
    TARGETS,
    RankSlice,
    values_without_row,
)
from tokenfeed.pipeline.windows.reader import Window, WindowReader
from tokenfeed.pipeline.windows.row_map import RowMap


@dataclass(frozen=True, slots=True)
class WindowMaker:
    """Makes one rank's slices of the windows of a plan."""

    plan: Plan
    reader: WindowReader
    rank: int
    """Rank among the ranks that share the plan, which are the ranks of one stream."""
    world_size: int
    """Number of ranks that share the plan."""
    targets_by: TargetRule | None = None
    """Which tokens of conversations are targets; None: all. The reader must read their kinds."""
    row_map: RowMap | None = None
    """Changes the tokens of each row; None: rows stay as they are."""

    @memory_explained("a window")
    def make(self, position: Position) -> RankSlice:
        """Decode a window and copy this rank's micro-batches, from a position on.

        Raises:
            ShardFormatError: The data is damaged.
            RemoteError: A store cannot be reached or refuses the request.
            ConfigError: `last`="drop" leaves out all rows of the only window.
            LoaderError: The memory does not suffice.
            ResumeError: The window has no micro-batch with the number of the position.
        """
        plan, (epoch, nth, first) = self.plan, position
        number = plan.window_number(nth)
        batching = plan.batching_of(number)
        window = self.reader.read(plan.order.window(epoch, number), Ahead(plan, position))
        planned = self._planned(window, epoch, nth)
        left_out = (0, 0)
        if batching.last == "drop":
            left_out = _left_out(planned, window)
            if not planned.step_offsets[-1] and (plan.num_windows == 1 or not plan.has_end):
                raise plan.without_steps(f"window {nth}")
        rounds = deal_rounds(
            planned.step_offsets,
            plan.micro_batches_per_step,
            first=first,
            rank=self.rank,
            world_size=self.world_size,
        )
        if not planned.step_offsets[-1]:
            return RankSlice.without_batches(left_out, len(plan.row_ends))
        if not len(rounds.starts):
            raise ResumeError(f"cannot resume: window {nth} has no micro-batch {first}.")
        numbers = window.numbers.take(planned.rows)
        lengths = planned.lengths
        digest = digests(planned, rounds, numbers, lengths, derive_key(epoch, number))
        tokens = tokens_by_source(planned, rounds, numbers, lengths, np.array(plan.row_ends))
        if plan.num_streams > 1:
            at = missing_rounds(
                planned.step_offsets,
                plan.micro_batches_per_step,
                rounds,
                first=first,
                world_size=self.world_size,
            )
            rounds = with_fillers(rounds, at)
            digest, tokens = np.insert(digest, at, 0), np.insert(tokens, at, 0, axis=0)
        mine = _pick(planned, rounds)
        if mine is not planned:
            numbers, lengths = window.numbers.take(mine.rows), mine.lengths
        if self.row_map is not None:
            rows, name_of = np.unique(mine.rows), self.reader.name_of_row
            window = self.row_map.apply(window, rows, epoch, nth, name_of)
        known = {
            "rows": numbers,
            "piece_lengths": lengths,
            "is_filler": rounds.filler,
            "positions": rounds.ends,
            "steps": rounds.steps,
            "digests": digest,
            "source_tokens": tokens,
            "left_out": np.array(left_out),
        }
        return self._slice(window, mine, batching, self._rule_of(number), known)

    def _planned(self, window: Window, epoch: int, nth: int) -> WindowPlan:
        plan, lengths = self.plan, window.rows.lengths
        number = plan.window_number(nth)
        batching, draw = plan.batching_of(number), plan.order.draw(epoch, number)
        given: Any = {"step_size": plan.micro_batches_per_step, "draw": draw}
        given["labels"] = _column_of(window, "target")
        if (tokens := plan.part_of(number)) is not None:
            return plan_part(tokens, lengths, batching, **given)
        rows = self._rows_in_order(window) if plan.order.keeps_rows else None
        return plan_resized(plan.earlier_in(epoch, nth), lengths, batching, rows=rows, **given)

    def _slice(
        self,
        window: Window,
        mine: WindowPlan,
        batching: Batching,
        rule: TargetRule | None,
        known: dict[str, np.ndarray],
    ) -> RankSlice:
        """Copy and pad the micro-batches of this rank.

        Args:
            window: The decoded window, after the user's function.
            mine: The micro-batches of this rank, in the order of its rounds.
            batching: The policy of the window.
            rule: Which tokens of conversations are targets; None: all.
            known: Fields of the slice: rows and lengths of its pieces, and what belongs to rounds.
        """
        lengths, begin = known["piece_lengths"], batching.begin_token
        columns, row_targets = self._targets(window, mine.cut, rule, has_begin=begin is not None)
        columns = {name: take(of, mine.cut.offsets, mine.pieces) for name, of in columns.items()}
        held = lengths
        if begin is not None:
            held = lengths + 1
            for name, value in values_without_row(columns, begin).items():
                columns[name] = _put_before(columns[name], lengths, value)
        batches, sequences = mine.batch_offsets, mine.sequence_offsets
        sizes = _sequence_sizes(held, sequences)
        padded = round_up(np.maximum.reduceat(sizes, batches[:-1]), batching.multiple_of)
        if batching.last == "fill":
            offsets = np.arange(len(sizes) + 1) if sequences is None else sequences
            full = np.array([batching.rows_to_fill(length) for length in padded.tolist()])
            batches, sequences = _with_empty(batches, offsets, full)
            sizes = _sequence_sizes(held, sequences)
        segments = segment_offsets = None
        if batching.packs and sequences is not None:
            segments, segment_offsets = _segments_of(held, sequences, batches, padded)
        pieces = batches if sequences is None else sequences[batches]
        tokens = offsets_of(np.add.reduceat(sizes, batches[:-1], dtype=np.int64))
        if row_targets is not None:
            row_targets = row_targets[mine.rows]
            num_targets = _counts(is_target(row_targets), pieces)
        elif TARGETS in columns:
            num_targets = _counts(is_target(columns[TARGETS]), tokens)
        elif IS_IGNORED in columns:
            num_targets = _counts(~columns[IS_IGNORED], tokens)
        else:
            num_targets = np.diff(tokens) - np.diff(pieces)
        return RankSlice(
            columns=columns,
            starts=mine.starts,
            row_targets=row_targets,
            sequence_lengths=sizes.astype(np.int32, copy=False),
            sequence_offsets=sequences,
            batch_offsets=batches,
            piece_offsets=pieces,
            token_offsets=tokens,
            padded_lengths=padded.astype(np.int64),
            num_targets=num_targets,
            segments=segments,
            segment_offsets=segment_offsets,
            **known,
        )

    def _targets(
        self, window: Window, cut: Pieces, rule: TargetRule | None, *, has_begin: bool
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Decide which rows and tokens of a window are targets. Nothing else does.

        Returns:
            The columns of a slice, not padded yet; and the target of each row, shape (R,), None if
            rows have none.
        """
        lengths = window.rows.lengths
        columns = {
            TARGETS if role_of(name) == "target" else name: values
            for name, values in window.rows.per_token.items()
        }
        kinds, prompts = columns.pop(KINDS, None), _column_of(window, "context")
        skipped = np.zeros(len(lengths), np.bool_)
        if self.plan.skip:
            skipped = self.plan.is_skipped(window.numbers)
        if (targets := _column_of(window, "target")) is not None:
            return columns, _without_targets(targets, skipped)
        if TARGETS in columns:
            columns[TARGETS] = _without_targets(columns[TARGETS], np.repeat(skipped, lengths))
            return columns, None
        ignored = None
        if prompts is not None:
            prompts = np.minimum(prompts, lengths)
            parts = np.stack([prompts, lengths - prompts], axis=1)
            ignored = np.repeat(np.tile([True, False], len(lengths)), parts.ravel())
        elif kinds is not None and rule is not None:
            ignored = ~rule.mask(kinds, lengths)
        if skipped.any():
            of_skipped = np.repeat(skipped, lengths)
            ignored = of_skipped if ignored is None else ignored | of_skipped
        if ignored is not None:
            if not has_begin:
                ignored[cut.offsets[:-1]] = True  # the first token of a piece has no context
            columns[IS_IGNORED] = ignored
        return columns, None

    def _rule_of(self, number: int) -> TargetRule | None:
        """Return which tokens of conversations are targets in a window; None: all."""
        stage = self.plan.stage_of(number)
        if stage and stage.targets is not None:
            return TargetRule.from_setting(stage.targets, self.reader.columns)
        return self.targets_by

    def _rows_in_order(self, window: Window) -> np.ndarray:
        """Return the rows of a window in the order of their data sets, for `order`="file"."""
        sources = np.searchsorted(self.plan.row_ends, window.numbers, side="right")
        return file_order(window.rows.lengths, sources)


def _left_out(planned: WindowPlan, window: Window) -> tuple[int, int]:
    """Return how many rows of a window have no token in its plan, and how many tokens it lacks."""
    lengths = window.rows.lengths
    rows = np.zeros(len(lengths), np.bool_)
    rows[planned.rows] = True
    tokens = lengths.sum() - planned.lengths.sum(dtype=np.int64)
    return int(len(rows) - rows.sum()), int(tokens)


def _sequence_sizes(lengths: np.ndarray, sequence_offsets: np.ndarray | None) -> np.ndarray:
    """Return the tokens of each sequence, shape (S,). `lengths` are those of the pieces."""
    if sequence_offsets is None:
        return lengths
    return np.diff(offsets_of(lengths)[sequence_offsets])


def _with_empty(
    batch_offsets: np.ndarray, sequence_offsets: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return both offsets with empty sequences at the end of micro-batches that have fewer than
    `rows` sequences, shape (M,)."""
    counts = np.diff(batch_offsets)
    missing = np.maximum(rows - counts, 0)
    ends = np.repeat(batch_offsets[1:], missing)
    return offsets_of(counts + missing), np.insert(sequence_offsets, ends, sequence_offsets[ends])


def _segments_of(
    lengths: np.ndarray,
    sequence_offsets: np.ndarray,
    batch_offsets: np.ndarray,
    padded_lengths: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots where documents and paddings begin and each batch ends, int32, and where
    each batch begins among them, shape (M + 1,).

    Documents and paddings are the parts of a batch. Their lengths in order of slots give their
    slots. In the example of `rank_slice`, the parts have 3, 5, 2, 4 and 2 slots.

    Args:
        lengths: Tokens of each document, shape (P,).
        sequence_offsets: Where each sequence begins among the documents, shape (S + 1,).
        batch_offsets: Where each batch begins among the sequences, shape (M + 1,).
        padded_lengths: Slots of each sequence of a batch, shape (M,).
    """
    ends = sequence_offsets[1:]
    padding = np.repeat(padded_lengths, np.diff(batch_offsets))
    padding -= _sequence_sizes(lengths, sequence_offsets)
    is_padded = padding > 0
    parts = np.insert(lengths, ends[is_padded], padding[is_padded])
    bounds = np.append(0, ends + np.cumsum(is_padded))[batch_offsets]  # of batches among the parts
    slots = offsets_of(parts)
    begins = slots[:-1] - np.repeat(slots[bounds[:-1]], np.diff(bounds))
    segments = np.insert(begins, bounds[1:], np.diff(slots[bounds]))
    return segments.astype(np.int32), bounds + np.arange(len(bounds))


def _put_before(values: np.ndarray, lengths: np.ndarray, value: float) -> np.ndarray:
    """Put a value before each piece of a column with one value per token."""
    return join([np.array([value]), Ragged(values, lengths)]).values


def _column_of(window: Window, role: Role) -> np.ndarray | None:
    """Return the column of a role with one value per row, shape (R,); None if the window has none.

    A plan has at most one column of each role.
    """
    columns = window.rows.per_row.items()
    return next((values for name, values in columns if role_of(name) == role), None)


def _without_targets(targets: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return targets of which no loss counts some."""
    if not where.any():
        return targets
    value = no_target(is_float=targets.dtype.kind == "f")
    return np.where(where, value, targets).astype(targets.dtype)


def _counts(where: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the number of true values in each range of a flat array."""
    ranges = pairwise(offsets.tolist())
    return np.array([np.count_nonzero(where[start:stop]) for start, stop in ranges])


def _pick(plan: WindowPlan, rounds: Rounds) -> WindowPlan:
    """Return the micro-batches of this rank, in the order of its rounds, each as a step.

    A filler has one sequence.
    """
    if rounds.takes_all:
        return plan
    starts = plan.batch_offsets[:-1][rounds.mine]
    sizes = np.where(rounds.filler, 1, np.diff(plan.batch_offsets)[rounds.mine])
    batches = offsets_of(sizes)
    chosen = np.arange(batches[-1]) + np.repeat(starts - batches[:-1], sizes)
    steps = np.arange(len(batches))
    if plan.sequence_offsets is None:
        return WindowPlan(plan.cut, plan.pieces[chosen], None, batches, steps)
    pieces, sequences = regroup(plan.pieces, plan.sequence_offsets, chosen)
    return WindowPlan(plan.cut, pieces, sequences, batches, steps)
