"""The loaders of a run's splits, and the size of their micro-batches.

A step of the run is a step of the loader: `accumulation` micro-batches over all ranks, of which
each rank gets its share. `--micro-batch-tokens auto` takes the largest micro-batch that fits the
device, found by trial.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Generator
from typing import Any, Literal

import torch

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.devices import cuda
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest, SplitInfo
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.stages import Stage
from tokenfeed.pipeline.text import count_of
from tokenfeed.trainer.config.run_config import (
    MOST_SHAPES,
    Settle,
    TrainConfig,
    check_multiple,
)
from tokenfeed.trainer.data.attention import Separation
from tokenfeed.trainer.data.datasets import (
    Policy,
    is_packed,
    long_rows_of,
    make_policy,
    shown,
    source_of,
    training_source,
)
from tokenfeed.trainer.data.micro_batch import MicroBatch, Shaper
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.optim.train_state import Learner, is_out_of_memory
from tokenfeed.trainer.tasks.task import Task

_SPLITS = ("train", "validation", "test")
"""The splits that a run reads."""
_SPARE_SHARE = 0.05
"""Share of the device's memory to leave free, for gaps between blocks and for libraries."""
_WINDOW_TOKENS = 1 << 23
"""Tokens of an evaluation that are arranged together. The default depends on the micro-batch."""
_ON_CPU = 2048
"""Most tokens of a micro-batch on a CPU. More gain nothing, and do not fit the caches."""

_log = logging.getLogger(__name__)


class SplitLoaders:
    """Opens the splits of a run's data sets."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        device: torch.device,
        *,
        separation: Separation = "mask",
    ) -> None:
        """
        Args:
            config: Settings of the batching.
            task: Its preferences apply where a setting is auto.
            device: The device that batches are moved to.
            separation: What separates packed documents.

        Raises:
            ConfigError: Settings contradict each other, or the task.
        """
        check_rows(config, task)
        self._config, self._task, self._device = config, task, device
        self.policy = self._policy_of(config.sequence_length)
        """The batching of training."""
        for_evaluation = config.for_evaluation
        size, length = config.eval_micro_batch_tokens, config.sequence_length
        if size != "auto" and (size < length or (task.head.causal and size % length)):
            expected = f"a multiple of --sequence-length={length}"
            raise ConfigError(
                f"`--eval-micro-batch-tokens`={size}: expected {expected}. Try "
                f"{max(1, size // length) * length}."
            )
        self._evaluation = self._policy(for_evaluation, packed=task.head.causal)
        self.shape = Shaper(
            causal=task.head.causal,
            apart=is_apart(config, task),
            separation=separation,
            compiled=bool(config.compile),
        )
        """Makes micro-batches from the batches of the loaders."""

    def train_loader(self) -> ShardLoader:
        """Return a loader of the train split: shuffled, without end, with steps that are divided
        among the ranks.

        Raises:
            ConfigError: A step has fewer micro-batches than there are ranks.
        """
        config, on_cpu = self._config, self._device.type == "cpu"
        workers: int | Literal["auto"] | None = config.num_workers
        if workers is None:  # on a CPU, workers would slow training down
            workers = 0 if on_cpu else "auto"
        loader = self.open(
            "train",
            self.policy,
            training_source(config, self._policy_of),
            num_workers=workers,
            prefetch=config.prefetch,
            epochs=None,
            micro_batches_per_step=config.accumulation,
            order=config.order,
            skip=config.skip,
        )
        ranks, shared = loader.world_size, config.accumulation
        if ranks > shared:
            possible = possible_sizes(config, self._task)
            sizes = [size for size in possible if config.step_slots // size >= ranks]
            name, row = (
                ("tokens", 1) if config.step_rows is None else ("rows", config.sequence_length)
            )
            least = ranks * possible[0] // row
            remedy = f"Give {max(sizes)}" if sizes else f"Raise --step-{name} to {least}"
            raise ConfigError(
                f"`--micro-batch-tokens`={config.micro_batch_slots}: {ranks} ranks share "
                f"{count_of(shared, 'micro-batch', 'micro-batches')} of a step, so some would have "
                f"none. {remedy}, or start at most {count_of(shared, 'rank')}."
            )
        return loader

    def evaluation_loader(
        self, split: str, folder: str | None = None, tokens: int | None = None
    ) -> ShardLoader:
        """Return a loader that reads a split once, of all data sets or of one.

        It is shuffled, always in the same way. The size of micro-batches and the number of ranks
        change neither its rows nor how they are packed.

        Args:
            split: The split.
            folder: The data set; None: all.
            tokens: Read random rows of the data set, about so many tokens, but at least one row.
                None: read all.
        """
        loader = self.open(split, self._evaluation, folder, window_tokens=_WINDOW_TOKENS)
        if tokens is not None:
            loader._deliver_part(tokens)
        return loader

    def evaluation_batches(
        self, split: str, folder: str | None = None, tokens: int | None = None
    ) -> Generator[MicroBatch, None, None]:
        """Yield this rank's micro-batches of an evaluation, as many on each rank. See
        `evaluation_loader`."""
        with self.evaluation_loader(split, folder, tokens) as feed:
            yield from map(self.shape, feed)

    def micro_batches_of(self, tokens: int, split: SplitInfo) -> int:
        """Return how many micro-batches of an evaluation hold about `tokens` tokens; at least 1."""
        return max(1, tokens // self._evaluation.tokens_per_batch(split.tokens / split.rows))

    def blanks(self) -> tuple[list[MicroBatch], list[MicroBatch]]:
        """Return empty micro-batches of every shape in training, and in evaluation, with --compile.

        Once the model is compiled for them, no step compiles again.
        """
        longest = max(split.longest_row for split in self._task.manifest.splits.values())
        lengths = [stage.sequence_length for stage in self._config.mixing]
        of_stages = [self._policy_of(length) for length in lengths if length]

        def of(*policies: Policy) -> list[MicroBatch]:
            return [
                self.first(policy).blank_like(rows, length)
                for policy in dict.fromkeys(policies)
                for rows, length in shapes(policy, longest)
            ]

        return of(self.policy, *of_stages), of(self._evaluation)

    def largest(self) -> tuple[MicroBatch, MicroBatch]:
        """Return an empty micro-batch of the largest shape in training, and in evaluation."""

        def of(policy: Policy) -> MicroBatch:
            return self.first(policy).blank_like(*_largest_shape(policy, self._task.manifest))

        return of(self.policy), of(self._evaluation)

    def first(self, policy: Policy | None = None) -> MicroBatch:
        """Return the first micro-batch of training, which shows how documents share rows. Default
        of `policy`: that of training."""
        with self.open("train", policy or self.policy) as feed:
            return self.shape(next(iter(feed)))

    def _policy(self, config: TrainConfig, *, packed: bool) -> Policy:
        return make_policy(
            config,
            packed=packed,
            on_gpu=self._device.type != "cpu",
            long_rows=long_rows_of(config, self._task.manifest),
        )

    def _policy_of(self, length: int) -> Policy:
        """Return the policy of a stage with sequences of this length."""
        config = dataclasses.replace(self._config, sequence_length=length)
        return self._policy(config, packed=is_packed(config, self._task.manifest))

    def open(
        self,
        split: str,
        policy: Policy,
        source: str | Mixture | list[Stage] | None = None,
        **options: Any,
    ) -> ShardLoader:
        """Return a loader of a split: of one epoch, unless `options` of `ShardLoader` say more."""
        config = self._config
        settings: dict[str, Any] = {
            "seed": config.seed,
            "targets": config.targets,
            "num_workers": 0,
            "epochs": 1,
            "micro_batches_per_step": 1,
            "cache_dir": config.cache_dir,
            "cache_bytes": config.cache_bytes,
        }
        return ShardLoader(
            source or source_of(config.shards),
            batching=policy,
            split=split,
            device=self._device,
            **settings | options,
        )


def check_rows(config: TrainConfig, task: Task) -> None:
    """Reject settings that separate a row from its label, or that do not cut long rows.

    Raises:
        ConfigError: Rows with labels would be packed, or cut into pieces. Or rows are longer than
            a sequence, and a step has a number of padded rows.
    """
    packed = is_packed(config, task.manifest)
    by_rows = config.step_rows is not None and not packed
    if packed and task.kind == "row":
        raise ConfigError(
            f"`--batching`: rows with one label, as those of {task.name}, cannot be packed. Leave "
            "it out."
        )
    splits = task.manifest.splits
    longest = max(splits[name].longest_row for name in _SPLITS if name in splits)
    if longest <= config.sequence_length or not (task.kind == "row" or by_rows):
        return
    why, other = "rows with one label cannot be cut", "shorten the texts before `pretokenize`"
    if task.kind != "row":
        why = "steps of --step-rows padded rows cut none"
        other = "give --step-tokens in place of --step-rows"
    raise ConfigError(
        f"`--sequence-length`={config.sequence_length}: {shown(config.shards)} has rows of "
        f"{longest} tokens, and {why}. Raise it to {longest}, or {other}."
    )


def is_apart(config: TrainConfig, task: Task) -> bool:
    """Return whether packed documents are separate.

    Raises:
        ConfigError: The task needs separate documents, and --attention is rows.
    """
    if config.attention == "auto":
        return task.apart
    if config.attention == "rows" and not task.head.causal:
        raise ConfigError(
            f"`--attention`: rows is for causal models, and {task.name} attends in both "
            "directions: documents would see each other. Leave it out."
        )
    return config.attention == "documents"


def shapes(policy: Policy, longest: int) -> list[tuple[int, int]]:
    """Return rows and padded length of each full micro-batch, shortest first.

    Raises:
        ConfigError: There are too many shapes to compile, or one has a single row. The compiler
            treats a single row differently.
    """
    found = _full_shapes(policy, longest)
    rows, length = found[-1]
    if rows < 2:
        raise ConfigError(
            f"`--compile`: a micro-batch of rows of {length} tokens has only {rows}. Raise "
            f"--micro-batch-tokens to at least {2 * length}."
        )
    if len(found) > MOST_SHAPES:
        raise ConfigError(
            f"`--compile`: rows of up to {length} tokens come in {len(found)} lengths, and each is "
            f"compiled. Raise --sequence-length to {length}: then there are {MOST_SHAPES}."
        )
    return found


def _largest_shape(policy: Policy, manifest: Manifest) -> tuple[int, int]:
    """Return rows and length of the largest micro-batch; if several, of the longest one."""
    found = _full_shapes(policy, manifest.split("train").longest_row)
    return max(found, key=lambda shape: (shape[0] * shape[1], shape[1]))


def _full_shapes(policy: Policy, longest: int) -> list[tuple[int, int]]:
    """Return rows and padded length, shortest first. Packed rows have one length."""
    policy, step = dataclasses.replace(policy, last="fill"), policy.multiple_of
    last = round_up(min(longest, policy.longest_piece), step)
    return [(policy.rows_to_fill(length), length) for length in range(step, last + 1, step)]


def choose_micro_batch(
    config: TrainConfig,
    learner: Learner,
    loaders_of: Callable[[TrainConfig], SplitLoaders],
    world: World,
) -> TrainConfig:
    """Return the settings with a number for `micro_batch_tokens` in place of `auto`.

    All ranks get the same number, and each rank has at least one micro-batch of every step.

    Args:
        config: The settings. A resumed run keeps its number.
        learner: The model of the run. It does not change.
        loaders_of: Returns the loaders of settings with a number.
        world: The ranks.

    Raises:
        ConfigError: Not even the smallest micro-batch fits.
    """
    if config.micro_batch_tokens != "auto":
        return config
    begun = world.from_rank_0(lambda: TrainConfig.of_run(config.run_dir)) if config.resume else None
    if begun is not None:
        return _with_size(config, begun.micro_batch_slots, "as when the run began")
    if config.shard_model and world.size > 1:
        raise ConfigError(
            "`--micro-batch-tokens`=auto does not work with --shard-model. Give a number, or leave "
            "--shard-model out."
        )
    sized = [
        dataclasses.replace(config, micro_batch_tokens=size)
        for size in possible_sizes(config, learner.task)
    ]
    sized = [each for each in sized if each.accumulation >= world.size] or sized[:1]
    if world.device.type == "cpu":
        sized = [each for each in sized if each.micro_batch_slots <= _ON_CPU] or sized[:1]
    peaks: dict[int, int | None] = {}

    def fits(size: int) -> bool:
        each = dataclasses.replace(config, micro_batch_tokens=size)
        peaks[size] = peak_of_step(learner, loaders_of(each))
        return all(peak is not None for peak in world.all_gather(peaks[size]))

    sizes = [each.micro_batch_slots for each in sized]
    found = largest_fitting(sizes, config.sequence_length, fits)
    if found is not None:
        peak = peaks[found]
        reason = f"a step takes {peak / 1e9:.1f} GB" if peak else "on a CPU, more gains nothing"
        return _with_size(config, found, reason)
    raise ConfigError(
        f"`--micro-batch-tokens`=auto: {sized[0].micro_batch_tokens} tokens, the fewest that "
        "divide a step, do not fit into memory. Try --recompute, a smaller --sequence-length or "
        "a smaller --model."
    )


def largest_fitting(sizes: list[int], length: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest of some ascending sizes that fits: first among powers of two times the
    length of a row, then among the others that are larger."""
    best, too_large = None, math.inf
    powers = [size for size in sizes if size % length == 0 and (size // length).bit_count() == 1]
    for size in powers or sizes[:1]:
        if not fits(size):
            too_large = size
            break
        best = size
    for size in reversed(sizes):
        if (best or 0) < size < too_large and fits(size):
            return size
    return best


def fill_step(config: TrainConfig, settle: Settle, world: World) -> TrainConfig:
    """Return the settings of a run whose step has one micro-batch on each rank."""
    if config.step_rows is None:
        name, bound, step = "tokens", config.step_tokens, config.micro_batch_slots * world.size
    else:
        name, bound, step = "rows", config.step_rows, config.rows * world.size
    _log.info("--step-%s %d: a micro-batch on each device, at most %d in all", name, step, bound)
    found = settle(config, step, config.micro_batch_slots)
    found.check()
    return found


def peak_of_step(learner: Learner, loaders: SplitLoaders) -> int | None:
    """Try a step with the largest micro-batches of training, and an evaluation. The learner does
    not change.

    Returns:
        The memory of a GPU in bytes, with moments, that tensors take; 0 on a CPU; None if the step
        does not fit.
    """
    device, spare = learner.device, 0
    on_gpu = device.type != "cpu"
    if on_gpu:
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(device)
        spare = int(_SPARE_SHARE * cuda.mem_get_info(device)[1])
    shown, evaluated = loaders.largest()
    try:
        spare_bytes = learner.moment_bytes // learner.ranks + spare
        learner.rehearse([shown, shown], [evaluated], spare_bytes=spare_bytes)
        return cuda.max_memory_allocated(device) - spare if on_gpu else 0
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        if on_gpu:
            cuda.empty_cache()
            cuda.reset_peak_memory_stats(device)  # of the run, which begins after this trial


def _with_size(config: TrainConfig, tokens: int, reason: str) -> TrainConfig:
    _log.info("--micro-batch-tokens %d: %s", tokens, reason)
    return dataclasses.replace(config, micro_batch_tokens=tokens)


def possible_sizes(config: TrainConfig, task: Task) -> list[int]:
    """Return the values that --micro-batch-tokens may take with the same step, ascending.

    Each divides the step. They also suit the evaluation, which packs the rows of causal models.
    """
    length = config.sequence_length
    if config.step_rows is not None:
        least = min(config.step_rows, 2 if config.compile else 1)
        return [rows * length for rows in _divisors(config.step_rows) if rows >= least]
    found = _divisors(config.step_tokens)
    if task.head.causal or is_packed(config, task.manifest):
        check_multiple(config, "step_tokens", "sequence_length")
        found = [size for size in found if size % length == 0]
    least = 2 * length if config.compile else length
    return [size for size in found if size >= least] or found[-1:]


def smaller_size(config: TrainConfig) -> int | None:
    """Return a smaller --micro-batch-tokens with steps of the same size; None if the
    value is the least."""
    length, size = config.sequence_length, config.micro_batch_tokens
    if size == "auto":
        return None
    if config.step_rows is not None:
        sizes = [rows * length for rows in _divisors(config.step_rows) if rows < config.rows]
    else:
        whole = size % length == 0
        least = length if whole else 1
        sizes = [each for each in _divisors(config.step_tokens) if least <= each < size]
        sizes = [each for each in sizes if each % length == 0] if whole else sizes
    return max((each for each in sizes if 2 * each <= size), default=max(sizes, default=None))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
