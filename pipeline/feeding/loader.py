"""ShardLoader: batches on a device, prepared ahead of use, resumable after any batch.

    shards ─A─► workers ─B─► slice of a window ─C─► device ─D─► Batch
    A worker processes read, plan and gather: once per window
    B anonymous shared memory holds the slice; it is page-locked once for a CUDA device and reused
    C ragged tokens, 2 bytes each, are copied on a copy stream, ahead of use
    D the same stream widens, pads and labels them; on the CPU numpy pads

In the steady state the host waits for no kernel. It waits only for copies that were queued long
before. Page-locking can make the driver wait for an idle device, so it happens in the first
windows. Workers continue over the end of a window and of an epoch. The saved state counts the
batches that the user received, not the prefetched ones: a resumed run gets exactly the next batch.
docs/how-it-works.md follows one batch through these files.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch, BatchForm
from tokenfeed.pipeline.feeding.delivery import Delivery, Feed, Pass
from tokenfeed.pipeline.feeding.placement import (
    check_no_copies,
    check_not_ahead,
    resolve_ranks,
    resolve_workers,
)
from tokenfeed.pipeline.feeding.stats import Stats
from tokenfeed.pipeline.feeding.window_source import COPIES_AHEAD, make_in_worker
from tokenfeed.pipeline.format.data_set import OpenedSplit, has_remote, open_splits
from tokenfeed.pipeline.format.kinds import TargetRule, Targets
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.pipeline.format.store import StorePath, open_store
from tokenfeed.pipeline.planning.estimates import (
    coarse,
    deviation,
    estimate_rounds,
    off,
    uneven,
    unmixed,
)
from tokenfeed.pipeline.planning.mixture import Mixture, checked_weights
from tokenfeed.pipeline.planning.plan import Plan, Position, RowOrder, listed_ranges
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.pipeline.planning.stages import Stage, as_one, by_place, paths_of, place_of
from tokenfeed.pipeline.planning.state import (
    Delivered,
    SavedState,
    own_stream,
)
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.origins import Origin, origins_of
from tokenfeed.pipeline.windows.rank_slice import RankSlice
from tokenfeed.pipeline.windows.reader import WindowReader
from tokenfeed.pipeline.windows.row_map import MapRow, RowMap

if TYPE_CHECKING:
    import torch


_TRAIN, _START = "train", Position(0, 0, 0)
_MOST_AHEAD, _AT_ONCE = 1000, 4096
_LONG_DELAY = 0.25
"""Share of the data sets that a run may read before `reweigh` has an effect, without a warning."""
_STORE_S = 900.0
"""Seconds added to the timeout of workers that read from a store: more than all retries of a
request and the wait for another process together."""


_INSTEAD = (
    "For code that needs a torch DataLoader, use "
    "`tokenfeed.integrations.dataloader.StatefulShardLoader(loader)`; for `transformers.Trainer`, "
    "`tokenfeed.integrations.transformers.ShardTrainer`."
)


class ShardLoader:
    """Iterator over the batches of a data set: every row once per epoch, in a planned order.

        loader = ShardLoader("out/", batching=Padded(max_tokens=32_768), device="cuda")
        for batch in loader:
            loss = model(**batch, num_items_in_batch=max(1, batch.num_targets)).loss
        state = loader.state_dict()    # JSON-serialisable, at any batch

    Each item is a `Batch`: `input_ids` of shape [B, T] int64, `labels`, and masks or positions, on
    `device`. `Batch` documents all keys and shapes.

    A loader of the split `train` continues at its position: a second `for` loop delivers the
    batches after those of the first. After the last epoch of a pass, the next pass begins with a
    new shuffle. A loader of another split starts from the beginning with every `for` loop, so two
    evaluations get the same batches. The first loop after `load_state_dict` continues at the loaded
    position. `rewind` starts from the beginning in any split, `at` at any step, and `set_epoch` at
    an epoch. A forked process continues at the position, with its own workers.

    Only one thread at a time may iterate, load, set `num_workers` or close. A second thread gets a
    LoaderError, and the first is not disturbed. `state_dict`, `position` and `stats` work in any
    thread and in a signal handler, and never wait. A state includes every batch that `next` has
    returned, also the one that the loop is still training on: a handler should ask the loop to save
    after its step. A batch on a CUDA device belongs to the stream that was current in the calling
    thread at `next`.
    """

    def __init__(
        self,
        path: StorePath | Sequence[StorePath] | Mixture | Sequence[Stage],
        *,
        batching: Batching,
        split: str = "train",
        device: "str | torch.device" = "cpu",
        num_workers: int | Literal["auto"] = "auto",
        prefetch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        order: RowOrder = "shuffled",
        skip: Mapping[StorePath, Iterable[tuple[int, int]]] | None = None,
        epochs: int | None = 1,
        micro_batches_per_step: int | None = None,
        window_tokens: int | None = None,
        timeout: float = 300.0,
        rank: int | Literal["launcher"] | None = None,
        world_size: int | None = None,
        num_streams: int | Literal["nodes"] = 1,
        cache_dir: str | PathLike[str] | None = None,
        cache_bytes: int | None = None,
        targets: Targets | None = None,
        ignore_index: int = IGNORED,
        map: MapRow | None = None,
    ) -> None:
        """Read the manifest and make the plan. Workers start with the first iteration.

        Args:
            path: Output folder of `pretokenize`, or its URL in a store; a list of several, which
                are read as one; a Mixture of several; or a list of `Stage`s.
            batching: `Padded`, `Packed` or `Fixed`. A stage may have another one.
            split: Name of the split, such as "train".
            device: Device of the batches, such as "cuda" or "cuda:1". On "cpu", `.numpy()` of a
                tensor is an array of the same memory.
            num_workers: Number of worker processes. 0 reads in this process; data in a store needs
                at least 1. "auto" is this rank's share of the cores, at most 4. The order of rows
                does not depend on it.
            prefetch: Number of batches in all that are ready on the device ahead of the loop,
                whatever the number of workers. Default: 2 on a GPU, where batches are copied while
                a step runs. On a CPU 0: the workers keep windows ready, and a batch is built from
                them when it is asked for, a small one with those after it (4,096 slots in all).
            seed: Seed of the shuffle.
            shuffle: False delivers windows in file order, their rows sorted by length.
            order: "file" delivers the rows exactly in the order of the data set, without shuffling
                and sorting, for a curriculum. `shuffle` is ignored.
            skip: Rows that no loss counts, such as a damaged record: folder or URL -> ranges (first
                row, row after the last) of the split. `explain` returns row numbers. The rows stay
                in their batches, without targets, so the order does not change. None: the ranges of
                a loaded state.
            epochs: Number of epochs in a pass. None repeats forever. A list of stages is one epoch;
                without an end it repeats its data sets forever.
            micro_batches_per_step: Micro-batches of one optimizer step, over all ranks (of a
                stream). Their rows have nearly equal lengths and are the same on any number of
                ranks. None: the number in a loaded state, else the number of ranks. With more
                ranks than micro-batches, one round holds several steps of different lengths, so
                ranks do unequal work.
            window_tokens: Tokens that are shuffled and sorted together. None chooses 8 to 32
                million, or 12 to 32 with stages, or fewer if rows are short. Several windows are in
                memory at once. Larger windows mix an ordered corpus better; see `Stats.mixing`.
            timeout: Seconds without an answer after which a worker counts as hung; `float("inf")`
                for no limit. For data in a store it is 15 minutes longer, because failed
                requests are repeated.
            rank: Rank of this process. Default: the rank of torch.distributed, or 0. "launcher":
                rank and world size from the variables of torchrun, srun, Open MPI or MPICH, for
                programs without torch.distributed.
            world_size: Number of ranks that share each step. Default: the world size of
                torch.distributed, or 1. `ranks_of` returns both for a `DeviceMesh`.
            num_streams: For very many ranks: divides the ranks into this many groups of
                consecutive ranks and deals the windows to the groups. A rank reads only the
                windows of its group. "nodes" makes the ranks of each node a group. See
                `merge_states`.
            cache_dir: Folder of the node's cache for data from stores. Default: $TOKENFEED_CACHE,
                or a folder of this user in the system's temporary folder.
            cache_bytes: Largest size of the cache in bytes. None: the smaller of 10 GB and 5 % of
                the free disk. 0: no cache on disk.
            targets: Which tokens of conversations are targets: "assistant", "last", "all", a set
                of kinds such as {"text", "call"}, or a function of the kinds (uint8) that returns
                a bool per token; see `Targets`. Default: "assistant". The order of rows does not
                depend on it, so a state can be loaded with other targets.
            ignore_index: Value of `Batch.targets` where no loss counts.
            map: A function on the columns of a row and a `numpy.random.Generator`, for augmentation
                or masking; see `MapRow`. It runs in the workers, which must be able to import it,
                and keeps the number of tokens. The order of rows does not depend on it.

        Raises:
            ManifestError: The folder has no such data set or split.
            ConfigError: A setting is out of range or does not fit the data.
        """
        self._ranks = resolve_ranks(rank, world_size, num_streams)
        if epochs is not None and self._ranks.num_streams > 1:
            raise ConfigError(
                f"`num_streams`={num_streams} needs `epochs`=None: streams end at different steps."
            )
        self.epochs = checks.epochs(epochs)
        from tokenfeed.pipeline.feeding.devices import resolve_device  # takes torch

        self.device = resolve_device(device)
        """The torch device of the batches."""
        data = as_one(path)
        self._paths = paths_of(data)
        split = checks.text("split", split)
        sources = open_splits(self._paths, split)
        self._make_plan = partial(
            Plan.from_splits,
            data=data,
            batching=batching,
            split=split,
            window_tokens=window_tokens,
            seed=seed,
            shuffle=shuffle,
            order=order,
            skip=None if skip is None else listed_ranges(skip),
            stream=self._ranks.stream,
            num_streams=self._ranks.num_streams,
        )
        self._step_size = micro_batches_per_step
        step_size = self._ranks.group_size if self._step_size is None else self._step_size
        plan = self._make_plan(sources, micro_batches_per_step=step_size)
        self._opened = sources
        self._form = BatchForm(
            sources[0].manifest.tokenizer.pad_id,
            checks.whole("ignore_index", ignore_index, least=-(2**31), most=2**31 - 1),
        )
        self._row_map = None
        if map is not None:
            size = sources[0].manifest.tokenizer.vocabulary_size
            self._row_map = RowMap.from_setting(map, size, plan.order.seed)
        self._targets_by = TargetRule.from_setting(targets, sources[0].manifest.columns)
        self._least_workers, self._cache = int(has_remote(sources)), None
        self._num_workers = resolve_workers(num_workers, least=self._least_workers)
        self._at_once = _AT_ONCE if prefetch is None else 0
        if prefetch is None:
            prefetch = COPIES_AHEAD if self.copies_ahead else 0
        self.prefetch = checks.whole("prefetch", prefetch, most=_MOST_AHEAD)
        """Number of batches that are ready on the device ahead of the loop."""
        if self._least_workers:
            from tokenfeed.pipeline.caching.node_cache import cache_for

            self._cache = cache_for(sources, plan, cache_dir, cache_bytes)
        elif cache_dir is not None or cache_bytes not in (None, 0):
            checks.whole("cache_bytes", 0 if cache_bytes is None else cache_bytes)
            warnings.warn(
                f"`cache_dir` and `cache_bytes` have no effect: {sources[0].name} is a local "
                "folder. Leave them out. To read from a faster disk, copy the folder there "
                "(`shards copy`).",
                stacklevel=2,
            )
        more_s = _STORE_S if self._least_workers else 0.0
        self._timeout = checks.number("timeout", timeout, unit="seconds") + more_s
        self._delivery = Delivery(Delivered(plan))
        self._begins_anew = plan.split != _TRAIN
        self._is_resumed = False
        self._epoch = 0
        """Epoch with which the loops of a split that begins anew start."""
        self._length: int | None = None
        for warning in (check(plan, sources) for check in (unmixed, uneven, coarse, off)):
            if warning:
                warnings.warn(warning, stacklevel=2)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the data set; for a mixture, of its first data set."""
        return self._sources[0].manifest

    @property
    def rank(self) -> int:
        """Rank of this loader, 0 to `world_size` - 1."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks, over all streams."""
        return self._ranks.world_size

    @property
    def micro_batches_per_step(self) -> int:
        """Number of micro-batches of an optimizer step, over all ranks (of a stream)."""
        return self._plan.micro_batches_per_step

    @property
    def position(self) -> Position:
        """The position of the next batch, counted over all ranks."""
        return self._delivery.delivered.position

    @property
    def copies_ahead(self) -> bool:
        """Whether batches are copied from page-locked memory to a device, ahead of use."""
        return self.device.type != "cpu"

    @property
    def num_workers(self) -> int:
        """Number of worker processes. It can be set at any time; the windows that were made in
        advance are made again."""
        return self._num_workers

    @num_workers.setter
    def num_workers(self, number: int | Literal["auto"]) -> None:
        number = resolve_workers(number, least=self._least_workers)
        self._delivery.close()
        self._num_workers = number

    def __iter__(self) -> Pass:
        check_no_copies()
        self._ranks.check_now()
        if not self._begins_anew:
            check_not_ahead(sys._getframe(1))
        if self._begins_anew and not self._is_resumed:
            self._begin(self._epoch)
        self._is_resumed = False
        return Pass(self._delivery, self._deliver)

    def __getitem__(self, index: object) -> NoReturn:
        raise ConfigError(f"a ShardLoader cannot be indexed: iterate over it. {_INSTEAD}")

    def __repr__(self) -> str:
        names = ", ".join(source.name for source in self._sources)
        plan, place = self._plan, self.position
        return (
            f"ShardLoader({names}, split={plan.split!r}, {plan.batching}, device={self.device}, "
            f"rank {self.rank} of {self.world_size}, at epoch {place.epoch}, window "
            f"{place.window}, micro-batch {place.micro_batch})"
        )

    def rewind(self) -> None:
        """Go back to the first batch of the first epoch."""
        self._epoch, self._is_resumed = 0, False
        self._begin(0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch, as the method of `DistributedSampler` does.

        Loops of the split `train` do not need it, because each pass has a new order by itself. The
        first loop after `load_state_dict` or `at` continues at that position, also if `set_epoch`
        is called before it.
        """
        self._epoch = self._checked_epoch(epoch)
        if not self._is_resumed:
            self._begin(self._epoch)

    def at(self, *, epoch: int = 0, step: int = 0) -> Self:
        """Go to the beginning of a step, and return this loader.

            for batch in loader.at(epoch=1, step=250): ...

        The next loop delivers the rest of the pass from there, in any split. A saved state counts
        the rows of the epoch before the step as delivered, but no earlier epoch.

        Args:
            epoch: Number of the epoch, from 0.
            step: Number of optimizer steps of the epoch to skip: batches with `ends_step`. Reads
                the windows of these steps, because their number is not stored.

        Raises:
            ConfigError: The epoch has fewer steps.
        """
        delivered = Delivered(self._plan, Position(self._checked_epoch(epoch), 0, 0))
        left = checks.whole("step", step)
        make = self._single_windows(self._plan)
        while left:
            if delivered.position.epoch > epoch:
                raise ConfigError(f"`step`={step}: epoch {epoch} has {step - left:,} steps.")
            for done in make(delivered.position).rounds():
                delivered = delivered.after(done)
                left -= done.steps > 0
                if not left:
                    break
        self._delivery.go_on_from(delivered)
        self._is_resumed = True
        return self

    @property
    def has_end(self) -> bool:
        """Whether the last window of a pass is known.

        False with `epochs=None`, or if the last stage has no end.
        """
        return self.epochs is not None and self._plan.has_end

    def __bool__(self) -> bool:
        """True, so that `if loader:` does not ask for a length that may be unknown."""
        return True

    def __len__(self) -> int:
        """Number of batches in a pass. It is known only if an epoch is one window and always has
        the same rows.

        Raises:
            TypeError: The number is unknown without reading all windows; see `estimated_batches`.
        """
        plan = self._plan
        if self.epochs is None or plan.num_windows > 1 or None in plan.epoch_tokens:
            raise TypeError(
                "the number of batches is not known in advance: use `estimated_batches`, or train "
                f"for a number of steps. {_INSTEAD}"
            )
        if self._length is None:
            self._length = self._single_windows(plan)(_START).num_batches
        return self._length * self.epochs

    @property
    def estimated_batches(self) -> int:
        """Estimated number of batches of each rank in a pass, from the manifest's row lengths.

        Reads no shard. Cost: planning one window.

        Raises:
            ConfigError: The loader was made with `epochs=None`, so a pass has no end.
        """
        if self.epochs is None:
            raise ConfigError(
                "`epochs`=None: a pass has no end, so it has no number of batches. Read this of "
                "another loader, with `epochs`=1."
            )
        if not self._plan.has_end:
            raise ConfigError(
                "a stage has no `until_tokens`: a pass has no known end, so it has no known number "
                "of batches. Set `until_tokens`."
            )
        return estimate_rounds(self._plan, self._sources, self.world_size) * self.epochs

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and padded length of every batch that a policy with `last`="fill" can deliver, in
        ascending length: to compile a model or to record CUDA graphs before training.

        Raises:
            ConfigError: The policy does not fill batches, so they have any number of rows.
        """
        longest = max(each.split.longest_row for each in self._sources)
        policies = self._policies
        shapes: set[tuple[int, int]] = set()
        for policy in policies:
            last = round_up(min(longest, policy.longest_piece), policy.multiple_of)
            lengths = range(policy.multiple_of, last + 1, policy.multiple_of)
            shapes |= {(policy.rows_to_fill(length), length) for length in lengths}
            if not all(rows for rows, _ in shapes):
                raise ConfigError(
                    f"`batching`={policy}: its batches have any number of rows. Set `last`='fill'."
                )
        return sorted(shapes, key=lambda shape: (shape[1], shape[0]))

    def stats(self) -> Stats:
        """Return counts of the delivered batches and the time spent waiting, for this rank."""
        names = [source.name for source in self._sources]
        delivered = self._delivery.delivered
        present = dict(zip(names, delivered.tokens, strict=True))
        last = dict(zip(names, delivered.last_epoch_tokens, strict=False))
        mixing = deviation(self._plan, self._sources)
        return self._delivery.counters.read(self.num_workers, mixing, present, last)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last delivered batch, as a JSON-serialisable dict.

        The dict holds a few integers, the settings of the plan and a digest of the delivered rows.
        It does not depend on ranks, workers, prefetching or device. With `num_streams` above 1 it
        is the state of this rank's stream.
        """
        return self._delivery.delivered.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a saved state. Only the window of the state is read again.

        The next iteration delivers the rest of the pass, in any split. If the state was saved after
        the last batch of a pass, it delivers the next pass.

        Args:
            state: What `state_dict` or `merge_states` returned.

        Raises:
            ResumeError: The state was saved with other data, another seed or another policy. The
                message names the difference.
        """
        saved = SavedState.checked(own_stream(state, self._plan.stream))
        plan = self._plan_for(saved)
        names = [source.name for source in self._sources_of(plan)]
        self._delivery.go_on_from(Delivered.from_state(plan, saved, names))
        self._is_resumed = True
        self._length = None

    @property
    def stages(self) -> list[Stage]:
        """The list of stages of this run, with what `reweigh` and resuming have changed; empty if
        the loader was not made of stages. A loader of this list delivers the same rows."""
        names = {source.manifest.fingerprint: source.name for source in self._sources}
        paths = {open_store(path).name: path for path in self._paths}

        def named(weights: Mapping[str, float]) -> dict[StorePath, float]:
            return {paths[names[data]]: weight for data, weight in weights.items()}

        return [
            Stage(
                named(stage.weights),
                until_tokens=stage.until,
                batching=None if stage.batching == self._plan.batching else stage.batching,
                targets=stage.targets,
            )
            for stage in self._plan.stages
        ]

    def reweigh(self, weights: Mapping[StorePath, float]) -> int:
        """Change the weights of the present stage, until its end.

        The change begins with the next window that has delivered nothing yet, so the rest of a
        window still has the old weights. Until then, another call replaces the change. The longest
        delay is `window_tokens`: by default 12 M tokens or more, also if the data have fewer. A
        warning names a delay of more than a quarter of the data. Every rank must call this after
        the same step. The state has the changed list, so a resumed run continues with it, and
        `stages` returns it. Windows that were made in advance are made again.

        Args:
            weights: Folder or URL of a data set of the list -> share of the tokens.

        Returns:
            The token of the run at which the change begins.

        Raises:
            ConfigError: The loader has no stages, the weights are of other data sets, or the last
                window of the present stage has begun, so that nothing is left to change. The list
                stays as it is.
        """
        if not self._plan.stages:
            raise ConfigError(
                "`reweigh` needs a loader of stages, such as ShardLoader([Stage(weights)], ...)."
            )
        opened = {source.manifest.fingerprint: source for source in self._sources}
        of_name = {source.name: data for data, source in opened.items()}
        of_place = {place_of(path): of_name[open_store(path).name] for path in self._paths}
        checked = checked_weights(weights)
        for folder in checked:
            if place_of(folder) not in of_place:
                raise ConfigError(
                    f"`reweigh`: {open_store(folder).name} is in no stage of this loader. Its data "
                    f"sets are {', '.join(of_name)}."
                )
        by_data = {of_place[place]: weight for place, weight in by_place(checked).items()}
        before = self._delivery.delivered
        ends = {stage.until_tokens for stage in self._make_plan.keywords["data"]}
        plan, begins = before.plan.reweighed(by_data, before.position, opened, ends)
        self._delivery.go_on_from(before.with_plan(plan))
        tokens, read = sum(each.tokens for each in self._sources), sum(before.tokens)
        if begins - read > _LONG_DELAY * tokens:
            warnings.warn(
                f"`reweigh`: the change begins at token {begins:,}, with the next window. The run "
                f"has delivered {read:,} tokens, and the data sets have {tokens:,}. For earlier "
                "changes, start the run with a smaller `window_tokens`.",
                stacklevel=2,
            )
        if warning := off(plan, self._sources, begins=begins):
            warnings.warn(warning, stacklevel=2)
        return begins

    def explain(self, batch: Batch) -> list[Origin]:
        """Return the input file, the record and the token range of each piece of a batch, in the
        order of `batch.rows`. Reads several record batches of each shard involved.

        Raises:
            ShardFormatError: A shard is missing or damaged.
        """
        return origins_of(self._sources, batch.rows, batch.starts, batch.piece_lengths)

    def _deliver_part(self, tokens: int) -> None:
        """Deliver random rows of about `tokens` tokens in an epoch, whatever the micro-batches and
        the ranks are. Needs one data set and a shuffle. Call this before the first batch."""
        self._delivery.go_on_from(Delivered(self._plan.with_part(tokens)))

    @contextlib.contextmanager
    def _undone_by_errors(self) -> Iterator[None]:
        """Deliver the batches of the block again if it raises, for code that takes several batches
        before it returns any. A position that was set in the block stays."""
        delivered, jumps = self._delivery.delivered, self._delivery.jumps
        try:
            yield
        except BaseException:
            if self._delivery.jumps == jumps and self._delivery.delivered is not delivered:
                self._delivery.go_on_from(delivered)
            raise

    def close(self) -> None:
        """Stop the workers. The position stays, and the next iteration starts new workers."""
        self._delivery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def has_fillers(self) -> bool:
        """Whether batches may have rows without data, as several ranks or `last="fill"` need."""
        return self.world_size > 1 or any(policy.last == "fill" for policy in self._policies)

    @property
    def _policies(self) -> list[Batching]:
        return [stage.batching for stage in self._plan.stages] or [self._plan.batching]

    @property
    def _plan(self) -> Plan:
        return self._delivery.delivered.plan

    @property
    def _sources(self) -> tuple[OpenedSplit, ...]:
        return self._sources_of(self._plan)

    def _deliver(self) -> Batch | None:
        return self._delivery.next(self._start_feed, self.epochs)

    def _begin(self, epoch: int) -> None:
        """Go to the first batch of an epoch, unless the loader is there."""
        beginning = Position(epoch, 0, 0)
        if self.position != beginning:
            self._delivery.go_on_from(Delivered(self._plan, beginning))

    def _checked_epoch(self, epoch: int) -> int:
        most = checks.MOST if self._plan.has_end else 0
        return checks.whole("epoch", epoch, most=most)

    def _start_feed(self) -> Feed:
        """Return a feed that continues at the current position."""
        return Feed(
            self._window_maker(self._plan),
            self.position,
            self.device if self.copies_ahead else None,
            self._form,
            num_workers=self._num_workers,
            prefetch=self.prefetch,
            at_once=self._at_once,
            timeout=self._timeout,
            counters=self._delivery.counters,
        )

    def _plan_for(self, saved: SavedState) -> Plan:
        """Return the plan for a state: its steps are as large as those of the run that saved it,
        unless the caller of this loader set a size."""
        step_size = self._step_size
        if step_size is None:
            step_size = saved.plan.micro_batches_per_step
        window = self._make_plan.keywords["window_tokens"]
        if window is None and not self._plan.stages:  # the default depends on the step
            window = saved.plan.window_tokens
        return self._make_plan(self._opened, micro_batches_per_step=step_size, window_tokens=window)

    def _sources_of(self, plan: Plan) -> tuple[OpenedSplit, ...]:
        """Return the data sets of a plan, which may have them in another order than before."""
        known = {source.manifest.fingerprint: source for source in self._opened}
        return tuple(known[each] for each in plan.data)

    def _window_maker(self, plan: Plan | None = None) -> WindowMaker:
        """Return what makes the windows of this rank, by `plan` or the loader's own plan."""
        plan, ranks, rule = plan or self._plan, self._ranks, self._targets_by
        sources = self._sources_of(plan)
        with_kinds = rule is not None or any(stage.targets for stage in plan.stages)
        reader = WindowReader(sources, with_kinds=with_kinds, cache=self._cache)
        return WindowMaker(plan, reader, ranks.rank_in_group, ranks.group_size, rule, self._row_map)

    def _single_windows(self, plan: Plan) -> Callable[[Position], RankSlice]:
        """Return a function that makes one window, for methods that are called rarely."""
        maker = self._window_maker(plan)
        if self._least_workers:  # this process must not start a client of a store
            return partial(make_in_worker, maker, timeout=self._timeout)
        return maker.make
