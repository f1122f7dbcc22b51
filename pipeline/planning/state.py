"""What a run has delivered, and the state that is saved of it.

A state is a few integers, the settings of the plan they belong to, and a digest of everything that
was delivered. It does not know ranks, workers, prefetching or devices, so it continues on any.
Torch-free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenfeed.pipeline.errors import LoaderError, ResumeError
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.share import RaggedBatch

__all__ = ["Delivered", "first_difference", "gang_size_of", "merge_states", "own_stream"]

_VERSION = 2
_WORD = (1 << 64) - 1
_START = Position(0, 0, 0)


@dataclass(slots=True)
class Delivered:
    """Everything that all ranks together have delivered, up to some round."""

    plan: Plan
    position: Position = _START
    digest: int = 0
    """Sum over all micro-batches; see `ledger`."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of each source in the present epoch."""
    last_epoch_tokens: list[int] = field(default_factory=list)
    """The same for the epoch before; empty where this process did not see its end."""
    trail: list[tuple[int, int]] = field(default_factory=list)
    """(windows, digest after them) at distances that double: where two runs still agreed."""

    def __post_init__(self) -> None:
        self.tokens = self.tokens or [0] * len(self.plan.data)

    def add(self, batch: RaggedBatch) -> None:
        """Count one more round."""
        self.digest = (self.digest + int(batch.of_round("digests"))) & _WORD
        for source, tokens in enumerate(batch.of_round("tokens").tolist()):
            self.tokens[source] += tokens
        if not batch.is_last:
            epoch, window, _ = self.position
            self.position = Position(epoch, window, int(batch.of_round("position")))
            return
        self.position = self.plan.next_window(self.position)
        self._leave_trail()
        if self.position.window == 0:
            self._close_epoch()

    def state(self) -> dict[str, Any]:
        """As a JSON-serialisable dict."""
        return {
            "version": _VERSION,
            "plan": self.plan.settings(),
            **self.position._asdict(),
            "digest": f"{self.digest:016x}",
            "tokens": list(self.tokens),
            "trail": [[windows, f"{digest:016x}"] for windows, digest in self.trail],
        }

    @classmethod
    def of(cls, plan: Plan, state: dict[str, Any]) -> "Delivered":
        """What a saved state of this same plan says.

        Raises:
            ResumeError: The state is damaged or belongs to another plan; says what differs.
        """
        try:
            version, theirs = state["version"], dict(state["plan"])
            if version == _VERSION:
                made = cls(
                    plan,
                    Position(*(int(state[name]) for name in Position._fields)),
                    digest=int(state["digest"], 16),
                    tokens=[int(tokens) for tokens in state["tokens"]],
                    trail=[(int(windows), int(digest, 16)) for windows, digest in state["trail"]],
                )
                made._check()
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ResumeError(f"cannot resume: this is no loader state ({error!r}).") from error
        if version != _VERSION:
            raise ResumeError(
                f"cannot resume: expected loader state version {_VERSION}, got {version!r}."
            )
        if difference := first_difference(plan.settings(), theirs):
            name, ours, saved = difference
            raise ResumeError(
                f"cannot resume: the state was saved with {name}={saved!r}, this loader has "
                f"{name}={ours!r}. Use the same, or start a new run."
            )
        counted = len(state["tokens"])
        if made.position.window >= plan.num_windows or counted != len(plan.data):
            raise ResumeError(f"cannot resume: no such {made.position} of {counted} sources.")
        return made

    def _check(self) -> None:
        """Refuse with a ValueError what no run can have delivered."""
        digests = [self.digest, *(digest for _, digest in self.trail)]
        if min(*self.position, *self.tokens, *digests) < 0 or max(digests) > _WORD:
            raise ValueError("a number is out of range")

    def checkpoints(self) -> dict[int, int]:
        """Digests by the number of windows they cover, as far as they are remembered."""
        return dict(self.trail)

    def _leave_trail(self) -> None:
        """Keep for each power of two the last multiple of it, and the one before."""
        windows = self.position.epoch * self.plan.num_windows + self.position.window
        steps = [1 << bit for bit in range(windows.bit_length())]
        kept = {windows // step * step - back for step in steps for back in (0, step)}
        self.trail = [entry for entry in self.trail if entry[0] in kept]
        self.trail.append((windows, self.digest))

    def _close_epoch(self) -> None:
        for source, (had, due) in enumerate(zip(self.tokens, self.plan.epoch_tokens, strict=True)):
            if due is not None and had != due:
                raise LoaderError(
                    f"epoch {self.position.epoch - 1} delivered {had:,} tokens of source {source}, "
                    f"its manifest has {due:,}. This is a bug of tokenfeed: please report it."
                )
        self.last_epoch_tokens = self.tokens
        self.tokens = [0] * len(self.tokens)


def first_difference(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> tuple[str, object, object] | None:
    """Name and both values of the first setting in which two plans differ."""
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            return name, ours.get(name), theirs.get(name)
    return None


def gang_size_of(state: dict[str, Any]) -> int | None:
    """The gang size a state was saved with; None if it says none, which is found out later."""
    try:
        gang_size = int(state["plan"]["gang_size"])
    except (KeyError, TypeError, ValueError):
        return None
    return gang_size if gang_size > 0 else None


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state out of those of all streams; any rank loads its own part of it.

    Args:
        states: `state_dict` of at least one rank of every stream, in any order; taken after the
            same number of steps.

    Raises:
        ResumeError: A stream is missing, or they belong to different plans.
    """
    try:
        by_stream = {int(state["plan"]["stream"]): state for state in states}
        plans = [dict(state["plan"]) | {"stream": 0} for state in by_stream.values()]
    except (KeyError, TypeError, ValueError) as error:
        raise ResumeError(f"this is no loader state ({error!r}).") from error
    for plan in plans[1:]:
        if difference := first_difference(plans[0], plan):
            name, one, other = difference
            raise ResumeError(f"states of different runs: {name} is {one!r} and {other!r}.")
    wanted = set(range(plans[0]["num_streams"])) if plans else {0}
    if missing := wanted - by_stream.keys():
        raise ResumeError(f"no state of stream {min(missing)} of {len(wanted)} was given.")
    return {"streams": [by_stream[stream] for stream in sorted(by_stream)]}


def own_stream(state: dict[str, Any], stream: int) -> dict[str, Any]:
    """The part of a merged state for one stream; any other state itself."""
    streams = state.get("streams") if isinstance(state, dict) else None
    if not isinstance(streams, list):
        return state
    return streams[stream] if stream < len(streams) else {}
