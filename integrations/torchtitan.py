"""A dataloader for torchtitan's configs, in place of `GrainDataLoader.Config(...)`:

    dataloader=ShardDataLoader.Config(path="out/"),

torchtitan takes flat batches, positions that begin at 0 in each document, and shifted labels.
Documents are concatenated and cut where a row is full, so there is no padding except in the last
row of a window. No label crosses documents. A checkpoint includes the loader's state, which is
equal on all ranks and may be loaded on another number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.components.data.loader import BaseDataLoader  # pyright: ignore[reportMissingImports]

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.schema import refuse_weights
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.policies import Packed


class ShardDataLoader(BaseDataLoader):  # type: ignore[misc]  # untyped
    """Batches of shards, for torchtitan's trainer and validator, which move them to the device."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]  # untyped
        """Settings of the loader."""

        path: str | dict[str, float]
        """Output folder of `pretokenize`, or its URL in a store. Several: folder or URL -> share of
        the tokens."""
        split: str = "train"
        seed: int = 42
        shuffle: bool = True
        repeat: bool = True
        """False: one epoch, as validation of the whole split takes it. All ranks have equally many
        batches; a rank without rows gets a batch without labels. An epoch of several data sets has
        every row at least once, and every row exactly once in a split other than `train`."""
        whole_documents: bool = False
        """True: best fit, which cuts only documents that are longer than a row."""
        num_workers: int | None = None
        """Worker processes. None: as many as keep up with the loop."""

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
        length = max_context_length
        rows, rest = divmod(num_tokens_per_batch, length) if length > 0 else (0, 0)
        if rest or not rows:
            raise ConfigError(
                f"a batch of {num_tokens_per_batch} tokens is not a multiple of "
                f"`max_context_length`={length}. Change one of them."
            )
        path: Any = config.path
        split = not config.whole_documents
        once = not config.repeat and config.split != "train"
        self._loader = ShardLoader(
            Mixture(path, "continue" if once else "repeat") if isinstance(path, dict) else path,
            batching=Packed(length, rows, split=split, last="fill"),
            split=config.split,
            num_workers="auto" if config.num_workers is None else config.num_workers,
            seed=config.seed,
            shuffle=config.shuffle,
            epochs=None if config.repeat else 1,
            rank=dp_rank,
            world_size=dp_world_size,
        )

        refuse_weights(self._loader.manifest.columns, str(path))

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
