"""The settings that suit a data set: what `train` uses where the command line says nothing.

Documents keep the plain defaults of `TrainConfig`, for how much of them is enough is nobody's
guess. What has labels or completions is learnt for some epochs: as many as make two million tokens,
but at least 3 and at most 10. The figures come from small sets and two cores. Torch-free.
"""

import math
from dataclasses import dataclass
from typing import Any

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.format.manifest import Manifest, SplitInfo
from tokenfeed.pipeline.format.schema import Column, column_of
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.settings import flag_of

__all__ = ["Asked", "Choice", "epochs_of", "lasting", "steps_of", "suited"]

_TOKENS = 2_000_000
"""Trained in all, and about where a set is no longer small."""
_EPOCHS = (3, 10)
_STEPS_OF_EPOCH, _ROWS = 500, (32, 256)
_RATE = 1e-3
"""For a step of the least rows."""
_FINE_RATE = 5e-5
_MOST_SLOTS = 16_384
"""Of a micro-batch of labelled rows: its memory follows the layers, not the vocabulary."""
_PACKED_LENGTH, _PACKED_SLOTS = (128, 1024), 2048
_WARMUP = 0.1
_EVALUATIONS, _LINES = 20, 50
_LEAST_LOG_EVERY, _MOST_EVERY = 10, 1000


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings that were chosen for one reason."""

    settings: dict[str, Any]
    reason: str

    def line(self, config: TrainConfig) -> str:
        """For the console: the flags that a run has by this choice; empty where it has none."""
        flags = [
            flag_of(name) + ("" if value is True else f" {value}")
            for name, value in self.settings.items()
            if getattr(config, name) == value
        ]
        return f"{' '.join(flags)} ({self.reason})" if flags else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the command line says of matters on which others hang."""

    objective: str = "auto"
    model: str | None = None
    from_scratch: bool = False
    """Whether an hf: model draws its weights anew."""
    step_tokens: bool = False
    """Whether steps are counted in tokens."""

    @property
    def finetunes(self) -> bool:
        """Whether a model is taken that has learnt before."""
        return (self.model or "").startswith("hf:") and not self.from_scratch


def suited(manifest: Manifest, asked: Asked) -> list[Choice]:
    """What suits a data set, but for what follows from the number of steps."""
    train = manifest.splits.get("train")
    if asked.objective == "masked" or train is None or not train.rows:
        return []
    longest = max(split.longest_row for split in manifest.splits.values())
    label = column_of(manifest.columns, "target")
    if label is not None:
        model = [] if asked.model else [_model(label, train)]
        return [*model, *_padded(longest, train, asked), *_gently(asked)]
    if column_of(manifest.columns, "context") is not None:
        return [_packed(longest), *_gently(asked)]
    return []


def epochs_of(manifest: Manifest, asked: Asked) -> int | None:
    """The epochs that suit a data set; None where steps are counted without."""
    if not suited(manifest, asked):
        return None
    if asked.finetunes:
        return _EPOCHS[0]
    return _between(_EPOCHS, _TOKENS // max(1, manifest.split("train").tokens))


def steps_of(epochs: int, config: TrainConfig, manifest: Manifest) -> int:
    """The steps of whole passes over the train split; about, where rows are packed."""
    train = manifest.split("train")
    if config.step_rows is not None:
        return max(1, epochs * math.ceil(train.rows / config.step_rows))
    return max(1, math.ceil(epochs * train.tokens / config.step_tokens))


def lasting(
    manifest: Manifest, config: TrainConfig, asked: Asked, epochs: int | None
) -> list[Choice]:
    """The steps of `epochs`, if given; and, where `suited` chose anything, what suits that many
    steps."""
    choices, steps = [], config.steps
    if epochs:
        steps = steps_of(epochs, config, manifest)
        choices.append(Choice({"steps": steps}, f"{epochs} epochs"))
    if suited(manifest, asked):
        choices.append(_paced(steps))
    return choices


def _paced(steps: int) -> Choice:
    """What suits so many steps."""
    every = min(_MOST_EVERY, math.ceil(steps / _EVALUATIONS))
    settings = {
        "warmup_steps": round(_WARMUP * steps),
        "eval_every": every,
        "save_every": every,
        "log_every": max(_LEAST_LOG_EVERY, steps // _LINES),
    }
    return Choice(settings, f"{steps:,} steps")


def _model(label: Column, train: SplitInfo) -> Choice:
    """Few rows with one label are told apart by their words: layers learn them by heart."""
    few = train.tokens < _TOKENS
    small, dropout = ("words", 0.3) if label.per == "row" else ("shallow", 0.2)
    settings = {"model": small, "dropout": dropout} if few else {"model": "tiny", "dropout": 0.1}
    return Choice(settings, f"{train.tokens:,} tokens are {'few' if few else 'not few'}")


def _padded(longest: int, train: SplitInfo, asked: Asked) -> list[Choice]:
    """Steps of some rows, each in one micro-batch where it is not too large."""
    length = max(2, round_up(longest, 8))
    reason = f"the longest row has {longest:,} tokens"
    if asked.step_tokens:
        return [Choice({"sequence_length": length}, reason)]
    rows = _step_rows(train)
    slots = max(length, min(rows * length, _MOST_SLOTS))
    rate = round(_RATE * math.sqrt(rows / _ROWS[0]), 5)
    return [
        Choice({"sequence_length": length, "micro_batch_tokens": slots}, reason),
        Choice(
            {"step_rows": rows, "learning_rate": rate},
            f"{math.ceil(train.rows / rows):,} steps an epoch",
        ),
    ]


def _gently(asked: Asked) -> list[Choice]:
    if not asked.finetunes:
        return []
    return [Choice({"learning_rate": _FINE_RATE}, "the model has learnt before")]


def _packed(longest: int) -> Choice:
    length = _between(_PACKED_LENGTH, round_up(longest, 64))
    slots = _PACKED_SLOTS // length * length
    settings = {"sequence_length": length, "micro_batch_tokens": slots, "step_tokens": slots}
    return Choice(settings, f"the longest row has {longest:,} tokens")


def _step_rows(train: SplitInfo) -> int:
    """A power of two."""
    return _between(_ROWS, 1 << max(1, train.rows // _STEPS_OF_EPOCH).bit_length() - 1)


def _between(bounds: tuple[int, int], value: int) -> int:
    least, most = bounds
    return max(least, min(most, value))
