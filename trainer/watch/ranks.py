"""Readings of the ranks of a node, exchanged by files when the script has ended.

A collective would hang if a rank is dead. Here a rank that left no file is left out.
"""

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tokenfeed.pipeline.format.storage import atomic_write


class RankFiles:
    """The files of the ranks of one launch on this node.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        environment: Variables of the launcher.
    """

    def __init__(self, rank: int, size: int, environment: Mapping[str, str]) -> None:
        local = int(environment.get("LOCAL_WORLD_SIZE", size))
        first = rank - int(environment.get("LOCAL_RANK", rank)) if local < size else 0
        self.ranks = range(first, min(size, first + local))
        self.is_leader = rank == first
        """Whether this rank prints for its node."""
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        user = os.getuid() if hasattr(os, "getuid") else ""
        name = f"tokenfeed-stall-{user}-{os.getppid()}-{first}-{attempt}"
        self._folder, self._rank = Path(tempfile.gettempdir()) / name, rank
        if self._is_ours():
            self._path(rank).unlink(missing_ok=True)  # of an earlier launch

    def write(self, numbers: list[float]) -> None:
        """Write the reading of this rank.

        Raises:
            PermissionError: The folder belongs to another user, or is a link or a file.
        """
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        if not self._is_ours():
            raise PermissionError(f"{self._folder}: is not a folder of this user. Remove it.")
        atomic_write(self._path(self._rank), json.dumps(numbers).encode())

    def read(self, seconds: float) -> dict[int, list[float]]:
        """Return the readings that arrive in this time, by rank, and delete them."""
        until, paths = time.monotonic() + seconds, [self._path(each) for each in self.ranks]
        while time.monotonic() < until and not all(path.exists() for path in paths):
            time.sleep(0.02)
        found = {}
        for each in self.ranks:
            with contextlib.suppress(OSError, ValueError):
                found[each] = json.loads(self._path(each).read_bytes())
        shutil.rmtree(self._folder, ignore_errors=True)
        return found

    def _is_ours(self) -> bool:
        """Return whether the folder is there and belongs to this user. Every user may write into
        the folder around it, and make one of this name first."""
        try:
            found = os.lstat(self._folder)
        except OSError:
            return False
        is_ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
        return stat.S_ISDIR(found.st_mode) and is_ours

    def _path(self, rank: int) -> Path:
        return self._folder / f"{rank}.json"
