"""What the parts of a training share: its settings, its objects, and how far it is."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Literal, cast

from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoint, Checkpoints
from tokenfeed.trainer.config.memory import keep_freed_memory
from tokenfeed.trainer.config.run_config import Settle, TrainConfig
from tokenfeed.trainer.data.attention import separation
from tokenfeed.trainer.data.datasets import Epoch, epoch_of
from tokenfeed.trainer.distributed.world import StepSync, World, device_named
from tokenfeed.trainer.loop.initial_weights import read_initial_weights
from tokenfeed.trainer.loop.loaders import SplitLoaders, choose_micro_batch, fill_step
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.report.progress_lines import ProgressLog
from tokenfeed.trainer.report.run_files import MetricsFile
from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.tasks.registry import task_of
from tokenfeed.trainer.tasks.task import Metrics


class Run:
    """One run. Parts read it; `step` and `config` change while it goes on."""

    metrics: MetricsFile | None
    """None on ranks other than 0."""
    stall: StallMeter
    progress_log: ProgressLog
    """Set when the training begins. Before, the run has no folder, and nothing is measured."""

    def __init__(
        self, config: TrainConfig, world: World | None = None, settle: Settle | None = None
    ) -> None:
        """
        Args:
            config: The settings.
            world: The ranks. Default: this process alone.
            settle: Returns the settings for the step that fills the devices, which is at most that
                of `config`. None: the step of `config`.
        """
        config.check()
        self.started_s = time.perf_counter()
        self.world = world or World(device_named(config.device))
        self.device = self.world.device
        keep_freed_memory(self.device)
        self.task = task_of(config, self.device)
        self.learner = Learner(config, self.task, self.world, read_initial_weights)
        config = choose_micro_batch(config, self.learner, self.loaders_of, self.world)
        if settle:
            config = fill_step(config, settle, self.world)
        self.learner.use(config)
        self.config, self.loaders = config, self.loaders_of(config)
        self.loader = self.loaders.train_loader()
        self.checkpoints = Checkpoints.of_run(config.run_dir)
        self.step_sync = StepSync(self.world)
        self.step = self.began_at = 0
        self.earlier_s = 0.0
        """Wall time of the run's earlier sessions, until the checkpoint that this one resumes."""
        self.seconds_of = dict.fromkeys(("evaluation", "checkpoint"), 0.0)
        """Seconds of the loop that were lost to each of them."""
        self.should_stop: Callable[[], bool] = bool

    def loaders_of(self, config: TrainConfig) -> SplitLoaders:
        """Return the loaders of the run with some settings."""
        dtype = self.learner.precision.dtype
        apart_by = separation(self.device, dtype, compiled=bool(config.compile))
        return SplitLoaders(config, self.task, self.device, separation=apart_by)

    @functools.cached_property
    def epoch(self) -> Epoch:
        """Estimated figures of a pass over the train split."""
        on_gpu = self.device.type != "cpu"
        return epoch_of(self.config, self.task.manifest, on_gpu=on_gpu)

    @property
    def seconds(self) -> float:
        """Wall time of all sessions."""
        return self.earlier_s + time.perf_counter() - self.started_s

    def is_due(self, step: int, every: int) -> bool:
        """Return whether a step is the last one, or one of every so many."""
        return step == self.config.steps or step % every == 0

    @property
    def stops_early(self) -> bool:
        """Whether the run ends with this step, by request. The process may be killed within
        seconds."""
        return self.step_sync.stop and self.step < self.config.steps

    def is_stopped(self) -> bool:
        """Return whether to end an evaluation early. All ranks call this."""
        return self.step_sync.ask(stop=self.should_stop())

    @contextlib.contextmanager
    def timed(self, cause: Literal["evaluation", "checkpoint"]) -> Iterator[None]:
        """Charge a block to a cause of stall, and count its seconds."""
        began_s = time.perf_counter()
        with self.stall.cause(cause):
            yield
        self.seconds_of[cause] += time.perf_counter() - began_s

    def gather_stall(self) -> None:
        """Give rank 0 the stall of all ranks."""
        if self.world.size > 1:
            self.stall.gather(self.world.all_gather)

    def known_metrics(self, split: str) -> Metrics:
        """Return the metrics of a split at this step in metrics.jsonl, on all ranks."""
        return self.world.from_rank_0(
            lambda: self.metrics.evaluation(self.step, split) if self.metrics else {}
        )

    def open_checkpoint(self, step: int | None = None) -> Checkpoint:
        """Open the checkpoint of a step, or the latest one. Rank 0 verifies it."""

        def verify() -> Checkpoint | None:
            return self.checkpoints.open(step) if self.world.is_main else None

        verified = self.world.run_slow(verify)
        return self.world.from_rank_0(lambda: cast(Checkpoint, verified))
