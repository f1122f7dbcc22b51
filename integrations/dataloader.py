"""A ShardLoader as a torch DataLoader with a state, like torchdata's StatefulDataLoader.

For code that requires a `torch.utils.data.DataLoader`, or that saves and loads a
`StatefulDataLoader`. It has no workers of its own: the workers of the ShardLoader make the batches.
Do not let a framework split it over ranks: every rank already gets its own batches.

Frameworks count positions, ends and lengths of their own. This class gives them what they expect:

- Accelerate: `accelerator.prepare` returns the loader as it is. Until then its length counts the
  batches of all ranks, as for any DataLoader that Accelerate has not split yet, so a prepared
  scheduler ends where the data end. The last batch of a pass ends an accumulation.
- The Trainer of Lightning fetches one batch ahead if it does not know the number of batches. The
  state is the one before that batch, and the next iteration begins with it. Fabric does not fetch
  ahead.
- The Trainer of Lightning, if it trains for a number of epochs, ignores the states of loaders in a
  checkpoint of the end of an epoch. The loader loads them when Lightning begins to iterate.
- Another DataLoader over the same data, as `skip_first_batches` of Accelerate makes, is refused: it
  would skip batches that a loaded state has skipped already.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from torch.utils.data import DataLoader, IterableDataset

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.delivery import Pass
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.feeding.placement import is_of_lightning
from tokenfeed.pipeline.planning.state import Delivered


class _Batches(IterableDataset[Any]):
    """The batches of a loader, or what `transform` makes of them, for one StatefulShardLoader."""

    def __init__(self, loader: ShardLoader, transform: Callable[[Batch], Any] | None) -> None:
        self._loader, self._transform = loader, transform
        self.is_asked_by_owner = False
        self.rest: Pass | None = None
        """The pass that is delivered."""

    def __iter__(self) -> Iterator[Any]:
        if not self.is_asked_by_owner:
            raise ConfigError(
                "`StatefulShardLoader`: another DataLoader reads its data, as `skip_first_batches` "
                "of Accelerate does. Leave that call out: after `load_state_dict` or `load_state`, "
                "the loader continues after the saved batch by itself."
            )
        self.is_asked_by_owner = False
        self.rest = iter(self._loader)
        return map(self._transform, self.rest) if self._transform else self.rest


class StatefulShardLoader(DataLoader[Any]):
    """A DataLoader whose batches, position and state are those of a ShardLoader.

    With the split `train`, an iteration delivers the rest of a pass. With other splits, every
    iteration starts from the beginning.
    """

    use_stateful_dataloader = True  # Accelerate saves and loads the state
    remainder = -1  # Accelerate: no rows were added to the last batch

    def __init__(
        self, loader: ShardLoader, transform: Callable[[Batch], Any] | None = None
    ) -> None:
        """Wrap a loader.

        Args:
            loader: Is used, not copied. The caller closes it.
            transform: Makes an item of each batch, in this process, such as a tuple
                `(batch["input_ids"], batch.targets)`. Default: the batch.

        Raises:
            ConfigError: `loader` is not a ShardLoader. Or rows may have no score, and there is no
                `transform`. The label of such a row is NaN, and the losses of transformers would
                make all weights NaN.
        """
        if not isinstance(loader, ShardLoader):
            raise ConfigError(
                f"`StatefulShardLoader` takes a ShardLoader, not a {type(loader).__name__}. Pass "
                "ShardLoader(path, batching=...)."
            )
        if transform is None and loader.manifest.task == "score" and loader.has_fillers:
            raise ConfigError(
                "`transform`: rows that complete a batch have the score NaN, and a loss that "
                "counts them makes all weights NaN. Mask them in your loss, and pass "
                "`transform=lambda batch: batch`; or train by `steps` or ShardTrainer."
            )
        self._batches = _Batches(loader, transform)
        self._is_prepared = False
        self._ahead: tuple[Delivered, Delivered] | None = None
        """What was delivered before and after the batch that Lightning has fetched ahead."""
        super().__init__(self._batches, batch_size=None, collate_fn=_as_it_is)
        self._loader = loader

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True, so that `accelerator.prepare` does not split the loader. Only `prepare` asks."""
        self._is_prepared = True
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, is_prepared: bool) -> None:
        self._is_prepared = is_prepared

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last batch of the pass was delivered. Accelerate then ends the step."""
        return self._batches.rest is not None and self._batches.rest.has_ended

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if (trained := self._trained()) is not self._loader._delivery.delivered:
            self._loader._delivery.go_on_from(trained)
        self._ahead = None
        _load_states_of_lightning()
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        is_ahead = _fetches_ahead()
        gradients = _gradient_state() if self._is_prepared else None
        self._batches.is_asked_by_owner = True
        batches = super().__iter__()
        if gradients:
            gradients._add_dataloader(self)  # as Accelerate's own DataLoaders do
        try:
            while True:
                before = self._loader._delivery.delivered
                try:
                    item = next(batches)
                except StopIteration:
                    self._ahead = None
                    return
                if is_ahead:
                    self._ahead = before, self._loader._delivery.delivered
                yield item
        finally:
            if gradients:
                gradients._remove_dataloader(self)

    def __bool__(self) -> bool:
        """See `ShardLoader.__bool__`."""
        return True

    def __len__(self) -> int:
        """Number of batches in a pass; TypeError if it is not known in advance.

        In a script of Accelerate, before `prepare`: the batches of all ranks.
        """
        return len(self._loader) * (1 if self._is_prepared else _ranks_of_accelerate())

    def __getitem__(self, index: object) -> NoReturn:
        raise ConfigError(
            "a StatefulShardLoader cannot be indexed: iterate over it; for `transformers.Trainer`, "
            "pass its ShardLoader to `tokenfeed.integrations.transformers.ShardTrainer`."
        )

    def rewind(self) -> None:
        """See `ShardLoader.rewind`."""
        self._loader.rewind()

    def state_dict(self) -> dict[str, Any]:
        """See `ShardLoader.state_dict`. In a Trainer of Lightning, it is the state after the batch
        that is trained."""
        return self._trained().state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `ShardLoader.load_state_dict`."""
        self._loader.load_state_dict(state_dict)
        self._ahead = None

    def _trained(self) -> Delivered:
        """Return what was delivered, without a batch that Lightning has only fetched."""
        now = self._loader._delivery.delivered
        if self._ahead is None or self._loader._begins_anew:
            return now
        before, after = self._ahead
        has_moved = (now.position, now.digest) != (after.position, after.digest)
        return now if has_moved else before.with_plan(now.plan)  # `reweigh` may have changed it


def _as_it_is(batch: Any) -> Any:
    return batch


def _gradient_state() -> Any:
    """Return Accelerate's record of the DataLoader that is iterated."""
    from accelerate.state import GradientState

    return GradientState()


def _ranks_of_accelerate() -> int:
    """Return the number of processes of an Accelerator; 1 if this process has none."""
    module = sys.modules.get("accelerate.state")
    if module is None or not module.is_initialized():
        return 1
    return int(module.AcceleratorState().num_processes)


def _fetches_ahead() -> bool:
    """Return whether the Trainer of Lightning has begun the iteration, and does not know its number
    of batches. Lightning does not mark a loader that it iterates in another way."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_of_lightning(frame):
        fetcher: Any = frame.f_locals.get("self")
        if getattr(fetcher, "prefetch_batches", 0):
            return bool(fetcher.length is None)
        frame = frame.f_back
    return False


def _load_states_of_lightning() -> None:
    """Load the states of loaders that Lightning has read from a checkpoint and did not load, if its
    fit loop is about to iterate for the first time."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "setup_data":
        frame = frame.f_back
    loop: Any = None if frame is None else frame.f_locals.get("self")
    if states := getattr(loop, "_combined_loader_states_to_load", None):
        loop._combined_loader_states_to_load = []
        loop._combined_loader._load_state_dicts(states)


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
    elif loader.device != device and {loader.device.type, device.type} != {"cpu"}:  # "cpu:0"
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
