"""Makes windows: one rank's slice of each, as the plan says, from the data.

The whole way of a window on one screen. It goes to worker processes as a pickle, and makes the same
there as here. Torch-free.
"""

from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.planning.ahead import Ahead
from tokenfeed.pipeline.planning.batching import WindowPlan, plan_window
from tokenfeed.pipeline.planning.digest import Spans, digests, tokens_by_source
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.rounds import Rounds, deal_rounds
from tokenfeed.pipeline.windows.gathering import Gathered, column_of, gather
from tokenfeed.pipeline.windows.index import Index, RoundIndex
from tokenfeed.pipeline.windows.layout import Layout, Sequences, lay_out
from tokenfeed.pipeline.windows.rank_slice import TARGETS, RankSlice
from tokenfeed.pipeline.windows.reader import WindowReader

__all__ = ["WindowMaker"]


@dataclass(frozen=True, slots=True)
class WindowMaker:
    """Which slice of which plan, and the data to make it from."""

    plan: Plan
    reader: WindowReader
    rank: int
    """Among the ranks that have the plan in common: those of one stream."""
    world_size: int
    """How many these are."""

    def make(self, position: Position) -> RankSlice:
        """Decode a window and gather this rank's micro-batches of it, from a position on.

        Raises:
            ShardFormatError: The data are damaged.
            ResumeError: The window has no such micro-batch.
        """
        plan, (epoch, nth, first) = self.plan, position
        number = plan.window_number(nth)
        window = self.reader.read(plan.order.window(epoch, number), Ahead(plan, position))
        planned = plan_window(
            window.rows.lengths,
            plan.batching,
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
        gathered = gather(window, planned, rounds, spans)
        added = self._added(spans, planned, rounds, digests(spans, planned, rounds, epoch, number))
        index = Index(gathered.pieces, self._layout(gathered), added)
        return RankSlice(epoch, nth, gathered.per_token, index, index)

    def _layout(self, gathered: Gathered) -> Layout:
        pieces = gathered.pieces
        return lay_out(
            Sequences(pieces.lengths, pieces.batches, pieces.sequences),
            self.plan.batching.multiple_of,
            packs=self.plan.batching.packs,
            row_targets=pieces.targets is not None,
            token_targets=gathered.per_token.get(TARGETS),
            context=gathered.context,
        )

    def _added(
        self, spans: Spans, planned: WindowPlan, rounds: Rounds, digest: np.ndarray
    ) -> RoundIndex:
        """What each round adds to what was delivered."""
        return RoundIndex(
            filler=rounds.filler,
            position=rounds.ends,
            ends_step=rounds.ends_step,
            digests=digest,
            tokens=tokens_by_source(spans, planned, rounds, np.array(self.plan.row_ends)),
        )
