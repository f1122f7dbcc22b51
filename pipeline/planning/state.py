"""What a run has delivered, and its saved state.

A state has a few integers, the settings of their plan, and a digest of all delivered rows. It does
not contain ranks, workers, prefetching or devices, so a run can continue with other ones. It is
readable JSON, and its checksum detects a state that was damaged or edited. Torch-free.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from operator import add
from typing import Annotated, Any, Self

import msgspec
import xxhash

from tokenfeed.pipeline.errors import ConfigError, LoaderError, ResumeError
from tokenfeed.pipeline.format.manifest import canonical
from tokenfeed.pipeline.planning.batching import Round
from tokenfeed.pipeline.planning.mixture import proportions
from tokenfeed.pipeline.planning.plan import Plan, PlanSettings, Position
from tokenfeed.pipeline.planning.policies import Batching, policy_of, saved_policy
from tokenfeed.pipeline.planning.resized import Earlier

_VERSION = 5
"""Version of the plan. A change of the order changes it, because the same position then has other
rows before it."""
_WORD = (1 << 64) - 1
_START = Position(0, 0, 0)

_TO_MAKE_AGAIN = ("window_tokens", "exhausted", "given", "skip", "earlier")
"""Settings for making the plan again. Other values may make an equal plan, so they are not
compared."""

_FROM_WEIGHTS = " (with `train`, --init-from RUN keeps the weights)"

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
    steps: int = 0
    """Optimizer steps of `micro_batches_per_step` micro-batches, in all epochs."""

    def __post_init__(self) -> None:
        if not self.tokens:
            object.__setattr__(self, "tokens", (0,) * len(self.plan.data))

    def after(self, done: Round) -> "Delivered":
        """Return what is delivered after one more round.

        Raises:
            LoaderError: The round ends an epoch whose tokens differ from the manifest.
            ConfigError: The round ends an epoch of which `last`="drop" left out all rows.
        """
        plan, last = self.plan, self.last_epoch_tokens
        digest = (self.digest + done.digest) & _WORD
        tokens, steps = tuple(map(add, self.tokens, done.tokens)), self.steps + done.steps
        if not done.ends_window:
            position = self.position._replace(micro_batch=done.position)
            return Delivered(plan, position, digest, tokens, last, steps)
        position = plan.next_window(self.position)
        if position.window:
            return Delivered(plan, position, digest, tokens, last, steps)
        if not any(tokens):
            raise plan.without_steps(f"epoch {self.position.epoch}")
        _check_epoch(plan, self.position.epoch, tokens)
        return Delivered(plan, position, digest, last_epoch_tokens=tokens, steps=steps)

    def state(self) -> dict[str, Any]:
        """Return the saved state, a JSON-serialisable dict."""
        has_stages = bool(self.plan.stages)
        settings, (epoch, window, _) = self.plan.settings(), self.position
        earlier = [
            (saved_policy(each.batching), each.step_size, each.micro_batches)
            for each in self.plan.earlier_in(epoch, window)
        ]
        saved = SavedState(
            _VERSION,
            msgspec.structs.replace(settings, earlier=earlier),
            *self.position,
            f"{self.digest:016x}",
            list(self.tokens),
            list(self.last_epoch_tokens) if has_stages else [],
            self.steps if has_stages else 0,
        )
        return saved.sealed()

    @classmethod
    def from_state(
        cls, plan: Plan, state: "dict[str, Any] | SavedState", names: Sequence[str] = ()
    ) -> "Delivered":
        """Read a saved state of this plan. `names` are the names of the plan's data sets.

        If the plan has stages, the result has another plan: its past is of the state, its future of
        `plan`.

        Raises:
            ResumeError: The state is damaged or belongs to another plan. The message names the
                difference.
        """
        saved = state if isinstance(state, SavedState) else SavedState.checked(state)
        position, theirs = Position(saved.epoch, saved.window, saved.micro_batch), saved.plan
        tokens, last = tuple(saved.tokens), tuple(saved.last_epoch_tokens)
        if (theirs.stages is not None) != bool(plan.stages):
            whose = ("this loader", "the state") if plan.stages else ("the state", "this loader")
            raise ResumeError(
                f"cannot resume: {whose[0]} has a list of stages, but {whose[1]} has none, and the "
                "order of rows is another one. Pass the same data, or start a new run"
                f"{_FROM_WEIGHTS}."
            )
        _check_settings(plan, theirs, names)
        if len(tokens) != len(theirs.data) or len(last) not in (0, len(tokens)):
            raise ResumeError(
                f"cannot resume: the state has the tokens of {len(tokens)} sources, but its plan "
                f"has {len(theirs.data)}. Use an unchanged state."
            )
        if plan.stages:
            of_data = dict(zip(plan.data, names, strict=False))
            plan, position = plan.resumed(theirs, position, of_data)
            if position.epoch < saved.epoch:  # the list was read to its end, and is longer now
                tokens, last = last or tokens, ()
            elif position.epoch > saved.epoch:  # the list ends here now
                tokens, last = (0,) * len(tokens), tokens
            tokens = _moved(tokens, theirs.data, plan.data)
            last = _moved(last, theirs.data, plan.data) if last else ()
        if plan.skip is None:
            plan = replace(plan, skip=theirs.skip)
        if theirs.earlier:
            found = tuple(Earlier(policy_of(b), size, n) for b, size, n in theirs.earlier)
            plan = replace(plan, earlier=((saved.epoch, saved.window), found))
        if position.window >= plan.num_windows or len(tokens) != len(plan.data):
            raise ResumeError(
                f"cannot resume: the plan has no {position} with {len(tokens)} sources. Use the "
                "state of this run, or start a new run."
            )
        return cls(plan, position, int(saved.digest, 16), tokens, last, saved.steps)

    def with_plan(self, plan: Plan) -> "Delivered":
        """Return the same rows as delivered by a plan with the same past."""
        return replace(self, plan=plan, tokens=_moved(self.tokens, self.plan.data, plan.data))


def _moved(tokens: Sequence[int], data: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    """Return the tokens of each source for sources in another order; 0 for a new source."""
    counted = dict(zip(data, tokens, strict=True))
    return tuple(counted.get(each, 0) for each in wanted)


class SavedState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A saved state, with checked types and ranges."""

    version: int
    plan: PlanSettings
    epoch: _Count
    window: _Count
    micro_batch: _Count
    digest: _Digest
    tokens: list[_Count]
    last_epoch_tokens: list[_Count] = []
    """With stages: tokens of each source in the list, if it was read to its end. A longer list goes
    on counting from them."""
    steps: _Count = 0
    """With stages: see `Delivered.steps`."""
    checksum: str = ""
    """Of all other fields."""

    def sealed(self) -> dict[str, Any]:
        """Return the state as a JSON-serialisable dict with its checksum."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        content.pop("checksum", None)
        return content | {"checksum": xxhash.xxh3_64_hexdigest(canonical(content))}

    @classmethod
    def checked(cls, state: object) -> Self:
        """Check a saved state.

        Raises:
            ResumeError: `state` is not a loader state.
        """
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
            saved = msgspec.convert(state, cls)
            expected = saved.sealed()["checksum"]
        except (ValueError, TypeError, RecursionError) as error:  # also of msgspec and Unicode
            raise ResumeError(f"cannot resume: this is not a loader state ({error}).") from error
        if expected != saved.checksum:
            raise ResumeError(
                "cannot resume: the state was changed after it was saved: its checksum is "
                f"{saved.checksum!r}, but its content has {expected!r}. Load an unchanged state."
            )
        return saved


def resealed(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a state with other fields, and the checksum of the result."""
    return msgspec.convert(state | changes, SavedState).sealed()


def first_difference(ours: PlanSettings, theirs: PlanSettings) -> tuple[str, object, object] | None:
    """Return the name and both values of the first different setting of two plans; None if equal.

    Weights are compared by proportion, policies field by field. `window_tokens` and `exhausted` are
    not compared. Their effects are compared: the record batches of each source in an epoch and the
    number of windows. `skip` may change.
    """
    for name in PlanSettings.__struct_fields__:
        our, their = getattr(ours, name), getattr(theirs, name)
        if name not in _TO_MAKE_AGAIN and _meaning(name, our) != _meaning(name, their):
            return name, our, their
    return None


def _check_settings(plan: Plan, theirs: PlanSettings, names: Sequence[str]) -> None:
    """Compare the settings of a plan and of a state. `Plan.going_on` compares stages."""
    settings = plan.settings()
    if plan.stages:
        theirs = msgspec.structs.replace(
            theirs, data=settings.data, stages=settings.stages, batching=settings.batching
        )
    if difference := first_difference(settings, theirs):
        name, our, their = difference
        if name == "batching":
            our, their = str(_meaning(name, our)), str(_meaning(name, their))
        if name == "shuffle" and settings.order != theirs.order:  # which has set `shuffle`
            name, our, their = "order", settings.order or "shuffled", theirs.order or "shuffled"
        where = f" (fingerprint of {', '.join(names)})" if name == "data" and names else ""
        raise ResumeError(
            f"cannot resume: the state was saved with {name}={their!r}, this loader has "
            f"{name}={our!r}{where}. Use the same setting, or start a new run"
            f"{_FROM_WEIGHTS if name == 'data' else ''}."
        )


def with_micro_batches(
    state: dict[str, Any], batching: Batching, micro_batches_per_step: int
) -> dict[str, Any]:
    """Return a state, saved after a step, for a loader with another size of micro-batches or steps.

    The rest of the window is delivered in the same steps if they have the same rows. Otherwise, the
    rows of the window that are left are planned anew. Other differences, and lists of stages, stay
    as they are: loading the state rejects them.
    """
    saved = SavedState.checked(state)
    plan = saved.plan
    before = Earlier(policy_of(plan.batching), plan.micro_batches_per_step, saved.micro_batch)
    after = Earlier(batching, micro_batches_per_step, saved.micro_batch)
    if (
        plan.stages is not None
        or before == after
        or not _differs_in_size(before.batching, batching)
    ):
        return state
    earlier = [each for each in plan.earlier if saved.micro_batch]
    if saved.micro_batch and not any(number == saved.micro_batch for *_, number in earlier):
        earlier.append((plan.batching, plan.micro_batches_per_step, saved.micro_batch))
    changed = msgspec.structs.replace(
        plan,
        batching=saved_policy(batching),
        micro_batches_per_step=micro_batches_per_step,
        earlier=earlier,
    )
    return resealed(state, plan=msgspec.to_builtins(changed))


def _differs_in_size(one: Batching, other: Batching) -> bool:
    """Return whether two policies are equal, or differ only in the size of a micro-batch."""
    if type(one) is not type(other):
        return False
    names = {each.name for each in fields(one)} - {"batch_size", "max_tokens", "last"}  # type: ignore[arg-type]
    are_same = all(getattr(one, name) == getattr(other, name) for name in names)
    return are_same and (one.last == "drop") == (other.last == "drop")


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all streams into one state that every rank can load.

    Args:
        states: `state_dict` of at least one rank of every stream, in any order, saved after the
            same number of steps.

    Returns: One JSON-serialisable state for `ShardLoader.load_state_dict`. Each rank uses the part
    of its stream.

    Raises:
        ResumeError: A stream is missing, or the states belong to different plans.
    """
    plans = [SavedState.checked(state).plan for state in states]
    by_stream = {plan.stream: state for plan, state in zip(plans, states, strict=True)}
    for plan in plans[1:]:
        same_stream = msgspec.structs.replace(plan, stream=plans[0].stream)
        if difference := first_difference(plans[0], same_stream):
            name, one, other = difference
            raise ResumeError(f"states of different runs: {name} is {one!r} and {other!r}.")
    count = plans[0].num_streams if plans else 1
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


def _meaning(name: str, value: Any) -> object:
    """Return a normal form of a setting, for comparing."""
    if name == "batching":
        with suppress(ConfigError):
            return policy_of(value)
    if name == "weights" and value:  # sums of floats differ in their last digits
        return [f"{float(share):.9g}" for share in proportions(value)]
    return value


def _check_epoch(plan: Plan, epoch: int, tokens: tuple[int, ...]) -> None:
    for source, (had, due) in enumerate(zip(tokens, plan.epoch_tokens, strict=True)):
        if due is not None and had != due:
            raise LoaderError(
                f"epoch {epoch} delivered {had:,} tokens of source {source}, but its manifest says "
                f"{due:,}: the shards are not those of the manifest. Run `shards verify` to see "
                "which, and copy the data set again."
            )
