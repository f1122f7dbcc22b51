"""Make windows: one rank's slice of each window, from the plan and the data.

`WindowMaker.make` is the whole way of a window: read its record batches, plan its micro-batches,
deal them to the ranks, copy those of this rank. Worker processes get a `WindowMaker` as a pickle
and make the same slices as the parent would. Torch-free.
"""

from dataclasses import dataclass, replace

import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged, join, offsets_of, take
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.kinds import TargetRule
from tokenfeed.pipeline.format.schema import INPUT_IDS, KINDS, Role, no_target, role_of
from tokenfeed.pipeline.planning.batching import (
    Rounds,
    Spans,
    WindowPlan,
    deal_rounds,
    digests,
    file_order,
    missing_rounds,
    plan_window,
    tokens_by_source,
    with_fillers,
)
from tokenfeed.pipeline.planning.plan import Ahead, Plan, Position
from tokenfeed.pipeline.planning.policies import regroup
from tokenfeed.pipeline.windows.layout import PieceIndex, lay_out
from tokenfeed.pipeline.windows.rank_slice import TARGETS, Index, RankSlice, RoundIndex
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

    def make(self, position: Position) -> RankSlice:
        """Decode a window and copy this rank's micro-batches, from a position on.

        Raises:
            ShardFormatError: The data is damaged.
            RemoteError: A store cannot be reached or refuses the request.
            ResumeError: The window has no micro-batch with the number of the position.
        """
        plan, (epoch, nth, first) = self.plan, position
        number = plan.window_number(nth)
        batching = plan.batching_of(number)
        window = self.reader.read(plan.order.window(epoch, number), Ahead(plan, position))
        planned = plan_window(
            window.rows.lengths,
            batching,
            step_size=plan.micro_batches_per_step,
            draw=plan.order.draw(epoch, number),
            labels=_column_of(window, "target"),
            rows=self._rows_in_order(window) if plan.order.keeps_rows else None,
            earlier=plan.earlier_in(epoch, nth),
        )
        left_out = np.zeros(2, np.int64)
        if batching.last == "drop":
            left_out = _left_out(planned, window)
            if not planned.step_offsets[-1]:
                raise ConfigError(
                    f"`last`='drop' leaves out all {len(window.rows.lengths):,} rows of window "
                    f"{nth}, because they are fewer than one step takes. Use `last`='short', "
                    "smaller batches or fewer `micro_batches_per_step`."
                )
        rounds = deal_rounds(
            planned.step_offsets,
            plan.micro_batches_per_step,
            first=first,
            rank=self.rank,
            world_size=self.world_size,
        )
        if not len(rounds.starts):
            raise ResumeError(f"cannot resume: window {nth} has no micro-batch {first}.")
        spans = Spans.from_plan(planned, window.numbers, window.rows.lengths)
        digest = digests(spans, planned, rounds, epoch, number)
        tokens = tokens_by_source(spans, planned, rounds, np.array(plan.row_ends))
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
        batches, sequences, chosen = _pick(planned, rounds)
        pieces, cut = planned.pieces[chosen], planned.cut
        rows = pieces if cut.cut_from is None else cut.cut_from[pieces]
        if self.row_map is not None:
            name_of = self.reader.name_of_row
            window = self.row_map.apply(window, np.unique(rows), epoch, nth, name_of)
        per_token = {
            TARGETS if role_of(name) == "target" else name: take(values, cut.offsets, pieces)
            for name, values in window.rows.per_token.items()
            if name != KINDS
        }
        learned = None
        rule = self.targets_by
        stage = plan.stage_of(number)
        if stage and stage.targets is not None and KINDS in window.rows.per_token:
            rule = TargetRule.from_setting(stage.targets, self.reader.columns)
        if rule is not None:
            mask = rule.mask(window.rows.per_token[KINDS], window.rows.lengths)
            learned = take(mask, cut.offsets, pieces)
        starts = None if spans.starts is None else spans.starts[chosen]
        targets, context = _column_of(window, "target"), _column_of(window, "context")
        if context is not None:  # negative if the prompt ended in an earlier piece of the row
            context = context[rows].astype(np.int64) - (0 if starts is None else starts)
        targets = None if targets is None else targets[rows]
        numbers, lengths = spans.numbers[chosen], spans.lengths[chosen]
        if plan.skip and (skipped := plan.is_skipped(numbers)).any():
            ignored = np.repeat(skipped, lengths)
            targets = None if targets is None else _without_targets(targets, skipped)
            context = None if context is None else np.where(skipped, lengths, context)
            learned = ~ignored if learned is None else learned & ~ignored
            if TARGETS in per_token:
                per_token[TARGETS] = _without_targets(per_token[TARGETS], ignored)
        index = PieceIndex(numbers, lengths, batches, starts, sequences, targets)
        index = index.filled(batching)
        sizes = index
        if (begin := batching.begin_token) is not None:
            per_token = {
                name: _put_before(values, index.lengths, _value_of_begin(name, values, begin))
                for name, values in per_token.items()
            }
            learned = None if learned is None else _put_before(learned, index.lengths, 0)
            context = None if context is None else np.maximum(context, 0) + 1
            sizes = replace(index, lengths=index.lengths + 1)
        layout = lay_out(
            sizes,
            batching.multiple_of,
            packs=batching.packs,
            token_targets=per_token.get(TARGETS),
            context=context,
            learned=learned,
        )
        added = RoundIndex(
            filler=rounds.filler,
            position=rounds.ends,
            steps=rounds.steps,
            digests=digest,
            tokens=tokens,
            left_out=np.outer(np.arange(1 - len(rounds.ends), 1) == 0, left_out),
        )
        whole = Index(index, layout, added)
        return RankSlice(per_token, whole, whole)

    def _rows_in_order(self, window: Window) -> np.ndarray:
        """Return the rows of a window in the order of their data sets, for `order`="file"."""
        sources = np.searchsorted(self.plan.row_ends, window.numbers, side="right")
        return file_order(window.rows.lengths, sources)


def _left_out(planned: WindowPlan, window: Window) -> np.ndarray:
    """Return how many rows of a window have no token in its plan, and how many tokens it lacks."""
    rows = np.zeros(len(window.rows.lengths), np.bool_)
    rows[planned.cut.rows[planned.pieces]] = True
    tokens = window.rows.lengths.sum() - planned.cut.lengths[planned.pieces].sum()
    return np.array([len(rows) - rows.sum(), tokens])


def _put_before(values: np.ndarray, lengths: np.ndarray, value: float) -> np.ndarray:
    """Put a value before each piece of a column with one value per token."""
    return join([np.array([value]), Ragged(values, lengths)]).values


def _value_of_begin(column: str, values: np.ndarray, token: int) -> float:
    """Return the value that a begin token has in a column."""
    if column == TARGETS:
        return no_target(is_float=values.dtype.kind == "f")
    return token if column == INPUT_IDS else 0


def _column_of(window: Window, role: Role) -> np.ndarray | None:
    """Return the column of a role with one value per row, shape (R,); None if the window has none.

    A plan has at most one column of each role.
    """
    columns = window.rows.per_row.items()
    return next((values for name, values in columns if role_of(name) == role), None)


def _without_targets(targets: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return targets of which no loss counts some."""
    value = no_target(is_float=targets.dtype.kind == "f")
    return np.where(where, value, targets).astype(targets.dtype)


def _pick(
    plan: WindowPlan, rounds: Rounds
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | slice]:
    """Return offsets of this rank's micro-batches and sequences, and the numbers of their pieces.

    A filler has one sequence.
    """
    if rounds.takes_all:
        return plan.batch_offsets, plan.sequence_offsets, slice(None)
    starts = plan.batch_offsets[:-1][rounds.mine]
    sizes = np.where(rounds.filler, 1, np.diff(plan.batch_offsets)[rounds.mine])
    batches = offsets_of(sizes)
    sequences = np.arange(batches[-1]) + np.repeat(starts - batches[:-1], sizes)
    if plan.sequence_offsets is None:
        return batches, None, sequences
    pieces, offsets = regroup(np.arange(len(plan.pieces)), plan.sequence_offsets, sequences)
    return batches, offsets, pieces
