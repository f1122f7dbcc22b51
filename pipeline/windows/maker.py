"""Make windows: one rank's slice of each window, from the plan and the data.

`WindowMaker.make` is the whole way of a window: read its record batches, plan its micro-batches,
deal them to the ranks, copy those of this rank. Worker processes get a `WindowMaker` as a pickle
and make the same slices as the parent would. Torch-free.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of, take
from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.kinds import TargetRule
from tokenfeed.pipeline.format.schema import KINDS, Role, role_of
from tokenfeed.pipeline.planning.ahead import Ahead
from tokenfeed.pipeline.planning.batching import (
    Rounds,
    Spans,
    WindowPlan,
    deal_rounds,
    digests,
    plan_window,
    tokens_by_source,
)
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.policy import Batching, regroup
from tokenfeed.pipeline.windows.layout import Layout, Sequences, lay_out
from tokenfeed.pipeline.windows.rank_slice import TARGETS, Index, PieceIndex, RankSlice, RoundIndex
from tokenfeed.pipeline.windows.reader import Window, WindowReader
from tokenfeed.pipeline.windows.row_map import RowMap

__all__ = ["Gathered", "WindowMaker", "column_of", "gather"]


class Gathered(NamedTuple):
    """One rank's part of a window: its tokens, its pieces and their prompts."""

    per_token: dict[str, np.ndarray]
    """See `RankSlice.per_token`."""
    pieces: PieceIndex
    context: np.ndarray | None
    """Number of leading tokens of each piece that are a prompt, not targets, shape (P,), int64.
    Negative if the prompt ended in an earlier piece of a cut row."""
    learned: np.ndarray | None
    """Which tokens are targets, shape (N,), bool; None: those after the context."""


def gather(
    window: Window,
    plan: WindowPlan,
    rounds: Rounds,
    spans: Spans,
    targets_by: TargetRule | None = None,
    change: Callable[[Window, np.ndarray], Window] | None = None,
) -> Gathered:
    """Copy one rank's micro-batches out of a decoded window. `change` changes some of its rows
    before."""
    batches, sequences, chosen = _pick(plan, rounds)
    pieces = plan.pieces[chosen]
    rows = pieces if plan.cut.cut_from is None else plan.cut.cut_from[pieces]
    if change is not None:
        window = change(window, np.unique(rows))
    per_token = {
        TARGETS if role_of(name) == "target" else name: take(values, plan.cut.offsets, pieces)
        for name, values in window.rows.per_token.items()
        if name != KINDS
    }
    learned = None
    if targets_by is not None:
        mask = targets_by.mask(window.rows.per_token[KINDS], window.rows.lengths)
        learned = take(mask, plan.cut.offsets, pieces)
    starts = None if spans.starts is None else spans.starts[chosen]
    targets, context = column_of(window, "target"), column_of(window, "context")
    index = PieceIndex(
        spans.numbers[chosen],
        spans.lengths[chosen],
        batches,
        starts,
        sequences,
        None if targets is None else targets[rows],
    )
    if context is not None:
        context = context[rows].astype(np.int64)
        context = context if starts is None else context - starts
    return Gathered(per_token, index, context, learned)


def column_of(window: Window, role: Role) -> np.ndarray | None:
    """Return the column of a role with one value per row, shape (R,); None if the window has none.

    A plan has at most one column of each role.
    """
    columns = window.rows.per_row.items()
    return next((values for name, values in columns if role_of(name) == role), None)


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
        window = self.reader.read(plan.order.window(epoch, number), Ahead(plan, position))
        planned = plan_window(
            window.rows.lengths,
            plan.batching_of(number),
            step_size=plan.micro_batches_per_step,
            draw=plan.order.draw(epoch, number),
            labels=column_of(window, "target"),
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
        change = partial(self.row_map.apply, epoch=epoch, number=nth) if self.row_map else None
        gathered = gather(window, planned, rounds, spans, self.targets_by, change)
        added = self._added(spans, planned, rounds, digests(spans, planned, rounds, epoch, number))
        index = Index(*self._laid_out(gathered, plan.batching_of(number)), added)
        return RankSlice(epoch, nth, gathered.per_token, index, index)

    def _laid_out(self, gathered: Gathered, batching: Batching) -> tuple[PieceIndex, Layout]:
        """Return the pieces, with the rows of padding that fill micro-batches, and their layout."""
        pieces = gathered.pieces
        sequences = Sequences(pieces.lengths, pieces.batches, pieces.sequences)
        sequences = sequences.filled(batching)
        pieces = replace(pieces, batches=sequences.batches, sequences=sequences.offsets)
        return pieces, lay_out(
            sequences,
            batching.multiple_of,
            packs=batching.packs,
            row_targets=pieces.targets is not None,
            token_targets=gathered.per_token.get(TARGETS),
            context=gathered.context,
            learned=gathered.learned,
        )

    def _added(
        self, spans: Spans, planned: WindowPlan, rounds: Rounds, digest: np.ndarray
    ) -> RoundIndex:
        """Return the position, digest and tokens of each round."""
        return RoundIndex(
            filler=rounds.filler,
            position=rounds.ends,
            ends_step=rounds.ends_step,
            digests=digest,
            tokens=tokens_by_source(spans, planned, rounds, np.array(self.plan.row_ends)),
        )
