"""Shuffle a data set: a run as a whole.

Two passes of units, then the manifest that commits what the second has written. The journal goes
first and the manifest last, so the output folder is at any time new, unfinished or finished;
what a kill leaves of the temporary files, the same command uses or clears away.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.manifest import FileInfo, Manifest, Shuffled, SplitInfo
from tokenfeed.pipeline.format.storage import atomic_file
from tokenfeed.pipeline.format.store import LocalStore, Store, StorePath, open_store
from tokenfeed.tools.outputs.output import FolderOutput, is_as_written
from tokenfeed.tools.run.claim import UNSHUFFLED_FOLDER, claim_folder, recognise, remember, state_of
from tokenfeed.tools.run.crew import Crew, Server
from tokenfeed.tools.run.interruption import saying_what_is_kept
from tokenfeed.tools.run.journal import Journal
from tokenfeed.tools.run.progress import Bar
from tokenfeed.tools.run.worker import Worker
from tokenfeed.tools.shuffling.layout import Gather, Layout, Scatter
from tokenfeed.tools.shuffling.summary import ShuffleSummary
from tokenfeed.tools.shuffling.unit import PARTITIONS, Done, Shuffle

__all__ = ["DEFAULT_MEMORY", "Settings", "clear_away", "shuffle_dataset", "shuffle_into"]

DEFAULT_MEMORY = 10**9
_SMALL_BYTES = 32_000_000
"""Rows that this process has shuffled before a crew would have begun."""
_BLOCK_BYTES = 1 << 20
_ROOM = 4
"""Partitions that are not compressed take one part of so many of the machine's memory, and of the
free disk."""
_ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": "67108864", "MALLOC_MMAP_THRESHOLD_": "33554432"}
"""What a worker frees it needs again for the next unit: it keeps so many bytes."""

Units = Sequence[Scatter | Gather]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a data set is to be shuffled."""

    seed: int
    shard_bytes: int | None = None
    """Text in a shard; None for as many shards as there were."""
    memory_bytes: int = DEFAULT_MEMORY
    """What the rows in memory may take, in all processes together."""
    workers: int
    """Processes, as far as they find room in the memory."""


def shuffle_dataset(path: StorePath, out: Path, settings: Settings) -> ShuffleSummary:
    """Shuffle the finished data set at `path` into `out`, or finish doing so.

    Raises:
        TokenfeedError: Whatever is wrong, in one line. What is under a final name then is whole,
            and the same settings continue it.
    """
    started = time.perf_counter()
    source = open_store(path)
    manifest = Manifest.read(source)
    _check_apart(source, out)
    recipe = _describe(manifest, settings)
    if state_of(FolderOutput(out)) == "finished":
        shuffled = recognise(FolderOutput(out), recipe)
        clear_away(out)
        return ShuffleSummary.from_manifest(
            shuffled,
            folder=out,
            already_finished=True,
            units=0,
            resumed_units=0,
            workers=0,
            new_bytes=0,
            seconds=time.perf_counter() - started,
        )
    return shuffle_into(out, source, manifest, settings, recipe)


def shuffle_into(
    out: Path, source: Store, manifest: Manifest, settings: Settings, recipe: dict[str, Any]
) -> ShuffleSummary:
    """Shuffle a data set into a folder that is new, or where the same was begun.

    Args:
        out: The folder.
        source: Where the data set is.
        manifest: Its manifest.
        settings: How it is to be shuffled.
        recipe: What is said to have made the result: all that it depends on.
    """
    started = time.perf_counter()
    memory_bytes = settings.memory_bytes
    layout = Layout.from_manifest(
        manifest,
        seed=settings.seed,
        shard_bytes=settings.shard_bytes,
        memory_bytes=memory_bytes,
    )
    units = {"--memory": memory_bytes, "the size of a bucket": layout.bucket_bytes}
    with claim_folder(
        out, recipe | units, Done
    ) as journal:  # what the bytes do not depend on, but the work
        compresses = not _has_room(out, layout.num_bytes)
        work = Shuffle.from_manifest(source, manifest, out, layout, compresses=compresses)
        run = _Run(work, journal, layout.workers(settings.workers, memory_bytes))
        for info in (manifest.tokenizer, manifest.sources, manifest.rejects):
            _copy(source, info, out)
        part_done = run.finish()
        remember(FolderOutput(out), recipe)
        shuffled = _committed(manifest, settings.seed, layout, journal)
        shuffled.write(out)
        journal.remove()
    clear_away(out)
    return ShuffleSummary.from_manifest(
        shuffled,
        folder=out,
        already_finished=False,
        units=len(run.units),
        resumed_units=run.resumed_units,
        workers=run.workers,
        new_bytes=part_done * _shard_bytes(manifest),
        seconds=time.perf_counter() - started,
    )


def clear_away(out: Path) -> None:
    """Delete what a finished data set needs no longer; a kill may have kept a run from it."""
    for name in (PARTITIONS, UNSHUFFLED_FOLDER):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(out / name)


class _Run:
    """The two passes, as far as the journal does not have them yet."""

    def __init__(self, work: Shuffle, journal: Journal[Done], workers: int) -> None:
        self.units: Units = (*work.layout.scatters, *work.layout.gathers)
        self.workers = workers
        self._work = work
        self._journal = journal
        self._gathers = [unit for unit in work.layout.gathers if unit.number not in journal.results]
        self._scatters = self._missing_scatters() if self._gathers else []
        self.resumed_units = len(self.units) - len(self._gathers) - len(self._scatters)

    def finish(self) -> float:
        """Do what is missing; the part of the whole that it was."""
        missing: list[Scatter | Gather] = [*self._scatters, *self._gathers]
        with saying_what_is_kept(len(self.units), self._journal), Bar(missing) as bar:
            passes: tuple[Units, Units] = self._scatters, self._gathers
            for units in passes:
                with self._workers(units, bar) as results:
                    for done in results:
                        self._journal.append(done)
                        bar.count_unit()
        whole = sum(unit.weight_bytes for unit in self.units)
        return sum(unit.weight_bytes for unit in missing) / max(whole, 1)

    def _missing_scatters(self) -> list[Scatter]:
        """The scatters whose partition is missing or damaged: all, once they were gathered."""
        with ThreadPoolExecutor() as threads:
            are_done = list(threads.map(self._has_partition, self._work.layout.scatters))
        units = zip(self._work.layout.scatters, are_done, strict=True)
        return [unit for unit, is_done in units if not is_done]

    def _has_partition(self, unit: Scatter) -> bool:
        done = self._journal.results.get(unit.number)
        return bool(done and done.partition and is_as_written(self._work.folder, done.partition))

    @contextlib.contextmanager
    def _workers(self, units: Units, bar: Bar) -> Iterator[Iterable[Done]]:
        """Whoever does `units`; of processes none is left when the block ends."""
        num_workers = min(self.workers, len(units))
        if num_workers < 2 or sum(unit.weight_bytes for unit in units) <= _SMALL_BYTES:
            worker = Worker(self._work.begin)
            worker.on_progress = bar.advance
            yield map(worker.do, units)
            return
        with Crew(
            Server(environment=_ENVIRONMENT), self._work, units, num_workers, bar.advance
        ) as crew:
            yield crew


def _check_apart(source: Store, out: Path) -> None:
    if not isinstance(source, LocalStore):
        return
    inner, outer = os.path.realpath(out), os.path.realpath(source.root)
    if os.path.commonpath([inner, outer]) == outer:
        raise ConfigError(
            f"{out}: is or lies in the data set that is to be shuffled, {source.name}. "
            "Give a folder elsewhere."
        )


def _describe(manifest: Manifest, settings: Settings) -> dict[str, Any]:
    """All that the output depends on, in words a user can compare."""
    return {
        "the fingerprint of IN": manifest.fingerprint,
        "--seed": settings.seed,
        "--shard-size": settings.shard_bytes,
    }


def _has_room(out: Path, num_bytes: int) -> bool:
    """Whether partitions may be as large as the rows, for they will hardly reach the disk."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return num_bytes < min(memory_bytes, shutil.disk_usage(out).free) // _ROOM


def _copy(source: Store, info: FileInfo, out: Path) -> None:
    """Copy a side file, if it is the one the manifest names."""
    digest, path = xxhash.xxh3_64(), source.path(info.file)
    try:
        with source.open(info.file, info.bytes) as file, atomic_file(out / info.file) as copy:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                copy.write(block)
            if digest.hexdigest() != info.xxh3:
                raise ManifestError(f"{path}: is not the file that the manifest names. Restore it.")
    except FileNotFoundError:
        raise ManifestError(f"{path}: is missing. Restore it.") from None


def _committed(manifest: Manifest, seed: int, layout: Layout, journal: Journal[Done]) -> Manifest:
    """The manifest of the same rows in another order."""
    splits = dict(manifest.splits)
    for name in layout.splits:
        units = [unit for unit in layout.gathers if unit.split == name]
        shards = tuple(shard for unit in units for shard in journal.results[unit.number].shards)
        splits[name] = replace(manifest.splits[name], shards=shards)
        _check_same(manifest.splits[name], splits[name])
    shuffled = Shuffled(seed=seed, source=manifest.fingerprint)
    return replace(manifest, splits=splits, shuffled=shuffled)


def _check_same(before: SplitInfo, after: SplitInfo) -> None:
    """Check that no row is lost or repeated: that would be a bug of ours."""
    assert (before.rows, before.tokens) == (after.rows, after.tokens)
    assert before.longest_row == after.longest_row


def _shard_bytes(manifest: Manifest) -> int:
    return sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
