"""How a run's rows become micro-batches: packed into sequences of one length, or padded.

With --compile, the model is compiled for each shape. So padded lengths are multiples of a large
step, and a micro-batch with too few rows is filled up: all shapes are known before training.

Example: --sequence-length 100 --micro-batch-tokens 1024 --compile makes 64 rows of length 16, 32
rows of length 32, ..., 10 rows of length 96, 9 rows of length 112.

`epoch_of` estimates the steps and micro-batches of an epoch from the manifest alone: it draws
rows with the lengths in the manifest, then cuts, sorts and packs them as one window. Imports no
torch.
"""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from tokenfeed.pipeline.arithmetic import ceil_div, round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import column_of
from tokenfeed.pipeline.planning.batching import plan_window
from tokenfeed.pipeline.planning.estimates import likely_lengths
from tokenfeed.pipeline.planning.order import Draw
from tokenfeed.pipeline.planning.policies import Fixed, LongRows, Packed, Padded, random_order
from tokenfeed.trainer.config.run_config import MOST_SHAPES, TrainConfig, check_multiple

if TYPE_CHECKING:
    from tokenfeed.trainer.tasks.task import Task


Policy = Packed | Padded | Fixed

_TILE = 8  # lengths are multiples of the tiles of tensor cores


def is_packed(config: TrainConfig, manifest: Manifest) -> bool:
    """Return whether a run packs its rows. Otherwise it pads them.

    By default, rows are padded if rows or words have labels.
    """
    if config.batching == "auto":
        return column_of(manifest.columns, "target") is None
    return config.batching == "packed"


def long_rows_of(config: TrainConfig, manifest: Manifest) -> LongRows:
    """Return what to do with rows longer than --sequence-length.

    Rows with prompts are truncated: a later piece would have targets without their prompt. Other
    rows are cut into pieces.
    """
    has_prompts = column_of(manifest.columns, "context") is not None
    longest = max(split.longest_row for split in manifest.splits.values())
    return "truncate" if has_prompts and longest > config.sequence_length else "cut"


def make_policy(
    config: TrainConfig, *, packed: bool, on_gpu: bool, long_rows: LongRows = "cut"
) -> Policy:
    """Return the batching policy of a run's loader.

    Args:
        config: Settings with the size of micro-batches.
        packed: Whether rows are packed.
        on_gpu: Whether padded lengths must suit tensor cores.
        long_rows: The result of `long_rows_of`.

    Raises:
        ConfigError: Sequences of --sequence-length do not fill a micro-batch.
    """
    if packed:
        check_multiple(config, "micro_batch_tokens", "sequence_length")
        return Packed(
            config.sequence_length,
            config.rows,
            long_rows=long_rows,
            fill=config.compile,
            balance_attention=config.balance_attention,
        )
    multiple_of = _TILE if on_gpu else 1
    if config.compile:
        multiple_of = round_up(ceil_div(config.sequence_length, MOST_SHAPES), _TILE)
    if config.step_rows is not None:
        return Fixed(config.rows, multiple_of=multiple_of, fill=config.compile)
    return Padded(
        config.micro_batch_slots,
        multiple_of=multiple_of,
        long_rows=long_rows,
        sequence_length=config.sequence_length,
        fill=config.compile,
    )


def padding_remedy(config: TrainConfig, task: "Task") -> str:
    """Return advice against padding.

    Rows with one label cannot be packed. Packed rows have padding only at their ends.
    """
    if is_packed(config, task.manifest):
        return "raise `--sequence-length`: longer rows have a smaller share of padding"
    if task.kind != "row":
        return "`--batching packed`"
    return (
        "rows with one label cannot be packed; lower `--micro-batch-tokens`: fewer rows of "
        "nearer lengths are padded together"
    )


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


def largest_shape(policy: Policy, longest: int) -> tuple[int, int]:
    """Return rows and padded length of the largest micro-batch; if several, of the longest one."""
    shapes = _full_shapes(policy, longest)
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))


def _full_shapes(policy: Policy, longest: int) -> list[tuple[int, int]]:
    """Return rows and padded length, shortest first. Packed rows have one length."""
    policy, step = dataclasses.replace(policy, fill=True), policy.multiple_of
    last = round_up(min(longest, policy.longest_piece), step)
    return [(policy.rows_to_fill(length), length) for length in range(step, last + 1, step)]


def possible_sizes(config: TrainConfig, task: "Task") -> list[int]:
    """Return the values that --micro-batch-tokens may take with the same step, ascending.

    Each divides the step. They also suit the evaluation, which packs the rows of causal models.
    """
    length = config.sequence_length
    if config.step_rows is not None:
        return [rows * length for rows in _divisors(config.step_rows)]
    found = _divisors(config.step_tokens)
    if task.head.causal or is_packed(config, task.manifest):
        check_multiple(config, "step_tokens", "sequence_length")
        found = [size for size in found if size % length == 0]
    least = 2 * length if config.compile else length
    return [size for size in found if size >= least] or found[-1:]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


_MOST_ROWS = 100_000
"""Rows to sample at most."""


class Epoch(NamedTuple):
    """Estimated figures of an epoch."""

    steps: float
    """Optimizer steps. The last one of a window may have fewer micro-batches than the others."""
    tokens: float
    """Real tokens. Truncated rows lose some."""


def epoch_of(config: TrainConfig, manifest: Manifest, *, on_gpu: bool) -> Epoch:
    """Estimate the steps and tokens of an epoch from the manifest.

    Cost: as much as planning a window.
    """
    packed = is_packed(config, manifest)
    if config.micro_batch_tokens == "auto":  # a step has the same rows with any number
        if packed and config.step_rows is None:
            check_multiple(config, "step_tokens", "sequence_length")
        rows = (config.step_rows or 0) * config.sequence_length
        config = dataclasses.replace(config, micro_batch_tokens=rows or config.step_tokens)
    long_rows = long_rows_of(config, manifest)
    policy = make_policy(config, packed=packed, on_gpu=on_gpu, long_rows=long_rows)
    split = manifest.split("train")
    sampled = min(split.rows, _MOST_ROWS)
    draw = Draw(config.seed, config.seed, 0, num_windows=1)
    lengths = likely_lengths(split, sampled)
    order = random_order(sampled, config.seed) if config.order == "file" else None
    plan = plan_window(lengths, policy, step_size=config.accumulation, draw=draw, rows=order)
    return Epoch(
        steps=split.rows / sampled * (len(plan.step_offsets) - 1),
        tokens=split.tokens * int(plan.cut.lengths[plan.pieces].sum()) / int(lengths.sum()),
    )


def knows_steps(config: TrainConfig, manifest: Manifest) -> bool:
    """Return whether the steps of an epoch do not depend on the order of rows in the data set."""
    shuffled = config.order == "shuffled"
    return shuffled or config.step_rows is not None or is_packed(config, manifest)
