"""What a run has delivered, its saved state, and the first difference between two states.

A state has a few integers, the settings of their plan, and a digest of all delivered rows. It does
not contain ranks, workers, prefetching or devices, so a run can continue with other ones.

Equal plans deliver equal rows. So two runs differ in a setting, in their position, or one of them
did not follow its plan. To find the last case, a state keeps digests after window numbers whose
distances double. The digests bracket the windows in which the runs differ; reading those windows
again shows which run did not follow the plan. Torch-free.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Annotated, Any

import msgspec

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import LoaderError, ResumeError
from tokenfeed.pipeline.planning.batching import Round
from tokenfeed.pipeline.planning.mixture import proportions
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.policies import described_policy

__all__ = [
    "Delivered",
    "compare",
    "first_difference",
    "merge_states",
    "own_stream",
    "plan_settings_of",
    "saved_data",
    "saved_step_size",
]

_VERSION = 3
"""Version of the row order. A change of the order changes it, because the same position then has
other rows before it."""
_WORD = (1 << 64) - 1
_START = Position(0, 0, 0)

_TO_MAKE_AGAIN = ("window_tokens", "exhausted", "given")
"""Settings for making the plan again. Other values may make an equal plan, so they are not
compared."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


@dataclass(frozen=True, slots=True)
class Delivered:
    """Everything that all ranks together have delivered, up to a round.

    It is immutable: every round makes a new object. So any thread can read it at any time, and all
    its fields belong to the same round.
    """

    plan: Plan
    position: Position = _START
    digest: int = 0
    """Sum over all micro-batches; see `digests` in `batching`."""
    tokens: tuple[int, ...] = ()
    """Tokens of each source in the current epoch."""
    last_epoch_tokens: tuple[int, ...] = ()
    """Tokens of each source in the last epoch; empty if this process did not see its end."""
    trail: tuple[tuple[int, int], ...] = ()
    """(number of windows, digest after them), at distances that double, to find where two runs
    differ."""

    def __post_init__(self) -> None:
        if not self.tokens:
            object.__setattr__(self, "tokens", (0,) * len(self.plan.data))

    def after(self, done: Round) -> "Delivered":
        """Return what is delivered after one more round.

        Raises:
            LoaderError: The round ends an epoch whose tokens differ from the manifest.
        """
        plan, last = self.plan, self.last_epoch_tokens
        digest = (self.digest + done.digest) & _WORD
        tokens = tuple(map(add, self.tokens, done.tokens))
        if not done.ends_window:
            position = self.position._replace(micro_batch=done.position)
            return Delivered(plan, position, digest, tokens, last, self.trail)
        position = plan.next_window(self.position)
        trail = self._trail_to(position, digest)
        if position.window:
            return Delivered(plan, position, digest, tokens, last, trail)
        _check_epoch(plan, self.position.epoch, tokens)
        return Delivered(plan, position, digest, last_epoch_tokens=tokens, trail=trail)

    def state(self) -> dict[str, Any]:
        """Return the saved state, a JSON-serialisable dict."""
        return {
            "version": _VERSION,
            "plan": self.plan.settings(),
            **self.position._asdict(),
            "digest": f"{self.digest:016x}",
            "tokens": list(self.tokens),
            "trail": [[windows, f"{digest:016x}"] for windows, digest in self.trail],
        }

    @classmethod
    def from_state(
        cls, plan: Plan, state: dict[str, Any], names: Sequence[str] = ()
    ) -> "Delivered":
        """Read a saved state of this plan. `names` are the names of the plan's data sets.

        If the plan has stages, the result has another plan: its past is of the state, its future of
        `plan`.

        Raises:
            ResumeError: The state is damaged or belongs to another plan. The message names the
                difference.
        """
        saved = _read(state)
        position = Position(saved.epoch, saved.window, saved.micro_batch)
        tokens = saved.tokens
        if ("stages" in saved.plan) != bool(plan.stages):
            whose = ("this loader", "the state") if plan.stages else ("the state", "this loader")
            raise ResumeError(
                f"cannot resume: {whose[0]} has a list of stages, but {whose[1]} has none, and the "
                "order of rows is another one. Pass the same data, or start a new run."
            )
        if plan.stages:
            of_data = dict(zip(plan.data, names, strict=False))
            plan, position = plan.going_on(saved.plan, position, of_data)
            counted = dict(zip(saved_data(state), tokens, strict=False))
            tokens = tuple(counted.get(data, 0) for data in plan.data)
        settings = plan.settings()
        checked = {name: settings[name] for name in ("data", "stages", "batching") if plan.stages}
        if difference := first_difference(settings, saved.plan | checked):
            name, ours, theirs = difference
            where = f" (fingerprint of {', '.join(names)})" if name == "data" and names else ""
            raise ResumeError(
                f"cannot resume: the state was saved with {name}={theirs!r}, this loader has "
                f"{name}={ours!r}{where}. Use the same setting, or start a new run."
            )
        if position.window >= plan.num_windows or len(tokens) != len(plan.data):
            raise ResumeError(
                f"cannot resume: the plan has no {position} with {len(tokens)} sources. Use the "
                "state of this run, or start a new run."
            )
        return cls(
            plan,
            position,
            digest=int(saved.digest, 16),
            tokens=tokens,
            trail=tuple((windows, int(digest, 16)) for windows, digest in saved.trail),
        )

    def with_plan(self, plan: Plan) -> "Delivered":
        """Return the same rows as delivered by a plan with the same past."""
        counted = dict(zip(self.plan.data, self.tokens, strict=True))
        return replace(self, plan=plan, tokens=tuple(counted[data] for data in plan.data))

    def checkpoints(self) -> dict[int, int]:
        """Return the kept digests, by the number of windows that they cover."""
        return dict(self.trail)

    def _trail_to(self, position: Position, digest: int) -> tuple[tuple[int, int], ...]:
        """Return the trail with a new entry; keep the last two multiples of every power of two.

        After 13 windows it has the digests after 8, 10, 12 and 13 windows. Of the multiples of 1 it
        keeps 12 and 13, of 2: 10 and 12, of 4: 8 and 12, of 8: 8.
        """
        windows = position.epoch * self.plan.num_windows + position.window
        steps = [1 << bit for bit in range(windows.bit_length())]
        kept = {windows // step * step - back for step in steps for back in (0, step)}
        return (*(entry for entry in self.trail if entry[0] in kept), (windows, digest))


class _Saved(msgspec.Struct, frozen=True):
    """A saved state."""

    version: int
    plan: dict[str, Any]
    epoch: _Count
    window: _Count
    micro_batch: _Count
    digest: _Digest
    tokens: tuple[_Count, ...]
    trail: tuple[tuple[_Count, _Digest], ...]


def first_difference(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> tuple[str, object, object] | None:
    """Return the name and both values of the first different setting of two plans; None if equal.

    Weights are compared by proportion, policies field by field. `window_tokens` and `exhausted` are
    not compared. Their effects are compared: the phases and the number of windows.
    """
    for name in dict.fromkeys([*ours, *theirs]):
        if name in _TO_MAKE_AGAIN:
            continue
        our, their = ours.get(name), theirs.get(name)
        if our != their and _meaning(name, our) != _meaning(name, their):
            return name, our, their
    return None


def saved_step_size(state: dict[str, Any]) -> int | None:
    """Return the micro-batches per step of a saved state; None if the state is not valid."""
    try:
        step_size = checks.as_int(state["plan"]["micro_batches_per_step"])
    except (KeyError, TypeError, AttributeError):
        return None
    return step_size if step_size and 0 < step_size <= checks.MOST else None


def saved_data(state: dict[str, Any]) -> tuple[str, ...]:
    """Return the fingerprints of the data sets of a saved state; empty if the state is not
    valid."""
    try:
        return tuple(map(str, state["plan"]["data"]))
    except (KeyError, TypeError, AttributeError):
        return ()


def plan_settings_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved state's plan.

    Raises:
        ResumeError: `state` is not a loader state.
    """
    return _read(state).plan


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all streams into one state that every rank can load.

    Args:
        states: `state_dict` of at least one rank of every stream, in any order, saved after the
            same number of steps.

    Returns:
        One JSON-serialisable state for `ShardLoader.load_state_dict`, which uses its own part.

    Raises:
        ResumeError: A stream is missing, or the states belong to different plans.
    """
    by_stream = {_stream_setting(plan_settings_of(state), "stream"): state for state in states}
    plans = [plan_settings_of(state) | {"stream": 0} for state in by_stream.values()]
    for plan in plans[1:]:
        if difference := first_difference(plans[0], plan):
            name, one, other = difference
            raise ResumeError(f"states of different runs: {name} is {one!r} and {other!r}.")
    count = _stream_setting(plans[0], "num_streams") if plans else 1
    missing = next((stream for stream in range(count) if stream not in by_stream), None)
    if missing is not None:
        raise ResumeError(
            f"the state of stream {missing} of {count} is missing. Pass a state of every stream."
        )
    return {"streams": [by_stream[stream] for stream in sorted(by_stream)]}


def own_stream(state: dict[str, Any], stream: int) -> dict[str, Any]:
    """Return the part of a merged state for one stream, or `state` if it is not merged."""
    streams = state.get("streams") if isinstance(state, dict) else None
    if not isinstance(streams, list):
        return state
    return streams[stream] if stream < len(streams) else {}


def _read(state: object) -> _Saved:
    """Check the types and ranges of a saved state."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise ResumeError(
            "cannot resume: this is not a loader state. Load what `state_dict` returned."
        )
    if state["version"] != _VERSION:
        raise ResumeError(
            f"cannot resume: the state has version {state['version']!r}, this is version "
            f"{_VERSION} of the plan, which delivers rows in another order. Resume with the "
            "tokenfeed that saved the state, or start a new run."
        )
    try:
        return msgspec.convert(dict(state), _Saved)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ResumeError(f"cannot resume: this is not a loader state ({error}).") from error


def _stream_setting(plan: dict[str, Any], name: str) -> int:
    number = checks.as_int(plan.get(name))
    if number is None:
        raise ResumeError(f"this is not a loader state: {name} is {plan.get(name)!r}.")
    return number


def _meaning(name: str, value: Any) -> object:
    """Return a normal form of a setting, for comparing; an invalid value stays unchanged."""
    if name == "batching":
        return described_policy(value) or value
    if name != "weights" or not isinstance(value, list | tuple):
        return value
    try:
        return [str(share) for share in proportions(value)]
    except (TypeError, ValueError, ZeroDivisionError):
        return value


def _check_epoch(plan: Plan, epoch: int, tokens: tuple[int, ...]) -> None:
    for source, (had, due) in enumerate(zip(tokens, plan.epoch_tokens, strict=True)):
        if due is not None and had != due:
            raise LoaderError(
                f"epoch {epoch} delivered {had:,} tokens of source {source}, but its manifest has "
                f"{due:,}. This is a bug in tokenfeed: please report it."
            )


def compare(
    plan: Plan,
    digest_of: Callable[[Position], int],
    first: dict[str, Any],
    second: dict[str, Any],
) -> str | None:
    """Compare the rows that two runs delivered.

    Args:
        plan: The plan of at least one of the runs.
        digest_of: Reads a window of this plan again; returns the sum of its digests.
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
    expected = (agreed[1] + _replay(plan, digest_of, agreed[0], parted)) & _WORD
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


def _replay(plan: Plan, digest_of: Callable[[Position], int], start: int, stop: int) -> int:
    """Return what windows `start` to `stop` - 1, counted over all epochs, add to a digest."""
    positions = (Position(*divmod(number, plan.num_windows), 0) for number in range(start, stop))
    return sum(map(digest_of, positions))


def _name(plan: Plan, windows: int) -> str:
    epoch, window = divmod(windows, plan.num_windows)
    return f"window {window} of epoch {epoch}"
