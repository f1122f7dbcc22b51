"""How a run cuts its rows into micro-batches: packed into sequences of one length, or padded.

With --compile every shape is compiled, so padded lengths come in a few steps, and a micro-batch
that is short of rows is filled up: rows times length is known before training.

    --sequence-length 100 --micro-batch-tokens 1024 --compile
    makes 64 rows of length 16, 32 of 32, ... 10 of 96, 9 of 112
"""

import math
from typing import TYPE_CHECKING

from tokenfeed.pipeline.arithmetic import ceil_div, round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import column_of
from tokenfeed.pipeline.planning.policies import Fixed, Packed, Padded
from tokenfeed.pipeline.planning.policy import ByLength, LongRows
from tokenfeed.trainer.config.run_config import MOST_SHAPES, TrainConfig

if TYPE_CHECKING:
    from tokenfeed.trainer.tasks.task import Task  # with torch, which the defaults do without

__all__ = [
    "Policy",
    "is_packed",
    "largest_shape",
    "long_rows_of",
    "make_policy",
    "micro_batch_sizes",
    "padding_remedy",
    "possible_sizes",
    "rows_of",
    "shapes",
]

Policy = Packed | ByLength

_TILE = 8  # lengths of tensor cores' tiles


def is_packed(config: TrainConfig, task: "Task") -> bool:
    """Whether rows are packed: as told, or as suits the task."""
    return task.packs if config.batching == "auto" else config.batching == "packed"


def long_rows_of(config: TrainConfig, manifest: Manifest) -> LongRows:
    """What happens to rows longer than --sequence-length. A completion is learnt after its prompt
    only, so such a row loses its end; a later piece would have targets and no prompt."""
    has_prompts = column_of(manifest.columns, "context") is not None
    longest = max(split.longest_row for split in manifest.splits.values())
    return "truncate" if has_prompts and longest > config.sequence_length else "cut"


def make_policy(
    config: TrainConfig, *, packed: bool, on_gpu: bool, long_rows: LongRows = "cut"
) -> Policy:
    """The policy of a run's loader.

    Args:
        config: How large micro-batches are.
        packed: Whether rows are packed.
        on_gpu: Whether padded lengths suit tensor cores.
        long_rows: See `long_rows_of`.

    Raises:
        ConfigError: Sequences of that length do not fill a micro-batch.
    """
    if packed:
        config.check_packed()
        return Packed(config.sequence_length, batch_size=config.rows, long_rows=long_rows)
    multiple_of = _multiple_of(config, on_gpu=on_gpu)
    if config.step_rows is not None:
        return Fixed(config.rows, multiple_of=multiple_of)
    return Padded(
        config.micro_batch_slots,
        multiple_of=multiple_of,
        long_rows=long_rows,
        sequence_length=config.sequence_length,
    )


def padding_remedy(config: TrainConfig, task: "Task") -> str:
    """What a run can do about padding: rows with one label cannot be packed, and what is packed
    already leaves only the ends of rows."""
    if is_packed(config, task):
        return "raise `--sequence-length`: ends of rows are less of longer ones"
    if task.kind != "row":
        return "`--batching packed`"
    return (
        "rows with one label cannot be packed; lower `--micro-batch-tokens`: fewer rows of "
        "nearer lengths are padded together"
    )


def rows_of(policy: Policy, length: int) -> int:
    """Rows of a full micro-batch of some padded length."""
    return policy.batch_size if isinstance(policy, Packed) else policy.rows_of(length)


def shapes(policy: Policy, longest: int) -> list[tuple[int, int]]:
    """Rows and padded length of full micro-batches, the shortest first.

    Raises:
        ConfigError: There are too many to compile, or one has a single row, which the compiler
            takes for something else than several.
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
    """Rows and padded length of the micro-batch with the most slots; of equals the longest."""
    shapes = _full_shapes(policy, longest)
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))


def _full_shapes(policy: Policy, longest: int) -> list[tuple[int, int]]:
    """The shortest first; what is packed has one length, of which all are multiples."""
    step = policy.multiple_of
    last = round_up(min(longest, policy.longest_piece), step)
    return [(rows_of(policy, length), length) for length in range(step, last + 1, step)]


def possible_sizes(config: TrainConfig, task: "Task") -> list[int]:
    """What --micro-batch-tokens may be for a task; evaluation packs what the task packs."""
    packed = task.packs or is_packed(config, task)
    longest = task.manifest.split("train").longest_row
    return micro_batch_sizes(config, packed=packed, longest=longest)


def micro_batch_sizes(config: TrainConfig, *, packed: bool, longest: int) -> list[int]:
    """What --micro-batch-tokens may be with the same step, ascending: they divide it, and have room
    for the longest row."""
    length = config.sequence_length
    if config.step_rows is not None:
        return [rows * length for rows in _divisors(config.step_rows)]
    step = _multiple_of(config, on_gpu=True)
    row = length if packed else round_up(min(length, longest), step)
    least = 2 * row if config.compile else row
    found = [size for size in _divisors(config.step_tokens) if size >= least]
    return [size for size in found if not packed or size % length == 0] or [config.step_tokens]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _multiple_of(config: TrainConfig, *, on_gpu: bool) -> int:
    if config.compile:
        return round_up(ceil_div(config.sequence_length, MOST_SHAPES), _TILE)
    return _TILE if on_gpu else 1
