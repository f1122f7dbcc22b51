"""What a checkpoint says of its run, beside tensors."""

from dataclasses import dataclass, field
from typing import Any

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.config.run_config import TrainConfig

__all__ = ["Base", "Best", "CheckpointMeta"]

_WORDS = {
    "model": "--model",
    "task": "task",
    "vocabulary_size": "vocabulary size",
    "optimizer": "--optimizer",
    "init_from": "--init-from",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The step whose weights did best on the validation split."""

    step: int
    metric: str
    """The one that decided."""
    metrics: dict[str, float]
    """All metrics at that step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The weights that a run took from elsewhere."""

    digests: dict[str, str] = field(default_factory=dict)
    """xxh3-64 of those that no checkpoint holds, by the number format they are read in; see
    `models.weights.digests_of`."""
    init_step: int | None = None
    """The step of the checkpoint that --init-from took; None if it took none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    """How far a run has come, and what may not change when it goes on."""

    step: int
    """Steps trained."""
    tokens: int
    """Real tokens trained."""
    slots: int
    """Token slots these came in, padding included."""
    model: str
    vocabulary_size: int
    task: str
    optimizer: str
    loader: dict[str, Any]
    """`ShardLoader.state_dict()` after the last batch of `step`."""
    best: Best | None = None
    """The best step so far, this one included."""
    base: Base = Base()
    config: dict[str, Any] = field(default_factory=dict)
    """For people."""

    def check(self, config: TrainConfig, ours: "CheckpointMeta") -> None:
        """Refuse to go on with another model, or with fewer steps than were trained.

        Raises:
            ConfigError: The run is asked for fewer steps.
            ResumeError: It trains something else than `ours`, a new run by `config`.
        """
        if self.step > config.steps:
            raise ConfigError(
                f"`--steps`={config.steps}: {config.run_dir} has trained {self.step} steps "
                "already. Raise it to go on."
            )
        names = ("model", "task", "vocabulary_size", "optimizer")
        pairs = [(name, getattr(self, name), getattr(ours, name)) for name in names]
        if config.reads_again:
            began = self.config.get("init_from", config.init_from)
            pairs.append(("init_from", began, config.init_from))
        for name, saved, wanted in pairs:
            if saved != wanted:
                raise ResumeError(
                    f"cannot resume: the checkpoint has {_WORDS[name]} {saved}, this run has "
                    f"{wanted}. Use the same, or start a new run in another --run-dir."
                )
        self.check_base(config, ours.base)

    def check_base(self, config: TrainConfig, ours: Base) -> None:
        """Refuse weights that are read again and have changed since the run began.

        Args:
            config: Says where the weights are read from.
            ours: What is there now.

        Raises:
            ResumeError: Their digests differ.
        """
        saved, steps = self.base, ""
        shared = saved.digests.keys() & ours.digests.keys()
        if all(saved.digests[name] == ours.digests[name] for name in shared):
            return
        source = config.model
        if config.init_from is not None:
            source = f"--init-from {config.init_from}"
            if saved.init_step != ours.init_step:
                steps = f" (then step {saved.init_step}, now step {ours.init_step} of that run)"
            else:
                source += f", or {config.model},"
        raise ResumeError(
            f"cannot go on: {source} has other weights than when this run began{steps}, and those "
            "that the run does not train are read from there. Restore them, or start a new run in "
            "another --run-dir."
        )
