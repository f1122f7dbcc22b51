"""Plan a window that a run began with other micro-batches or steps, before it resumed.

What was delivered stays as it was. If the new micro-batches make the same steps, the steps that are
left are dealt to them. Otherwise the pieces that are left are planned like the rows of a window of
their own. Torch-free.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.planning.batching import WindowPlan, deal, plan_window
from tokenfeed.pipeline.planning.policies import Batching, Fixed, Packed, regroup
from tokenfeed.pipeline.planning.schedule import Draw


class Earlier(NamedTuple):
    """How the first micro-batches of a window were made, before a run resumed with others."""

    batching: Batching
    step_size: int
    micro_batches: int
    """Micro-batches of the window that were delivered until then, in whole steps."""


def plan_resized(
    earlier: Sequence[Earlier],
    lengths: np.ndarray,
    batching: Batching,
    *,
    step_size: int,
    draw: Draw | None,
    labels: np.ndarray | None,
    rows: np.ndarray | None,
) -> WindowPlan:
    """Plan a window that begins with what was delivered `earlier`; see `plan_window`."""
    given: dict[str, Any] = {"draw": draw, "labels": labels, "rows": rows}
    if not earlier:
        return plan_window(lengths, batching, step_size=step_size, **given)
    *before, last = earlier
    begun = plan_resized(before, lengths, last.batching, step_size=last.step_size, **given)
    first, piece = last.micro_batches, begun.batch_piece_offsets[last.micro_batches]
    step = int(np.searchsorted(begun.step_offsets, first))
    if begun.step_offsets[step] != first:
        raise ResumeError(
            "cannot resume with other micro-batches or steps: the state was saved in the "
            "middle of a step. Resume with the same, and save after a step."
        )
    left = begun.pieces[piece:]
    if rows is None and _has_same_steps(last, batching, step_size):
        rest = _dealt_again(begun, step, step_size)
    else:  # the pieces that are left, as rows of a window of their own
        of_rows = begun.cut.rows[left]
        rest = plan_window(
            begun.cut.lengths[left],
            batching,
            step_size=step_size,
            draw=draw and draw.of_part(first),
            labels=None if labels is None else labels[of_rows],
            rows=None if rows is None else np.arange(len(left)),
        )
        if rest.cut.cut_from is not None:
            raise ResumeError(
                f"cannot resume with {batching}: it would cut rows that are planned already. "
                "Resume with micro-batches that hold the longest row."
            )
        rest = replace(rest, pieces=left[rest.pieces])
    return _continued(begun, step, rest)


def _has_same_steps(last: Earlier, batching: Batching, step_size: int) -> bool:
    """Return whether a policy makes the steps that were made before, in other micro-batches."""
    one, other = last.batching, batching
    if not (isinstance(one, Fixed | Packed) and isinstance(other, Fixed | Packed)):
        return False  # rows that fit into a micro-batch depend on its size
    if one.batch_size * last.step_size != other.batch_size * step_size:
        return False
    return replace(one, batch_size=1) == replace(other, batch_size=1)


def _dealt_again(plan: WindowPlan, step: int, step_size: int) -> WindowPlan:
    """Return the steps of a plan from number `step` on, dealt to another number of micro-batches.

    Example: a step of the sequences 0 1 2 3 4 in 2 micro-batches is 0 2 4 | 1 3. Its sequence i of
    micro-batch b is number 2 * i + b. In 3 micro-batches it is 0 3 | 1 4 | 2.
    """
    first = plan.step_offsets[step]
    counts = np.diff(plan.step_offsets[step:])
    sizes = np.diff(plan.batch_offsets[first:])
    edges = plan.batch_offsets[plan.step_offsets[step:]]
    batch = np.repeat(np.arange(len(sizes)), sizes)
    of_step = np.repeat(np.arange(len(counts)), counts)[batch]
    in_batch = np.arange(len(batch)) - (plan.batch_offsets[first:-1] - edges[0])[batch]
    in_step = batch - (plan.step_offsets[step:-1] - first)[of_step]
    places = edges[of_step] - edges[0] + in_batch * counts[of_step] + in_step
    order = np.argsort(places) + edges[0]
    dealt, batch_offsets, steps = deal(edges - edges[0], step_size)
    order = order if dealt is None else order[dealt]
    if plan.sequence_offsets is None:
        return WindowPlan(plan.cut, plan.pieces[order], None, batch_offsets, steps)
    pieces, offsets = regroup(plan.pieces, plan.sequence_offsets, order)
    return WindowPlan(plan.cut, pieces, offsets, batch_offsets, steps)


def _continued(begun: WindowPlan, step: int, rest: WindowPlan) -> WindowPlan:
    """Return a plan as far as a step, followed by the rest, whose pieces have the same numbers."""

    def joined(before: np.ndarray, after: np.ndarray) -> np.ndarray:
        return np.concatenate([before, before[-1] + after[1:]])

    batch = begun.step_offsets[step]
    sequence, piece = begun.batch_offsets[batch], begun.batch_piece_offsets[batch]
    offsets = None
    if begun.sequence_offsets is not None and rest.sequence_offsets is not None:
        offsets = joined(begun.sequence_offsets[: sequence + 1], rest.sequence_offsets)
    return WindowPlan(
        begun.cut,
        np.concatenate([begun.pieces[:piece], rest.pieces]),
        offsets,
        joined(begun.batch_offsets[: batch + 1], rest.batch_offsets),
        joined(begun.step_offsets[: step + 1], rest.step_offsets),
    )
