"""ShardLoader: batches on a device, ready before they are asked for, resumable at any of them.

    shards ─A─► workers ─B─► share of a window ─C─► pinned ─D─► device ─E─► Batch
    A decode, plan, gather: once per window, in worker processes
    B shared memory, two buffers per window
    C page-locked once per window (CUDA only)
    D ragged ids, 2 bytes a token, on a copy stream, ahead of use
    E widened, padded and labelled on that same stream; on the CPU by numpy instead

Nothing in the path synchronises with the device. The position counts what the user was given, not
what was prefetched, so a state saved at any batch continues with exactly the next one.
"""

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed
from torch.utils.data import DataLoader, IterableDataset

from tokenfeed.pipeline.batch import Batch, build_on_host
from tokenfeed.pipeline.batching import Batching
from tokenfeed.pipeline.dataset import ShardDataset, WindowShare
from tokenfeed.pipeline.errors import ConfigError, LoaderError, ResumeError, TokenfeedError
from tokenfeed.pipeline.manifest import Manifest
from tokenfeed.pipeline.plan import Position
from tokenfeed.pipeline.transfer import Placed, copy_ahead

__all__ = ["ShardLoader", "naming_dead_workers"]

_WORKERS_PER_CORE = 16
"""More could only be a slip of the finger, and would bring the machine down."""


class ShardLoader:
    """Streams the batches of a data set, once per epoch each row, in a planned order.

        loader = ShardLoader("out/", batching=Padded(max_tokens=32_768), device="cuda")
        for batch in loader:
            loss = model(**batch).loss
        state = loader.state_dict()    # JSON-serialisable, at any batch

    Iterating goes on from the present position: leaving the loop and entering it again loses and
    repeats nothing, and after the last epoch of a pass the next pass begins, newly shuffled.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        batching: Batching,
        split: str = "train",
        device: str | torch.device = "cpu",
        num_workers: int = 2,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Read the manifest and make the plan; workers start with the first iteration.

        Args:
            path: Output folder of `pretokenize`.
            batching: `Padded`, `Packed` or `Fixed`.
            split: Which split of the data set.
            device: Where batches are delivered.
            num_workers: Reader processes; 0 reads in this process. The order never depends on it.
            seed: Decides every order.
            shuffle: False gives the order of the files, sorted by length within a window.
            epochs: Epochs of a pass; None for no end.
            rank: Whose share; by default torch.distributed's rank, or 0 where it is not running.
            world_size: Ranks that share each gang; by default torch.distributed's, or 1.

        Raises:
            ManifestError: The folder holds no such data set or split.
            ConfigError: A setting is out of range.
        """
        rank, world_size = _resolve_ranks(rank, world_size)
        most_workers = _WORKERS_PER_CORE * (os.cpu_count() or 1)
        if not 0 <= num_workers <= most_workers:
            raise ConfigError(f"`num_workers`={num_workers}: expected 0 to {most_workers} here.")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"`epochs`={epochs} must be at least 1, or None for no end.")
        self.device = _resolve_device(device)
        self.num_workers = num_workers
        self._dataset = ShardDataset(
            path,
            batching,
            split=split,
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            rank=rank,
            world_size=world_size,
        )
        self._plan = self._dataset.plan
        self._position = Position(0, 0, 0)
        self._pass_is_over = False
        """Whether a loaded state stands at the end of its pass: there is no rest to deliver."""
        self._running: Generator[Batch, None, None] | None = None

    @property
    def manifest(self) -> Manifest:
        """What the data set holds."""
        return self._dataset.manifest

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._running = self._iterate()
        return self._running

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch given out: a few integers, and the plan's settings.

        It does not depend on workers, prefetching or device.
        """
        return self._plan.state(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, at once; only its window is read again.

        The next iteration delivers the rest of the pass: nothing, if the state is its end.

        Raises:
            ResumeError: The state belongs to other data, another seed or policy; says which.
        """
        position = self._plan.position(state)
        self.close()
        self._position = position
        epochs = self._dataset.epochs
        self._pass_is_over = (
            epochs is not None
            and position.epoch > 0
            and position == Position(position.epoch // epochs * epochs, 0, 0)
        )

    def close(self) -> None:
        """End the running iteration and its workers; the position stays."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _iterate(self) -> Generator[Batch, None, None]:
        if self._pass_is_over:
            self._pass_is_over = False
            return
        pad_id = self.manifest.tokenizer.pad_id
        if self.device.type == "cuda":
            batches = copy_ahead(self._ragged_batches(), self.device, pad_id)
        else:
            batches = (
                (build_on_host(ragged, pad_id), after) for ragged, after in self._ragged_batches()
            )
        with naming_dead_workers():
            for batch, after in batches:
                self._position = after
                yield batch

    def _ragged_batches(self) -> Iterator[Placed]:
        """All micro-batches from the present position on, each with the position after it."""
        position = self._dataset.start = self._position
        for share in self._shares():
            if position.gang >= share.num_batches:
                raise ResumeError(f"cannot resume: this window has no gang {position.gang}.")
            for ragged in share.ragged_batches(first=position.gang):
                position = self._plan.advance(position, share.num_batches)
                yield ragged, position

    def _shares(self) -> Iterator[WindowShare]:
        shares: DataLoader[WindowShare | TokenfeedError] = DataLoader(
            _Courier(self._dataset),
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_obey_the_parent_alone,
        )
        try:
            for share in shares:
                if isinstance(share, TokenfeedError):
                    raise share
                yield share
        except (ConnectionError, EOFError) as error:
            raise _worker_died("it was cut off while sending.") from error


class _Courier(IterableDataset[WindowShare | TokenfeedError]):
    """Carries errors out of a worker as items: the DataLoader would wrap them in a traceback."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[WindowShare | TokenfeedError]:
        try:
            yield from self._dataset
        except TokenfeedError as error:
            yield error


@contextlib.contextmanager
def naming_dead_workers() -> Iterator[None]:
    """Turn torch's report of a dead loader worker into a LoaderError.

    torch raises it from a signal handler, so it can surface in any line of the training loop, not
    only inside the loader: put the loop into this, too, to see one error in both cases.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        if not reason.startswith("DataLoader worker"):
            raise
        raise _worker_died(reason) from error


def _worker_died(reason: str) -> LoaderError:
    return LoaderError(
        f"a loader worker died: {reason} Often the machine ran out of memory; use fewer workers "
        "(`num_workers`)."
    )


def _obey_the_parent_alone(worker_id: int) -> None:
    """Terminals and schedulers signal workers as well, but the loop wants to end its step first.

    So a worker ignores Ctrl-C, and SIGTERM from anyone but its parent. What it inherited by a fork,
    other loaders' iterators among it, is not its own to clean up: the collector shall not see it.
    """
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_the_parent_says, daemon=True).start()


def _end_when_the_parent_says() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(os.EX_OK)  # torch takes any other code for a crash


def _resolve_device(device: str | torch.device) -> torch.device:
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"`device`={device!r} is no device of torch: try cpu or cuda.") from None
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"`device`={device!r} is not supported: cpu and cuda are.")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"`device`={device!r}: torch finds no CUDA device. Use cpu.")
    return resolved


def _resolve_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Fill in what was not said from torch.distributed."""
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank is None:
        rank = torch.distributed.get_rank() if running else 0
    if world_size is None:
        world_size = torch.distributed.get_world_size() if running else 1
    if not 0 <= rank < world_size:
        raise ConfigError(f"`rank`={rank} is not in range({world_size}), the `world_size`.")
    return rank, world_size
