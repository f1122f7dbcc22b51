"""Run a whole training: check the folder, train, export, and explain errors."""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator

import torch

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.manifest import MANIFEST_FILE
from tokenfeed.pipeline.format.store import open_store, reading_once
from tokenfeed.pipeline.text import count_of
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
from tokenfeed.trainer.config.memory import allocator
from tokenfeed.trainer.config.run_config import Settle, TrainConfig, refuse_phases
from tokenfeed.trainer.distributed.world import RankError, World, join_world
from tokenfeed.trainer.loop.loaders import SplitLoaders, peak_of_step, smaller_size
from tokenfeed.trainer.loop.model_export import check_export, export_run
from tokenfeed.trainer.loop.trainer import Trainer
from tokenfeed.trainer.loop.uploads import check_upload, fetch_newest
from tokenfeed.trainer.models.build import check_model
from tokenfeed.trainer.optim.train_state import is_out_of_memory
from tokenfeed.trainer.report.progress_lines import log_beginning
from tokenfeed.trainer.report.run_files import Report, check_trackers, duration
from tokenfeed.trainer.tasks.registry import task_of

_TRIED_STEPS = 3
_EVALUATION_COST = 1 / 3
"""Time to evaluate a token, divided by the time to train on it: only the forward pass."""

_log = logging.getLogger(__name__)


@reading_once()
def train(
    config: TrainConfig,
    should_stop: Callable[[], bool],
    should_save: Callable[[], bool] = bool,
    world: World | None = None,
    settle: Settle | None = None,
) -> Report:
    """Train a run from start to end.

    Manifests are read once: a data set that is replaced while the run goes on does not matter. A
    finished run that is resumed trains nothing.

    Args:
        config: The settings.
        should_stop: Returns whether to stop. Called after each step.
        should_save: Returns whether to save. Called after each step.
        world: The ranks, which stay joined. Default: the ranks of the launcher, until the end.
        settle: See `Trainer`.

    Raises:
        TokenfeedError: Settings, shards, checkpoint or memory do not allow the run.
    """
    joined, world = world, world or join_world(config.device)
    try:
        begin = functools.partial(_begin, config) if world.is_main else lambda: config
        begun = world.run_slow(begin)
        config = world.from_rank_0(lambda: begun)
        with contextlib.closing(Trainer(config, world, settle)) as trainer:
            config = trainer.config
            report = _train(trainer, should_stop, should_save)
        if world.is_main and config.export and report.finished and not config.export.exists():
            export_run(config, config.export, trainer.evaluator.best)
            _log.info("exported to %s", config.export)
        if joined is None:
            world.close()
        return report
    except RuntimeError as error:
        _raise_explained(error, config, world)
        raise


def check_ahead(config: TrainConfig) -> None:
    """Check a run that begins later: its trackers, its data, and the names of layers and weights.

    Raises:
        TokenfeedError: The run could not begin.
    """
    check_trackers(config)
    cpu = torch.device("cpu")
    task = task_of(config, cpu)
    if config.micro_batch_tokens != "auto":
        SplitLoaders(config, task, cpu)
    if config.trainable is not None or config.lora is not None or config.recompute:
        check_model(config, task.head)


def announce(config: TrainConfig, world: World, settle: Settle | None = None) -> None:
    """Log what a run logs before its first step, and the memory and time of some steps, which are
    tried. Write nothing. All ranks call this.

    Raises:
        TokenfeedError: Settings, shards or memory do not allow the run.
    """
    try:
        with contextlib.closing(Trainer(config, world, settle)) as trainer:
            config, shape, loader = trainer.config, trainer.loaders.shape, trainer.loader
            log_beginning(config, trainer.learner, shape, trainer.epoch, loader, 0)
            for line in _stages(trainer):
                _log.info("%s", line)
            _log.info("allocator of a GPU: %s", allocator(os.environ))
            if trainer.device.type != "cpu":
                peaks = world.all_gather(peak_of_step(trainer.learner, trainer.loaders))
                known = [peak for peak in peaks if peak is not None]
                fits = len(known) == len(peaks)
                found = f"{max(known) / 1e9:.2f} GB" if fits else "more than there is"
                _log.info("memory of a step, with activations: %s", found)
                if not fits:  # on any rank: the others would wait for it
                    return
            for line in _times(trainer, trainer.try_steps(_TRIED_STEPS)):
                _log.info("%s", line)
    except RuntimeError as error:
        _raise_explained(error, config, world)
        raise


def _stages(trainer: Trainer) -> Iterator[str]:
    """Yield what each stage of the data reads until the last step."""
    last = round(trainer.epoch.tokens / trainer.epoch.steps * trainer.config.steps)
    begin = 0
    for number, stage in enumerate(trainer.loader.stages, 1):
        until, weights = stage.until_tokens, stage.weights
        end = last if until is None else min(last, until)
        if end <= begin:
            return
        of_one = (end - begin) / sum(weights.values())
        named = [(open_store(path).name, of_one * weight) for path, weight in weights.items()]
        read = ", ".join(f"{tokens:,.0f} of {name}" for name, tokens in named)
        to = "the last step" if until is None else f"{until:,} tokens"
        yield f"stage {number}, to {to}: tokens {read}"
        begin = end


def _times(trainer: Trainer, seconds: list[float]) -> Iterator[str]:
    """Yield the time of a step, of an epoch and of the run, each with a range.

    Args:
        trainer: The run.
        seconds: The seconds of the steps that were tried.
    """
    config, epoch = trainer.config, trainer.epoch
    validation, evaluated = trainer.task.manifest.splits.get("validation"), 0
    if validation is not None:
        tokens = min(config.eval_tokens or validation.tokens, validation.tokens)
        evaluated = tokens * (1 + ceil_div(config.steps, config.eval_every))
    evaluations = _EVALUATION_COST * evaluated * epoch.steps / epoch.tokens
    ends = "at most " * bool(config.patience) + count_of(config.steps, "step")
    for name, steps in (
        ("a step", 1.0),
        (f"an epoch of {epoch.steps:,.0f} steps", epoch.steps),
        (f"the run of {ends}, with validation", config.steps + evaluations),
    ):
        mean, least, most = (
            duration(each * steps)
            for each in (sum(seconds) / len(seconds), min(seconds), max(seconds))
        )
        yield f"time of {name}: {mean} ({least} to {most})"


def _begin(config: TrainConfig) -> TrainConfig:
    """Check the settings of the run, and return them with what `--resume auto` means. A checkpoint
    that only the copy of the run has is downloaded."""
    fetch_newest(config)
    if config.resume == "auto":
        latest = Checkpoints.of_run(config.run_dir).latest()
        config = dataclasses.replace(config, resume=latest is not None)
    _check_folder(config)
    config.check()
    check_trackers(config)
    check_export(config)
    check_upload(config)
    return config


def _train(
    trainer: Trainer, should_stop: Callable[[], bool], should_save: Callable[[], bool]
) -> Report:
    """Train, and return the report. After an error, write the interim report and finish saving.

    A second Ctrl-C raises KeyboardInterrupt, which ends the run without waiting for a checkpoint.
    """
    try:
        trainer.train(should_stop, should_save)
        return trainer.finish()
    except Exception:
        with contextlib.suppress(Exception):  # the device may have failed, or nothing has begun
            trainer.reporter.write_draft()
        if trainer.saver:
            trainer.saver.wait_after_error()
        if trainer.uploads:
            trainer.uploads.wait_after_error()
        raise
    except KeyboardInterrupt:
        if trainer.saver:
            trainer.saver.drop()
        raise


def _check_folder(config: TrainConfig) -> None:
    if (config.run_dir / MANIFEST_FILE).exists():
        raise ConfigError(
            f"`--run-dir`: {config.run_dir} holds shards, and a run would mix its files with them. "
            "Give another folder."
        )
    if config.run_dir.exists() and not config.run_dir.is_dir():
        raise ConfigError(f"`--run-dir`: {config.run_dir} is not a folder. Give a new one.")
    refuse_phases(config.run_dir)
    checkpoints = Checkpoints.of_run(config.run_dir)
    if config.resume:
        checkpoints.to_resume()
    elif checkpoints.latest():
        raise ConfigError(
            f"`--run-dir`: {config.run_dir} already holds a run. Add --resume to go on with it, or "
            "give another folder."
        )


def _raise_explained(error: RuntimeError, config: TrainConfig, world: World) -> None:
    """Raise an error of torch as one line that names the remedy. Return if it is a bug, or an error
    of tokenfeed."""
    if isinstance(error, TokenfeedError):
        return
    if reason := world.reason(error):
        raise RankError(f"rank {world.rank} ends: {reason}") from error
    if message := _explain(error, config):
        raise ConfigError(message) from error


def _explain(error: RuntimeError, config: TrainConfig) -> str | None:
    """Return what a user can do about an error of torch; None if it is a bug."""
    if is_out_of_memory(error):
        problem = (
            f"`--micro-batch-tokens`={config.micro_batch_tokens} needs more memory than there is"
        )
        smaller = smaller_size(config)
        if smaller is None:
            return f"{problem}, and is the least. Add --recompute, or lower --sequence-length."
        again = f"Start again with `--micro-batch-tokens {smaller}`"
        if Checkpoints.of_run(config.run_dir).latest():
            folder = config.run_dir.parent if config.phase else config.run_dir
            again = f"Go on: `train --resume --run-dir {folder} --micro-batch-tokens {smaller}`"
        return f"{problem}. {again}. Steps keep their size."

    if "does not require grad" in str(error):
        return (
            f"`--trainable`={config.trainable}: the loss does not depend on any of these weights. "
            "Use patterns that match weights that the model computes with."
        )

    if config.compile:
        from torch._dynamo.exc import TorchDynamoException  # already imported by --compile

        if isinstance(error, TorchDynamoException):
            reason = str(getattr(error, "inner_exception", error)).split("\n")[0]
            return (
                f"`--compile`: torch cannot compile here ({reason}). Install what it needs, "
                "usually a C compiler, or leave --compile out."
            )
    return None
