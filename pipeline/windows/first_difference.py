"""Find the first difference between the rows that two runs delivered, from their saved states.

Equal plans deliver equal rows. So two runs differ in a setting, in their position, or one of them
did not follow its plan. To find the last case, a state keeps digests after window numbers whose
distances double. The digests bracket the windows in which the runs differ; reading those windows
again shows which run did not follow the plan. Torch-free.
"""

from collections.abc import Callable
from typing import Any

from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.state import Delivered, first_difference, plan_settings_of
from tokenfeed.pipeline.windows.rank_slice import RankSlice

__all__ = ["compare"]

Make = Callable[[Position], RankSlice]
"""Makes a rank's slice of a window."""

_WORD = (1 << 64) - 1


def compare(plan: Plan, make: Make, first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """Compare the rows that two runs delivered.

    Args:
        plan: The plan of at least one of the runs.
        make: Makes a window of this plan.
        first: A saved state of one run.
        second: A saved state of the other run.

    Returns:
        The first difference, in one line; None if both runs delivered the same rows.

    Raises:
        ResumeError: An argument is not a loader state, or neither state belongs to `plan`.
    """
    if difference := first_difference(plan_settings_of(first), plan_settings_of(second)):
        name, one, other = difference
        return f"the first run has {name}={one!r}, the second {name}={other!r}"
    runs = Delivered.from_state(plan, first), Delivered.from_state(plan, second)
    trails = [run.checkpoints() for run in runs]
    agreed, parted = (0, 0), None
    for windows in sorted(trails[0].keys() & trails[1].keys()):
        digests = {trail[windows] for trail in trails}
        if len(digests) > 1:
            parted = windows
            break
        agreed = windows, digests.pop()
    if parted is None:
        return _compare_ends(*runs)
    expected = (agreed[1] + _replay(plan, make, agreed[0], parted)) & _WORD
    wrong = [
        name
        for name, trail in zip(("first", "second"), trails, strict=True)
        if trail[parted] != expected
    ]
    return (
        f"the runs agree up to {_name(plan, agreed[0])} and differ before {_name(plan, parted)}, "
        f"where the {' and the '.join(wrong)} run did not deliver the rows of the plan"
    )


def _compare_ends(first: Delivered, second: Delivered) -> str | None:
    if first.position != second.position:
        behind, ahead = sorted((first, second), key=lambda run: run.position)
        who = "first" if ahead is first else "second"
        return f"the {who} run is ahead, at {ahead.position}; the other is at {behind.position}"
    if first.digest != second.digest:
        return f"the runs differ in the window of {first.position}"
    return None


def _replay(plan: Plan, make: Make, start: int, stop: int) -> int:
    """Return what windows `start` to `stop` - 1, counted over all epochs, add to a digest."""
    total = 0
    for number in range(start, stop):
        epoch, window = divmod(number, plan.num_windows)
        rank_slice = make(Position(epoch, window, 0))
        total += int(rank_slice.index.rounds.digests.sum())
    return total & _WORD


def _name(plan: Plan, windows: int) -> str:
    epoch, window = divmod(windows, plan.num_windows)
    return f"window {window} of epoch {epoch}"
