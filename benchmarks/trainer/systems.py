"""What benchmarks/trainer/ compares: `train`, and the least that a step can be.

Each gives the moment after every step, so that all are timed alike: from the end of a step to the
end of a later one, with everything that happens between, and no start, evaluation or last save.
"""

import functools
import itertools
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.planning.policies import Fixed
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.loop.evaluation import evaluate
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.loop.trainer import Trainer
from tokenfeed.trainer.models.gpt import SIZES, Transformer
from tokenfeed.trainer.optim.optimizer import learning_rate, set_learning_rate
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.tasks.registry import make_task
from tokenfeed.trainer.tasks.task import Task

__all__ = [
    "CASES",
    "RATE",
    "SKIPPED",
    "Case",
    "Clock",
    "Run",
    "by_bare_loop",
    "by_train",
    "model_of",
    "parts",
    "validation_loss",
]

CPU = torch.device("cpu")
MODEL = "shallow"
RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Case:
    """What is learnt, and in which steps."""

    task: str
    length: int
    """Tokens of a packed sequence; bound of the others."""
    rows: int
    """Rows or sequences of a step."""
    packed: bool = False


CASES = (
    Case("classify", 256, 32),
    Case("tag", 256, 32),
    Case("lm", 128, 16, packed=True),
)


@dataclass(slots=True)
class Clock:
    """Marks the end of every step."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def mark(self) -> None:
        """A step has ended."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


SKIPPED = 10
"""Steps before the first that is timed; the last is left out too, for `train` saves after it."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run left."""

    clock: Clock
    tokens: list[int]
    """Real tokens of every step."""
    slots: int
    loss: float
    """Of the validation split, at the end."""

    def speed(self) -> dict[str, float]:
        """Real tokens a second, of the clock and of the processor."""
        wall, cpu = self.clock.wall, self.clock.cpu
        tokens = sum(self.tokens[SKIPPED : len(wall) - 1])
        return {
            "wall": tokens / (wall[-2] - wall[SKIPPED - 1]),
            "cpu": tokens / (cpu[-2] - cpu[SKIPPED - 1]),
        }


def config_of(case: Case, shards: Path, run_dir: Path, steps: int, **more: Any) -> TrainConfig:
    slots = case.rows * case.length
    settings: dict[str, Any] = {
        "shards": str(shards),
        "model": MODEL,
        "steps": steps,
        "step_rows": None if case.packed else case.rows,
        "sequence_length": case.length,
        "micro_batch_tokens": slots,
        "step_tokens": slots,
        "learning_rate": RATE,
        "warmup_steps": steps // 10,
        "eval_every": steps,
        "save_every": steps,
        "device": "cpu",
        "run_dir": run_dir,
    }
    return TrainConfig(**settings | more)


def by_train(
    case: Case, shards: Path, steps: int, *, spread: float | None = None, **more: Any
) -> Run:
    """`train`, as it is."""
    clock = Clock()
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        if spread is not None:
            policy = Fixed(case.rows, spread=spread)
            stack.enter_context(
                patch("tokenfeed.trainer.loop.loaders.make_policy", lambda *_, **__: policy)
            )
        trainer = Trainer(config_of(case, shards, run_dir, steps, **more))
        stack.callback(trainer.close)

        def after_step() -> bool:
            clock.mark()
            return False

        trainer.train(bool, after_step)  # asked once a step whether to save
        report = trainer.finish()
        slots = trainer.step_sync.slots
        loaders = trainer.loaders
        with loaders.train_loader() as loader:  # the same batches once more
            tokens = [batch.num_tokens for batch in itertools.islice(loader, steps)]
    return Run(clock, tokens, slots, report.metrics["validation"]["loss"])


def parts(case: Case, shards: Path, steps: int) -> tuple[TrainConfig, Task, SplitLoaders]:
    """What evaluation and ready batches need of `train`."""
    config = config_of(case, shards, Path("unused"), steps)
    task = make_task(config, Manifest.read(shards), CPU)
    return config, task, SplitLoaders(config, task, CPU)


def model_of(task: Task) -> Transformer:
    torch.manual_seed(0)
    return Transformer(SIZES[MODEL], task.head)


def validation_loss(model: nn.Module, task: Task, loaders: SplitLoaders) -> float:
    shown = loaders.evaluation_batches("validation")
    return evaluate(model, task, shown, Precision("fp32", CPU), World(CPU))["loss"]


def by_bare_loop(
    case: Case,
    shards: Path,
    steps: int,
    *,
    kernels: str = "fused",
    item: bool = False,
) -> Run:
    """Batches that are ready in memory, and nothing but the step: the bound."""
    _, task, loaders = parts(case, shards, steps)
    with loaders.train_loader() as loader:
        batches = list(itertools.islice(loader, steps))
    ready = [(loaders.shape(batch), batch.num_tokens) for batch in batches]
    model = model_of(task)
    optimizer = torch.optim.AdamW(_groups(model), betas=(0.9, 0.95), **{kernels: True})
    rate = functools.partial(
        learning_rate, schedule="cosine", peak=RATE, steps=steps, warmup_steps=steps // 10
    )
    clock = Clock()
    for step, (shown, _) in enumerate(ready):
        set_learning_rate(optimizer, rate(step + 1))
        loss = task.loss(model, shown)
        (loss.sum / loss.targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if item:
            loss.sum.item()
        clock.mark()
    slots = sum(shown.num_slots for shown, _ in ready)
    tokens = [count for _, count in ready]
    return Run(clock, tokens, slots, validation_loss(model, task, loaders))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, and nothing else."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
