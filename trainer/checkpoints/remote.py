"""A run's folder at a URL of fsspec, laid out as the one on disk.

Stores of objects have no rename of folders. So a checkpoint counts there once its checkpoint.json,
which comes last, is in place; and it loses that file first. Small files are whole or absent: they
get their name by a rename, which such stores do have for one object.
"""

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import fsspec
import xxhash

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import MANIFEST_FILE
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX
from tokenfeed.trainer.checkpoints.folder import name_of
from tokenfeed.trainer.checkpoints.format import CONTENT_FILE, files_of
from tokenfeed.trainer.config import CHECKPOINTS_FOLDER

__all__ = ["PROBE", "RemoteRun", "patiently", "reason"]

Value = TypeVar("Value")

PATIENCE_S = 30.0
"""So long is an answer tried for where a run cannot begin without one."""
_ENDS_AT_ONCE = (PermissionError, NotADirectoryError, FileExistsError)
"""What no patience mends."""
_FIRST_WAIT_S = 0.5
_FILE = re.compile(r"/step-(\d{8})/([^/]+)$")
_ASIDE = CONTENT_FILE + ".damaged"
PROBE = "may-be-written"
"""A file that is there for a moment."""


class RemoteRun:
    """The copy of a run at a URL.

    Raises:
        ConfigError: fsspec knows no such URL, or lacks a package for it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except Exception as error:  # each file system has its own
            raise ConfigError(
                f"`--upload`: {url} is no URL that fsspec opens here ({reason(error)})."
            ) from error
        self._root = root.rstrip("/")
        self._known: dict[tuple[str, ...], str] = {}
        """Checksums of small files that were written: a new try goes on where the last failed."""

    def is_in(self, folder: Path) -> bool:
        """Whether it is a folder of this machine, and this one or inside."""
        is_local = "file" in self._protocols()
        return is_local and Path(self._root).resolve().is_relative_to(folder.resolve())

    def holds_shards(self) -> bool:
        """Whether it is a folder of this machine with a data set in it."""
        return "file" in self._protocols() and (Path(self._root) / MANIFEST_FILE).exists()

    def check_writable(self) -> None:
        """Write a small file as all others are, and delete it; raises what the store does."""
        self.put(b"", PROBE)
        self._files.rm_file(self._at(PROBE))

    def steps(self) -> list[int]:
        """Those of the whole checkpoints, in order."""
        return sorted(step for step, names in self._list().items() if CONTENT_FILE in names)

    def put(self, data: bytes, *names: str) -> None:
        """Write a small file, whole or not at all, unless it was written like this before."""
        place, checksum = self._at(*names), xxhash.xxh3_64_hexdigest(data)
        if self._known.get(names) == checksum:
            return
        self._make_folder(*names[:-1])
        self._files.pipe_file(place + TEMPORARY_SUFFIX, data)
        self._files.mv(place + TEMPORARY_SUFFIX, place)
        self._known[names] = checksum

    def get(self, *names: str) -> bytes | None:
        """A small file; None where there is none."""
        with contextlib.suppress(FileNotFoundError):
            data: bytes = self._files.cat_file(self._at(*names))
            return data
        return None

    def put_checkpoint(self, folder: Path) -> None:
        """Copy a checkpoint there, unless the same one is; what another had is replaced."""
        marker = (folder / CONTENT_FILE).read_bytes()
        place = (CHECKPOINTS_FOLDER, folder.name)
        if (*place, CONTENT_FILE) in self._known or self.get(*place, CONTENT_FILE) == marker:
            return
        self._remove_marker(*place)
        self._make_folder(*place)
        for name in files_of(marker):
            path, there = folder / name, self._at(*place, name)
            self._files.put_file(str(path), there)
            self._files.invalidate_cache()
            size = self._files.info(there)["size"]
            if size != path.stat().st_size:
                raise OSError(f"{name} has {size} bytes there, not {path.stat().st_size}")
        self.put(marker, *place, CONTENT_FILE)

    def get_checkpoint(self, step: int, folder: Path) -> None:
        """Copy the files of a checkpoint into a folder; what is damaged is copied as it is."""
        for name in _finished(self._list()[step]):
            place = self._at(CHECKPOINTS_FOLDER, name_of(step), name)
            self._files.get_file(place, str(folder / name))

    def set_aside(self, step: int) -> None:
        """Rename the checkpoint.json of a step: it is no checkpoint any more."""
        place = (CHECKPOINTS_FOLDER, name_of(step))
        self._files.mv(self._at(*place, CONTENT_FILE), self._at(*place, _ASIDE))

    def delete_old(self, latest: int, keep: int, best: int | None) -> None:
        """Delete the checkpoints older than the latest `keep`, but for the best; what is half too.

        Those above `latest` stay: they are none of this session.
        """
        there = {step: names for step, names in self._list().items() if step <= latest}
        whole = sorted(step for step, names in there.items() if CONTENT_FILE in names)
        for step, names in there.items():
            place = (CHECKPOINTS_FOLDER, name_of(step))
            if step not in (*whole[-keep:], best):
                self._remove_marker(*place)
                self._files.rm(self._at(*place), recursive=True)
                continue
            for name in names - _finished(names):
                self._files.rm_file(self._at(*place, name))

    def _at(self, *names: str) -> str:
        return "/".join((self._root, *names))

    def _protocols(self) -> tuple[str, ...]:
        protocol: str | tuple[str, ...] = self._files.protocol
        return (protocol,) if isinstance(protocol, str) else protocol

    def _list(self) -> dict[int, set[str]]:
        """The files of each step."""
        self._files.invalidate_cache()
        found: dict[int, set[str]] = defaultdict(set)
        with contextlib.suppress(FileNotFoundError):
            for path in self._files.find(self._at(CHECKPOINTS_FOLDER)):
                if match := _FILE.search(path):
                    found[int(match[1])].add(match[2])
        return found

    def _remove_marker(self, *place: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(*place, CONTENT_FILE))

    def _make_folder(self, *names: str) -> None:
        self._files.makedirs(self._at(*names), exist_ok=True)


def _finished(names: set[str]) -> set[str]:
    return {name for name in names if not name.endswith(TEMPORARY_SUFFIX)}


def patiently(job: Callable[[], Value]) -> Value:
    """What the job returns, tried again with growing waits; its last error after half a minute."""
    give_up, wait_s = time.monotonic() + PATIENCE_S, _FIRST_WAIT_S
    while True:
        try:
            return job()
        except _ENDS_AT_ONCE:
            raise
        except Exception:
            if time.monotonic() + wait_s > give_up:
                raise
            time.sleep(wait_s)
            wait_s *= 2


def reason(error: Exception) -> str:
    """The first line of an error, and its kind: clients of stores tell long stories."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
