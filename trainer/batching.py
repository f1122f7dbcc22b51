"""How a run cuts its rows into micro-batches: packed into sequences of one length, or padded.

With --compile every shape is compiled, so padded lengths come in a few steps, and a micro-batch
that is short of rows is filled up: rows times length is known before training.

    --sequence-length 100 --micro-batch-tokens 1024 --compile
    makes 64 rows of length 16, 32 of 32, ... 10 of 96, 9 of 112
"""

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.planning.policies import Fixed, Packed, Padded
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.tasks.task import Task

__all__ = ["MOST_SHAPES", "Policy", "is_packed", "make_policy", "rows_of", "shapes"]

Policy = Packed | Padded | Fixed

MOST_SHAPES = 8
_TILE = 8  # lengths of tensor cores' tiles


def is_packed(config: TrainConfig, task: Task) -> bool:
    """Whether rows are packed: as told, or as suits the task."""
    return task.packs if config.batching == "auto" else config.batching == "packed"


def make_policy(config: TrainConfig, *, packed: bool, on_gpu: bool) -> Policy:
    """The policy of a run's loader.

    Raises:
        ConfigError: Sequences of that length do not fill a micro-batch.
    """
    if packed:
        config.check_packed()
        return Packed(config.sequence_length, batch_size=config.rows)
    multiple_of = _multiple_of(config, on_gpu=on_gpu)
    if config.step_rows is not None:
        return Fixed(config.rows, multiple_of=multiple_of)
    return Padded(
        config.micro_batch_tokens, multiple_of=multiple_of, sequence_length=config.sequence_length
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
    step = policy.multiple_of
    last = round_up(min(longest, policy.longest_piece), step)
    found = [(rows_of(policy, length), length) for length in range(step, last + 1, step)]
    if isinstance(policy, Packed):
        found = found[-1:]
    rows, length = found[-1]
    if rows < 2:
        raise ConfigError(
            f"`--compile`: a micro-batch of rows of {length} tokens has only {rows}. Raise "
            f"--micro-batch-tokens to at least {2 * length}."
        )
    if len(found) > MOST_SHAPES:
        raise ConfigError(
            f"`--compile`: rows of up to {last} tokens come in {len(found)} lengths, and each is "
            f"compiled. Raise --sequence-length to {last}: then there are {MOST_SHAPES}."
        )
    return found


def _multiple_of(config: TrainConfig, *, on_gpu: bool) -> int:
    if config.compile:
        return round_up(-(-config.sequence_length // MOST_SHAPES), _TILE)
    return _TILE if on_gpu else 1
