"""Compare: the first difference between what two runs delivered, from their saved states.

Equal plans deliver equal rows, so a difference is a setting, a position, or a broken promise. For
the last, states keep digests at distances that double: they narrow down where two runs parted, and
reading those windows again tells which of the two is not what the plan says. Torch-free.
"""

from typing import Any, Protocol

from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.state import Delivered, first_difference, plan_settings_of
from tokenfeed.pipeline.windows.rank_slice import RankSlice

__all__ = ["Maker", "compare"]

_WORD = (1 << 64) - 1


class Maker(Protocol):
    """Makes the windows of a plan, wherever it does."""

    @property
    def plan(self) -> Plan:
        """Which windows there are."""
        ...

    def make(self, position: Position) -> RankSlice:
        """A rank's slice of a window."""
        ...


def compare(maker: Maker, first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """Compare what two runs delivered.

    Args:
        maker: The plan of at least one of them, and its data.
        first: A saved state of one run.
        second: A saved state of the other.

    Returns:
        None where both delivered the same; else the first difference, in one line.

    Raises:
        ResumeError: One of them is no state, or neither is one of this plan.
    """
    if difference := first_difference(plan_settings_of(first), plan_settings_of(second)):
        name, one, other = difference
        return f"the first run has {name}={one!r}, the second {name}={other!r}"
    runs = Delivered.from_state(maker.plan, first), Delivered.from_state(maker.plan, second)
    trails = [run.checkpoints() for run in runs]
    agreed, parted = (0, 0), None
    for windows in sorted(trails[0].keys() & trails[1].keys()):
        digests = {trail[windows] for trail in trails}
        if len(digests) > 1:
            parted = windows
            break
        agreed = windows, digests.pop()
    if parted is None:
        return _compare_ends(maker, *runs)
    expected = (agreed[1] + _replay(maker, agreed[0], parted)) & _WORD
    wrong = [
        name
        for name, trail in zip(("first", "second"), trails, strict=True)
        if trail[parted] != expected
    ]
    return (
        f"the runs agree up to {_name(maker, agreed[0])} and differ before {_name(maker, parted)}, "
        f"where the plan does not give what the {' and the '.join(wrong)} run delivered"
    )


def _compare_ends(maker: Maker, first: Delivered, second: Delivered) -> str | None:
    if first.position != second.position:
        behind, ahead = sorted((first, second), key=lambda run: run.position)
        who = "first" if ahead is first else "second"
        return (
            f"the {who} run has gone further, to {ahead.position}; the other to {behind.position}"
        )
    if first.digest != second.digest:
        return f"the runs differ in the window of {first.position}"
    return None


def _replay(maker: Maker, start: int, stop: int) -> int:
    """What the windows from `start` up to `stop`, counted over epochs, add to a digest."""
    total = 0
    for number in range(start, stop):
        epoch, window = divmod(number, maker.plan.num_windows)
        rank_slice = maker.make(Position(epoch, window, 0))
        total += int(rank_slice.index.rounds.digests.sum())
    return total & _WORD


def _name(maker: Maker, windows: int) -> str:
    epoch, window = divmod(windows, maker.plan.num_windows)
    return f"window {window} of epoch {epoch}"
