"""The plan: everything about which rows come when, from the manifest and a few settings.

Nothing is remembered: a position of three integers says where a run stands, and the plan computes
the rest. Two loaders with equal plans deliver the same micro-batches, whatever their workers and
prefetching are. Torch-free.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenfeed.pipeline.batching import Batching, plan_window
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.manifest import Manifest
from tokenfeed.pipeline.order import EpochOrder
from tokenfeed.pipeline.window import ShareArrays, SplitReader, gather

__all__ = ["WINDOW_TOKENS", "Plan", "Position"]

WINDOW_TOKENS = 4_000_000
"""Tokens of a window: enough to sort and to shuffle well (a thousand documents), little enough that
a worker holds a few in memory and the first one is ready in some 50 ms."""

_STATE_VERSION = 1


class Position(NamedTuple):
    """Where a run stands: the next gang to deliver."""

    epoch: int
    window: int
    gang: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rows come when, for every rank."""

    data: str
    """Fingerprint of the manifest."""
    split: str
    batching: Batching
    order: EpochOrder
    world_size: int

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        split: str,
        batching: Batching,
        *,
        seed: int,
        shuffle: bool,
        world_size: int,
    ) -> "Plan":
        """The plan over one split of a data set.

        Raises:
            ManifestError: There is no such split.
            ConfigError: It has no rows.
        """
        info = manifest.split(split)
        if not info.rows:
            raise ConfigError(f"the split `{split}` holds no rows. Run `pretokenize` on more text.")
        num_windows = min(info.batches, max(1, round(info.tokens / WINDOW_TOKENS)))
        order = EpochOrder(info.batches, num_windows, seed, shuffle)
        return cls(manifest.fingerprint, split, batching, order, world_size)

    def read_share(self, reader: SplitReader, epoch: int, window: int, rank: int) -> ShareArrays:
        """Decode one window and gather one rank's micro-batches of it."""
        rows, row_numbers = reader.read(self.order.window(epoch, window))
        window_plan = plan_window(
            rows.lengths,
            self.batching,
            world_size=self.world_size,
            key=self.order.window_key(epoch, window),
            shuffle=self.order.shuffle,
        )
        share = window_plan.share(rank, self.world_size)
        return gather(rows, row_numbers, window_plan, share)

    def advance(self, position: Position, gangs_in_window: int) -> Position:
        """The position after one more gang."""
        epoch, window, gang = position
        if gang + 1 < gangs_in_window:
            return Position(epoch, window, gang + 1)
        if window + 1 < self.order.num_windows:
            return Position(epoch, window + 1, 0)
        return Position(epoch + 1, 0, 0)

    def state(self, position: Position) -> dict[str, Any]:
        """A position as a JSON-serialisable dict that knows which plan it belongs to."""
        return {"version": _STATE_VERSION, "plan": self._settings(), **position._asdict()}

    def position(self, state: dict[str, Any]) -> Position:
        """The position in a state of this same plan.

        Raises:
            ResumeError: The state is damaged or belongs to another plan; says what differs.
        """
        try:
            version, theirs = state["version"], dict(state["plan"])
            position = Position(*(int(state[name]) for name in Position._fields))
        except (KeyError, TypeError, ValueError) as error:
            raise ResumeError(f"cannot resume: this is no loader state ({error!r}).") from error
        if version != _STATE_VERSION:
            raise ResumeError(
                f"cannot resume: expected loader state version {_STATE_VERSION}, got {version!r}."
            )
        ours = self._settings()
        for name in [*ours, *(theirs.keys() - ours.keys())]:
            if ours.get(name) != theirs.get(name):
                raise ResumeError(
                    f"cannot resume: the state was saved with {name}={theirs.get(name)!r}, this "
                    f"loader has {name}={ours.get(name)!r}. Use the same, or start a new run."
                )
        if min(position) < 0 or position.window >= self.order.num_windows:
            raise ResumeError(f"cannot resume: no such {position}.")
        return position

    def _settings(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "split": self.split,
            "batching": repr(self.batching),
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            "windows": self.order.num_windows,
            "world_size": self.world_size,
        }
