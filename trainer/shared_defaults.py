"""The settings that suit several tasks at once: what each asks for, where that is most. Torch-free.

Rows of the longest are whole, a step has the rows of the task that wants the most, the model is the
largest that any of them wants, and there are so many steps that each task has its epochs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.by_task import manifests_by_task, shares_by_task
from tokenfeed.trainer.config import Shards, TrainConfig
from tokenfeed.trainer.defaults import (
    MOST_SLOTS,
    Asked,
    Choice,
    epochs_of,
    paced,
    steps_of,
    suited,
)

__all__ = ["Learnable"]

_MODELS = ("words", "shallow", "tiny")


@dataclass(frozen=True, slots=True)
class Learnable:
    """What there is to learn, for each task."""

    manifests: Mapping[str, Manifest]
    shares: Mapping[str, float]
    """Of the steps."""

    @classmethod
    def of_shards(cls, shards: Shards) -> "Learnable":
        """What data sets have; errors are those of `manifests_by_task`."""
        return cls(manifests_by_task(shards), shares_by_task(shards))

    @property
    def is_trainable(self) -> bool:
        """Whether every task has rows to train on."""
        return all("train" in manifest.splits for manifest in self.manifests.values())

    def suited(self, asked: Asked) -> list[Choice]:
        """What suits them, but for what follows from the number of steps."""
        each = [suited(manifest, asked) for manifest in self.manifests.values()]
        if len(each) == 1 or not any(each):
            return each[0]
        found = [_settings(choices) for choices in each]
        return [*_model(found, asked), *_steps(found)]

    def epochs(self, asked: Asked) -> dict[str, int]:
        """Those that suit each task; of one whose steps are counted without, none."""
        found = {name: epochs_of(manifest, asked) for name, manifest in self.manifests.items()}
        return {name: epochs for name, epochs in found.items() if epochs}

    def steps_of(self, epochs: int | Mapping[str, int], config: TrainConfig) -> tuple[int, str]:
        """The steps in which each task has its epochs, and for whose sake there are so many.

        Args:
            epochs: Of all tasks, or of some by name.
            config: Says how much a step is.
        """
        wanted = dict.fromkeys(self.manifests, epochs) if isinstance(epochs, int) else epochs
        found = {
            name: math.ceil(steps_of(count, config, self.manifests[name]) / self.shares[name])
            for name, count in wanted.items()
        }
        longest = max(found, key=found.__getitem__)
        of_task = f" of {longest}" if longest else ""
        return found[longest], f"{wanted[longest]} epochs{of_task}"

    def lasting(
        self, config: TrainConfig, asked: Asked, epochs: int | Mapping[str, int] | None
    ) -> list[Choice]:
        """The steps of `epochs`, where they are given; and what suits so many steps."""
        choices, steps = [], config.steps
        if epochs:
            steps, reason = self.steps_of(epochs, config)
            choices.append(Choice({"steps": steps}, reason))
        if self.suited(asked):
            choices.append(paced(steps))
        return choices


def _settings(choices: list[Choice]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for choice in choices:
        found |= choice.settings
    return found


def _model(found: list[dict[str, Any]], asked: Asked) -> list[Choice]:
    """None where a task wants the plain default."""
    if asked.model or not all("model" in settings for settings in found):
        return []
    largest = max(found, key=lambda settings: _MODELS.index(settings["model"]))
    settings = {name: largest[name] for name in ("model", "dropout")}
    return [Choice(settings, "the largest that suits a task")]


def _steps(found: list[dict[str, Any]]) -> list[Choice]:
    known = [settings for settings in found if settings]
    length = max(settings["sequence_length"] for settings in known)
    whole = Choice({"sequence_length": length}, "the most that suits a task")
    rates = [settings["learning_rate"] for settings in known if "learning_rate" in settings]
    rate = {"learning_rate": max(rates)} if rates else {}
    rows = max((settings.get("step_rows", 0) for settings in known), default=0)
    if rows:
        slots = max(length, min(rows * length, MOST_SLOTS))
        settings = {"micro_batch_tokens": slots, "step_rows": rows} | rate
        return [whole, Choice(settings, "the most that suits a task")]
    if "step_tokens" in known[0]:
        slots = max(length, known[0]["step_tokens"] // length * length)
        rate |= {"micro_batch_tokens": slots, "step_tokens": slots}
    return [whole, Choice(rate, "the most that suits a task")] if rate else [whole]
