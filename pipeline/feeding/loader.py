"""ShardLoader: batches on a device, ready before they are asked for, resumable at any of them.

    shards ─A─► workers ─B─► slice of a window ─C─► device ─D─► Batch
    A decode, plan, gather: once per window, in worker processes
    B anonymous shared memory, page-locked once for a CUDA device, used in turn
    C ragged tokens, 2 bytes each, on a copy stream, ahead of use
    D widened, padded and labelled on that same stream; on the CPU by numpy instead

In the steady state the host waits for no kernel, only for copies that were queued long before;
page-locking, which the driver may do only when the device is idle, happens in the first windows.
Nothing stops at the end of a window or an epoch. The state counts what the user was given, not what
was prefetched, so a state saved at any batch continues with exactly the next one.
"""

import warnings
from collections.abc import Iterator
from functools import partial
from os import PathLike
from typing import Any, Literal, NoReturn, Self

import torch

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.delivery import Delivery, Pass
from tokenfeed.pipeline.feeding.devices import resolve_device
from tokenfeed.pipeline.feeding.feed import Feed
from tokenfeed.pipeline.feeding.placement import resolve_ranks
from tokenfeed.pipeline.feeding.remote import cache_for
from tokenfeed.pipeline.feeding.stats import Stats
from tokenfeed.pipeline.feeding.workshop import Workshop
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.estimate import estimate_rounds
from tokenfeed.pipeline.planning.mixing import deviation, unmixed
from tokenfeed.pipeline.planning.mixture import Mixture, paths_of
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.planner import Planner
from tokenfeed.pipeline.planning.policy import Batching
from tokenfeed.pipeline.planning.state import Delivered, own_stream
from tokenfeed.pipeline.windows.compare import compare
from tokenfeed.pipeline.windows.origins import Origin, origins_of

__all__ = ["ShardLoader"]

_TRAIN, _START = "train", Position(0, 0, 0)


class ShardLoader:
    """Streams the batches of a data set, once per epoch each row, in a planned order.

        loader = ShardLoader("out/", batching=Padded(max_tokens=32_768), device="cuda")
        for batch in loader:
            loss = model(**batch, num_items_in_batch=max(1, batch.num_targets)).loss
        state = loader.state_dict()    # JSON-serialisable, at any batch

    A loader of the split `train` goes on from its position: leaving the loop and entering it again
    loses and repeats nothing, and after the last epoch of a pass the next pass begins, newly
    shuffled. A loader of any other split begins anew with every `for` loop, so two evaluations see
    the same batches; right after `load_state_dict` it goes on once. `rewind` begins anew in any
    split. A fork of the process goes on from the position too, with workers of its own.

    One thread at a time iterates, loads, resizes and closes; another one that comes in between gets
    a LoaderError and disturbs nothing. `state_dict`, `position` and `stats` work in any thread and
    in a signal handler, and wait for nothing: a state is that of a batch that was given out, though
    not always of one that was trained on, so let a handler ask the loop to save after its step. A
    batch on a CUDA device belongs to the stream that was current, in that thread, at `next`.
    """

    def __init__(
        self,
        path: StorePath | Mixture,
        *,
        batching: Batching,
        split: str = "train",
        device: str | torch.device = "cpu",
        num_workers: int | Literal["auto"] = "auto",
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        micro_batches_per_step: int | None = None,
        window_tokens: int | None = None,
        timeout: float = 300.0,
        rank: int | None = None,
        world_size: int | None = None,
        num_streams: int | Literal["nodes"] = 1,
        cache_dir: str | PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        """Read the manifest and make the plan; workers start with the first iteration.

        Args:
            path: Output folder of `pretokenize`, its URL in a store, or a Mixture of several.
            batching: `Padded`, `Packed` or `Fixed`.
            split: Which split of the data set.
            device: Where batches are delivered.
            num_workers: Reader processes; 0 reads in this process (of a store: 1, for this one
                stays free of its client), "auto" starts one and measures how many keep up, at most
                this rank's share of the cores. The order never depends on it.
            seed: Decides every order.
            shuffle: False gives the order of the files, sorted by length within a window.
            epochs: Epochs of a pass; None for no end.
            micro_batches_per_step: Micro-batches of one optimizer step, over all ranks (of a
                stream). Their rows are of nearly equal length and the same on any number of ranks.
                None: the number in a loaded state, or else the number of ranks. With more ranks
                than micro-batches, one round holds several steps of different lengths, so ranks
                do unequal work.
            window_tokens: Tokens that are shuffled and sorted together; None chooses 8 to 32 M,
                several windows of which are in memory. More mix a corpus better that is in some
                order; see `Stats.mixing`.
            timeout: Seconds after which a worker that does not answer counts as hung;
                `float("inf")` for no limit. One that waits for a store is not: that wait ends.
            rank: Which rank this is; by default torch.distributed's, or 0 where it is not running.
            world_size: Ranks that share each step; by default torch.distributed's, or 1.
            num_streams: For very many ranks: the windows are dealt to so many groups of consecutive
                ranks, and a rank reads only those of its group; "nodes" makes the ranks of a node a
                group. See `merge_states`.
            cache_dir: Where the processes of this node keep what comes from stores; by default
                $TOKENFEED_CACHE, or a folder of yours in the system's temporary one.
            cache_bytes: How much of it; None for the lesser of 10 GB and 5 % of the free disk, 0
                for memory alone.

        Raises:
            ManifestError: The folder holds no such data set or split.
            ConfigError: A setting is out of range, or does not fit the data.
        """
        self._ranks = resolve_ranks(rank, world_size, num_streams)
        if epochs is not None and self._ranks.num_streams > 1:
            raise ConfigError(
                f"`num_streams`={num_streams} needs `epochs`=None: streams end at different steps."
            )
        self.epochs = checks.epochs(epochs)
        self.device = resolve_device(device)
        self._sources = open_splits(paths_of(path), checks.text("split", split))
        make = partial(
            Plan.from_splits,
            self._sources,
            path if isinstance(path, Mixture) else None,
            batching,
            split=split,
            window_tokens=window_tokens,
            seed=seed,
            shuffle=shuffle,
            stream=self._ranks.stream,
            num_streams=self._ranks.num_streams,
        )
        self._planner = Planner(make, micro_batches_per_step, self._ranks.group_size)
        plan = self._planner.first()
        cache = cache_for(self._sources, plan, cache_dir, cache_bytes)
        self._workshop = Workshop(
            self._sources, cache, self._ranks, num_workers=num_workers, timeout=timeout
        )
        self._delivery = Delivery(Delivered(plan))
        self._begins_anew = plan.split != _TRAIN
        self._is_resumed = False
        self._length: int | None = None
        if warning := unmixed(plan, self._sources):
            warnings.warn(warning, stacklevel=2)

    @property
    def manifest(self) -> Manifest:
        """What the data set holds; of a mixture, its first one."""
        return self._sources[0].manifest

    @property
    def rank(self) -> int:
        """Which rank this is, among all."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """All ranks, of every stream."""
        return self._ranks.world_size

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches of an optimizer step, over all ranks (of a stream)."""
        return self._plan.micro_batches_per_step

    @property
    def position(self) -> Position:
        """What comes next, counted over all ranks."""
        return self._delivery.delivered.position

    @property
    def num_workers(self) -> int:
        """Reader processes now; may be set at any time, which ends "auto"."""
        running = self._delivery.num_workers
        return self._workshop.num_workers if running is None else running

    @num_workers.setter
    def num_workers(self, number: int) -> None:
        number = self._workshop.able(number)
        self._delivery.resize(number)
        self._workshop.employ(number)

    def __iter__(self) -> Iterator[Batch]:
        if self._begins_anew and not self._is_resumed:
            self.rewind()
        self._is_resumed = False
        return Pass(self._deliver)

    def __getitem__(self, index: object) -> NoReturn:
        raise ConfigError(
            "a ShardLoader has no items to index: iterate it. Code that wants a torch DataLoader "
            "takes `tokenfeed.integrations.dataloader.StatefulShardLoader(loader)`."
        )

    def __repr__(self) -> str:
        names = ", ".join(source.name for source in self._sources)
        plan = self._plan
        return (
            f"ShardLoader({names}, split={plan.split!r}, {plan.batching}, device={self.device}, "
            f"rank {self.rank} of {self.world_size}, {tuple(self.position)})"
        )

    def rewind(self) -> None:
        """Begin at the first batch of the first epoch, as a new loader does."""
        if self.position != _START:
            self._delivery.go_on_from(Delivered(self._plan))

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
            self._length = self._workshop.one_by_one(plan).make(Position(0, 0, 0)).num_batches
        return self._length * self.epochs

    @property
    def estimated_batches(self) -> int:
        """About how many batches each rank gets in a pass: a window is planned of rows as long as
        the manifest has them. No shard is read; it takes as long as planning a window does."""
        if self.epochs is None:
            raise ConfigError("`epochs`=None has no end, so there is no number of batches.")
        return estimate_rounds(self._plan, self._sources, self.world_size) * self.epochs

    def stats(self) -> Stats:
        """What was delivered to this rank, and what it waited for."""
        names = [source.name for source in self._sources]
        delivered = self._delivery.delivered
        present = dict(zip(names, delivered.tokens, strict=True))
        last = dict(zip(names, delivered.last_epoch_tokens, strict=False))
        mixing = deviation(self._plan, self._sources)
        return self._delivery.counters.read(self.num_workers, mixing, present, last)

    def state_dict(self) -> dict[str, Any]:
        """What was delivered up to the last batch given out: a few integers, the plan's settings
        and a digest. It does not depend on ranks, workers, prefetching or device; with
        `num_streams` it is that of the rank's own stream."""
        return self._delivery.delivered.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, at once. Only its window is read again.

        The next iteration delivers the rest of the pass, in any split. If the state was saved after
        the last batch of a pass, it delivers the next pass.

        Raises:
            ResumeError: The state belongs to other data, another seed or policy; says which.
        """
        state = own_stream(state, self._plan.stream)
        plan = self._planner.of_state(state, self._plan)
        names = [source.name for source in self._sources]
        delivered = Delivered.from_state(plan, state, names)
        self._delivery.go_on_from(delivered)
        self._is_resumed = True
        self._length = None

    def compare(self, first: dict[str, Any], second: dict[str, Any]) -> str | None:
        """The first difference between what two runs delivered, from their states; None if none.

        Raises:
            ResumeError: One of them is no state, or neither belongs to this loader's plan.
        """
        plan = self._planner.of_state(first, self._plan)
        return compare(self._workshop.one_by_one(plan), first, second)

    def explain(self, batch: Batch) -> list[Origin]:
        """The file, the record and the tokens of it that each piece of a batch is made of, in the
        order of `batch.rows`. Reads shards, some record batches of each.

        Raises:
            ShardFormatError: A shard is missing or damaged.
        """
        return origins_of(self._sources, batch.rows, batch.starts, batch.piece_lengths)

    def close(self) -> None:
        """End the workers; the position stays, and iterating again starts new ones."""
        self._delivery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _plan(self) -> Plan:
        return self._delivery.delivered.plan

    def _deliver(self) -> tuple[Batch, bool]:
        return self._delivery.next(self._start_feed, self.epochs)

    def _start_feed(self) -> Feed:
        """A feed that goes on from the present position."""
        counters = self._delivery.counters
        return self._workshop.feed(self._plan, self.position, self.device, counters)
