"""Gathering: one rank's micro-batches copied out of a decoded window, in the order of delivery."""

from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.format.ragged import take
from tokenfeed.pipeline.format.schema import Role, role_of
from tokenfeed.pipeline.planning.batching import WindowPlan
from tokenfeed.pipeline.planning.digest import Spans
from tokenfeed.pipeline.planning.pieces import regroup
from tokenfeed.pipeline.planning.rounds import Rounds
from tokenfeed.pipeline.windows.index import PieceIndex
from tokenfeed.pipeline.windows.rank_slice import TARGETS
from tokenfeed.pipeline.windows.reader import Window

__all__ = ["Gathered", "column_of", "gather"]


class Gathered(NamedTuple):
    """What a rank gets of a window."""

    per_token: dict[str, np.ndarray]
    """See `RankSlice.per_token`."""
    pieces: PieceIndex
    context: np.ndarray | None
    """Leading tokens of each piece that are given and no target, shape (P,), int64; below 0 where
    a cut row has given them before."""


def gather(window: Window, plan: WindowPlan, rounds: Rounds, spans: Spans) -> Gathered:
    """Copy one rank's micro-batches out of a decoded window."""
    batches, sequences, chosen = _pick(plan, rounds)
    pieces = plan.pieces[chosen]
    per_token = {
        TARGETS if role_of(name) == "target" else name: take(values, plan.cut.offsets, pieces)
        for name, values in window.rows.per_token.items()
    }
    rows = pieces if plan.cut.cut_from is None else plan.cut.cut_from[pieces]
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
    return Gathered(per_token, index, context)


def column_of(window: Window, role: Role) -> np.ndarray | None:
    """The column of a window with a value a row that has some role, shape (R,); of two a plan is
    refused."""
    columns = window.rows.per_row.items()
    return next((values for name, values in columns if role_of(name) == role), None)


def _pick(
    plan: WindowPlan, rounds: Rounds
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | slice]:
    """This rank's micro-batches and sequences, as offsets, and which of the plan's pieces they are.

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
