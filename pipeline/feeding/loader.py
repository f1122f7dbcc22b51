"""ShardLoader: batches on a device, ready before they are asked for, resumable at any of them.

    shards ─A─► workers ─B─► share of a window ─C─► device ─D─► Batch
    A decode, plan, gather: once per window, in worker processes
    B anonymous shared memory, page-locked once for a CUDA device, used in turn
    C ragged tokens, 2 bytes each, on a copy stream, ahead of use
    D widened, padded and labelled on that same stream; on the CPU by numpy instead

Nothing in the path synchronises with the device, and nothing stops at the end of a window or an
epoch. The state counts what the user was given, not what was prefetched, so a state saved at any
batch continues with exactly the next one.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.cores import cores_per_rank, num_cores
from tokenfeed.pipeline.feeding.feed import Feed
from tokenfeed.pipeline.feeding.process import check_workers_can_run
from tokenfeed.pipeline.feeding.stats import Counters, Stats
from tokenfeed.pipeline.feeding.tuner import Tuner
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.planning.audit import audit
from tokenfeed.pipeline.planning.job import Job, check_epochs, check_rank
from tokenfeed.pipeline.planning.mixture import Mixture, open_sources
from tokenfeed.pipeline.planning.plan import COLUMNS, Plan, Position
from tokenfeed.pipeline.planning.policy import Batching
from tokenfeed.pipeline.planning.state import Delivered, gang_size_of, own_stream
from tokenfeed.pipeline.planning.window import WindowReader

__all__ = ["ShardLoader"]

_WORKERS_PER_CORE = 16
"""More could only be a slip of the finger, and would bring the machine down."""


class ShardLoader:
    """Streams the batches of a data set, once per epoch each row, in a planned order.

        loader = ShardLoader("out/", batching=Padded(max_tokens=32_768), device="cuda")
        for batch in loader:
            loss = model(**batch, num_items_in_batch=max(1, batch.num_targets)).loss
        state = loader.state_dict()    # JSON-serialisable, at any batch

    Iterating goes on from the present position: leaving the loop and entering it again loses and
    repeats nothing, and after the last epoch of a pass the next pass begins, newly shuffled.
    A fork of the process goes on from there too, with workers of its own.
    """

    def __init__(
        self,
        path: str | Path | Mixture,
        *,
        batching: Batching,
        split: str = "train",
        device: str | torch.device = "cpu",
        num_workers: int | Literal["auto"] = "auto",
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        gang_size: int | None = None,
        window_tokens: int | None = None,
        timeout: float = 300.0,
        rank: int | None = None,
        world_size: int | None = None,
        num_streams: int = 1,
    ) -> None:
        """Read the manifest and make the plan; workers start with the first iteration.

        Args:
            path: Output folder of `pretokenize`, or a Mixture of several.
            batching: `Padded`, `Packed` or `Fixed`.
            split: Which split of the data set.
            device: Where batches are delivered.
            num_workers: Reader processes; 0 reads in this process, "auto" starts one and measures
                how many keep up, at most this rank's share of the cores. The order never depends
                on it.
            seed: Decides every order.
            shuffle: False gives the order of the files, sorted by length within a window.
            epochs: Epochs of a pass; None for no end.
            gang_size: Micro-batches of one training step, over all ranks (of a stream). Their rows
                are of nearly equal length and the same on any number of ranks. None: that of a
                loaded state, else `world_size`.
            window_tokens: Tokens that are shuffled and sorted together; None chooses.
            timeout: Seconds after which a worker that does not answer counts as hung;
                `float("inf")` for no limit.
            rank: Whose share; by default torch.distributed's rank, or 0 where it is not running.
            world_size: Ranks that share each gang; by default torch.distributed's, or 1.
            num_streams: For very many ranks: the windows are dealt to so many groups of consecutive
                ranks, and a rank reads only those of its group. See `merge_states`.

        Raises:
            ManifestError: The folder holds no such data set or split.
            ConfigError: A setting is out of range, or does not fit the data.
        """
        self.rank, self.world_size, stream = _resolve_ranks(rank, world_size, num_streams)
        if epochs is not None and num_streams > 1:
            raise ConfigError(
                f"`num_streams`={num_streams} needs `epochs`=None: streams end at different steps."
            )
        check_epochs(epochs)
        if not (isinstance(timeout, int | float) and timeout > 0):
            raise ConfigError(
                f"`timeout`={timeout!r}: expected seconds, more than 0; float('inf') sets no limit."
            )
        self.epochs = epochs
        self.device = _resolve_device(device)
        self._timeout = timeout
        self._tuner = Tuner(cores_per_rank()) if num_workers == "auto" else None
        self._num_workers = _check_workers(1 if num_workers == "auto" else num_workers)
        self._sources = open_sources(path, split)
        self._gang_size_is_given = gang_size is not None
        self._plan_with = partial(
            Plan.of,
            self._sources,
            path if isinstance(path, Mixture) else None,
            batching,
            split=split,
            window_tokens=window_tokens,
            seed=seed,
            shuffle=shuffle,
            stream=stream,
            num_streams=num_streams,
        )
        self._plan = self._plan_with(gang_size=self.world_size if gang_size is None else gang_size)
        self._delivered = Delivered(self._plan)
        self._counters = Counters()
        self._length: int | None = None
        self._feed: Feed | None = None

    @property
    def manifest(self) -> Manifest:
        """What the data set holds; of a mixture, its first one."""
        return self._sources[0].manifest

    @property
    def position(self) -> Position:
        """What comes next, counted over all ranks."""
        return self._delivered.position

    @property
    def num_workers(self) -> int:
        """Reader processes now; may be set at any time, which ends "auto"."""
        return self._feed.num_workers if self._feed else self._num_workers

    @num_workers.setter
    def num_workers(self, number: int) -> None:
        self._num_workers, self._tuner = _check_workers(number), None
        if self._feed and not self._feed.resize(number):
            self.close()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            started = time.perf_counter()
            try:
                feed = self._started()
                batch, ragged = next(feed)
            except BaseException:
                self.close()  # whoever mends the cause can go on: the position stayed
                raise
            self._counters.add_batch(batch, time.perf_counter() - started)
            self._delivered.add(ragged)
            feed.counted()
            ends_pass = self._stands_at_end_of_pass()
            yield batch
            if ends_pass:
                return

    def __len__(self) -> int:
        """Batches of a pass, where known: an epoch is one window, and always of the same rows.

        Raises:
            TypeError: Only reading all windows would tell; see `estimated_batches`.
        """
        plan = self._plan
        if self.epochs is None or plan.num_windows > 1 or None in plan.epoch_tokens:
            raise TypeError(
                "the number of batches is not known beforehand: see `estimated_batches`, or train "
                "for a number of steps"
            )
        if self._length is None:
            self._length = self._job().read(Position(0, 0, 0)).num_batches
        return self._length * self.epochs

    @property
    def estimated_batches(self) -> int:
        """About how many batches each rank gets in a pass; from the manifest alone."""
        if self.epochs is None:
            raise ConfigError("`epochs`=None has no end, so there is no number of batches.")
        return self._plan.estimate_rounds(self.world_size) * self.epochs

    def stats(self) -> Stats:
        """What was delivered to this rank, and what it waited for."""
        names = [str(source.folder) for source in self._sources]
        present = dict(zip(names, self._delivered.tokens, strict=True))
        last = dict(zip(names, self._delivered.last_epoch_tokens, strict=False))
        return self._counters.read(self.num_workers, present, last)

    def state_dict(self) -> dict[str, Any]:
        """What was delivered up to the last batch given out: a few integers, the plan's settings
        and a digest. It does not depend on ranks, workers, prefetching or device; with
        `num_streams` it is that of the rank's own stream."""
        return self._delivered.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, at once; only its window is read again.

        The next iteration delivers the rest of the pass; of a state that was saved after the last
        batch of a pass, the next pass.

        Raises:
            ResumeError: The state belongs to other data, another seed or policy; says which.
        """
        state = own_stream(state, self._plan.stream)
        plan = self._plan_of(state)
        delivered = Delivered.of(plan, state)
        self.close()
        self._plan, self._delivered, self._length = plan, delivered, None

    def audit(self, first: dict[str, Any], second: dict[str, Any]) -> str | None:
        """The first difference between what two runs delivered, from their states; None if none.

        Raises:
            ResumeError: One of them is no state, or neither belongs to this loader's plan.
        """
        return audit(self._job_of(self._plan_of(first)), first, second)

    def close(self) -> None:
        """End the workers; the position stays, and iterating again starts new ones."""
        if self._feed:
            self._feed.close()
            self._feed = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _stands_at_end_of_pass(self) -> bool:
        epoch, window, micro_batch = self.position
        return not (self.epochs is None or epoch % self.epochs or window or micro_batch)

    def _job(self) -> Job:
        return self._job_of(self._plan)

    def _job_of(self, plan: Plan) -> Job:
        return Job(plan, WindowReader(self._sources, COLUMNS), self.rank, self.world_size)

    def _plan_of(self, state: dict[str, Any]) -> Plan:
        """This loader's plan, with the gang size of a state where it was given none."""
        gang_size = None if self._gang_size_is_given else gang_size_of(state)
        return self._plan if gang_size is None else self._plan_with(gang_size=gang_size)

    def _started(self) -> Feed:
        """The feed that goes on from the present position."""
        if self._feed and not self._feed.can_go_on():
            self.close()
        if self._feed is None:
            self._feed = Feed(
                self._job(),
                self.position,
                self.device,
                self.manifest.tokenizer.pad_id,
                num_workers=self._num_workers,
                timeout=self._timeout,
                tuner=self._tuner,
                counters=self._counters,
            )
        return self._feed


def _check_workers(num_workers: int) -> int:
    most = _WORKERS_PER_CORE * num_cores()
    if not isinstance(num_workers, int) or not 0 <= num_workers <= most:
        raise ConfigError(f"`num_workers`={num_workers!r}: expected 0 to {most} here, or 'auto'.")
    if num_workers:
        check_workers_can_run()
    return num_workers


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


def _resolve_ranks(
    rank: int | None, world_size: int | None, num_streams: int
) -> tuple[int, int, int]:
    """Rank and world size within a stream, and which stream; unsaid ones from torch.distributed."""
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank is None:
        rank = torch.distributed.get_rank() if running else 0
    if world_size is None:
        world_size = torch.distributed.get_world_size() if running else 1
    if num_streams < 1 or world_size % num_streams:
        raise ConfigError(f"`num_streams`={num_streams} does not divide `world_size`={world_size}.")
    check_rank(rank, world_size)
    stream, rank = divmod(rank, world_size // num_streams)
    return rank, world_size // num_streams, stream
