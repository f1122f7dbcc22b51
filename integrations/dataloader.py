"""A ShardLoader as a torch DataLoader with a state, like torchdata's StatefulDataLoader.

For code that requires a `torch.utils.data.DataLoader`, or that saves and loads a
`StatefulDataLoader`. It has no workers of its own: the workers of the ShardLoader make the batches.
Do not let a framework split it over ranks: every rank already gets its own batches. Accelerate does
not split it: `accelerator.prepare` returns it as it is, and `save_state` saves its state.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.loader import ShardLoader


class _Batches(IterableDataset[Any]):
    """The batches of a loader, or what `transform` makes of them."""

    def __init__(self, loader: ShardLoader, transform: Callable[[Batch], Any] | None) -> None:
        self._loader, self._transform = loader, transform

    def __iter__(self) -> Iterator[Any]:
        return map(self._transform, self._loader) if self._transform else iter(self._loader)


class StatefulShardLoader(DataLoader[Any]):
    """A DataLoader whose batches, position and state are those of a ShardLoader.

    With the split `train`, an iteration delivers the rest of a pass. With other splits, every
    iteration starts from the beginning.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = True  # Accelerate saves and loads the state

    def __init__(
        self, loader: ShardLoader, transform: Callable[[Batch], Any] | None = None
    ) -> None:
        """Wrap a loader.

        Args:
            loader: Is used, not copied. The caller closes it.
            transform: Makes an item of each batch, in this process, such as a tuple
                `(batch["input_ids"], batch.targets)`. Default: the batch.
        """
        super().__init__(_Batches(loader, transform), batch_size=None, collate_fn=_as_it_is)
        self._loader = loader

    def __len__(self) -> int:
        """Number of batches in a pass; TypeError if it is not known in advance."""
        return len(self._loader)

    def rewind(self) -> None:
        """See `ShardLoader.rewind`."""
        self._loader.rewind()

    def state_dict(self) -> dict[str, Any]:
        """See `ShardLoader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `ShardLoader.load_state_dict`."""
        self._loader.load_state_dict(state_dict)


def _as_it_is(batch: Any) -> Any:
    return batch


def checked_loader(name: str, loader: Any, device: Any, trained: Any) -> ShardLoader:
    """Return a loader that a trainer was given.

    Args:
        name: Name of the trainer's argument. All but `train_dataset` are for evaluations.
        loader: Its value.
        device: The trainer's device.
        trained: The loader of the training.

    Raises:
        ConfigError: The value is not a ShardLoader, or it does not suit the trainer.
    """
    evaluates = name != "train_dataset"
    if not isinstance(loader, ShardLoader):
        fault = f"{type(loader).__name__} is not a ShardLoader. Pass one, or use another trainer."
    elif loader.device != device:
        fault = (
            f"the loader delivers to {loader.device}, and the Trainer trains on {device}. Make the "
            "loader with `device=args.device`."
        )
    elif evaluates and not loader.has_end:
        fault = (
            "the loader has no end, so an evaluation would not end. Make it with `epochs`=1, and "
            "of several data sets with Mixture(..., exhausted='continue')."
        )
    elif evaluates and loader is trained:
        fault = "the training would miss the rows that an evaluation reads. Make a second loader."
    else:
        return loader
    raise ConfigError(f"`{name}`: {fault}")
