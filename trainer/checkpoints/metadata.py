"""What checkpoint.json records about a run, besides the state."""

from dataclasses import dataclass, field
from typing import Any

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.config.run_config import TrainConfig

_WORDS = {
    "model": "--model",
    "task": "task",
    "vocabulary_size": "vocabulary size",
    "optimizer": "--optimizer",
    "init_from": "--init-from",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The step with the best weights on the validation split."""

    step: int
    metric: str
    """The metric that decided."""
    metrics: dict[str, float]
    """All metrics at that step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Where the initial weights of a run came from."""

    digests: dict[str, str] = field(default_factory=dict)
    """xxh3-64 of the weights that no checkpoint holds, by the number format they are read in. See
    `models.weights.digests_of`."""
    init_step: int | None = None
    """The step of the checkpoint that --init-from named; None without --init-from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    """The progress of a run, and the settings that a resumed run must not change."""

    step: int
    """Steps trained."""
    tokens: int
    """Real tokens trained."""
    slots: int
    """Token slots trained, padding included."""
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
    """The run's settings, for people and for `check`."""

    def check(self, config: TrainConfig, ours: "CheckpointMeta") -> None:
        """Reject a resumed run with another model, or with fewer steps than were trained.

        Raises:
            ConfigError: --steps is below the trained steps.
            ResumeError: `ours`, a new run with `config`, would train another model, task or
                optimizer.
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
        """Reject a resumed run whose initial weights have changed since the run began.

        Args:
            config: The settings that name the source of the weights.
            ours: The digests of the weights as they are now.

        Raises:
            ResumeError: The digests differ.
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
