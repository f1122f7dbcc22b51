"""A disk that is slower than this machine's: what is written takes as long as it would there."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

__all__ = ["CLOUD_VOLUME", "checkpoints_on", "written_at"]

CLOUD_VOLUME = 125_000_000
"""Bytes a second: the throughput of a volume of a cloud machine for which nothing more is paid, as
of Amazon's gp3."""


@contextlib.contextmanager
def written_at(bytes_per_s: float | None, path: Path) -> Iterator[None]:
    """The block writes `path`, a file or folder, and lasts as long as the disk needs for it."""
    started = time.perf_counter()
    yield
    if bytes_per_s is not None:
        files = path.rglob("*") if path.is_dir() else [path]
        needed = sum(file.stat().st_size for file in files) / bytes_per_s
        time.sleep(max(0.0, needed - (time.perf_counter() - started)))


@contextlib.contextmanager
def checkpoints_on(bytes_per_s: float | None) -> Iterator[None]:
    """Checkpoints of `train` are written to such a disk."""
    from tokenfeed.trainer.checkpoints.checkpoint_files import (
        Checkpoints,  # a loop before has no trainer
    )

    new = Checkpoints.new

    @contextlib.contextmanager
    def slowly(self: Checkpoints, step: int) -> Iterator[Path]:
        with new(self, step) as folder, written_at(bytes_per_s, folder):
            yield folder

    with patch.object(Checkpoints, "new", slowly):
        yield
