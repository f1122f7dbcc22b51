"""A dataloader for torchtitan's configs, in place of `GrainDataLoader.Config(...)`:

    dataloader=ShardDataLoader.Config(path="out/"),

torchtitan takes flat batches, positions that begin at 0 in each document, and shifted labels.
Documents are concatenated and cut where a row is full, so there is no padding except in the last
row of a window. No label crosses documents. A checkpoint includes the loader's state.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.components.data.loader import BaseDataLoader  # pyright: ignore[reportMissingImports]

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.planning.policies import Packed


class ShardDataLoader(BaseDataLoader):  # type: ignore[misc]  # untyped
    """Batches of shards, for torchtitan's trainer. It moves them to the device itself."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]  # untyped
        """Settings of the loader."""

        path: str
        """Output folder of `pretokenize`, or its URL in a store."""
        split: str = "train"
        seed: int = 42

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        max_context_length: int,
        num_tokens_per_batch: int,
        **kwargs: Any,
    ) -> None:
        """Make the loader of a data-parallel rank. torchtitan calls this by `Config.build`.

        Raises:
            ConfigError: Rows of `max_context_length` tokens do not fill a batch.
        """
        rows, rest = divmod(num_tokens_per_batch, max_context_length)
        if rest or not rows:
            raise ConfigError(
                f"a batch of {num_tokens_per_batch} tokens is not a multiple of "
                f"`max_context_length`={max_context_length}. Change one of them."
            )
        self._loader = ShardLoader(
            config.path,
            batching=Packed(max_context_length, rows, split=True, fill=True),
            split=config.split,
            seed=config.seed,
            epochs=None,
            rank=dp_rank,
            world_size=dp_world_size,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        for batch in self._loader:
            inputs = {
                "input": batch["input_ids"].flatten(),
                "positions": batch["position_ids"].flatten(),
            }
            yield inputs, batch.targets.flatten()

    def state_dict(self) -> dict[str, Any]:
        """See `ShardLoader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `ShardLoader.load_state_dict`. An empty state changes nothing."""
        if state_dict:
            self._loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Stop the workers."""
        self._loader.close()
