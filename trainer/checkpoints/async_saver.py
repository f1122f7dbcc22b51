"""Save checkpoints on a background thread, one at a time.

A checkpoint is reported when it is whole. Jobs run in order; after a failure, queued jobs are
skipped until the error has been raised.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial

import torch

from tokenfeed.trainer.checkpoints.checkpoint_format import split
from tokenfeed.trainer.checkpoints.metadata import CheckpointMeta
from tokenfeed.trainer.checkpoints.retention import Checkpoints
from tokenfeed.trainer.checkpoints.tensor_file import HostCopy
from tokenfeed.trainer.distributed.world import State

__all__ = ["Background", "Saver"]


class Background:
    """Does jobs one after another in threads; after one has failed, none that was asked for before
    that is told.

    The threads do not keep the process alive.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None
        self._error: Exception | None = None
        self._failed = threading.Event()
        """Of the jobs since an error was told last; those before have one of their own."""

    def do(self, job: Callable[[], object]) -> None:
        """Begin a job when those before are done; does not wait."""
        before, failed = self._last, self._failed

        def work() -> None:
            if before is not None:
                before.join()
            if not failed.is_set():
                try:
                    job()
                except Exception as error:
                    failed.set()
                    self._error = error

        thread = threading.Thread(target=work, daemon=True, name="checkpoint")
        thread.start()
        self._last = thread

    def check(self) -> None:
        """Raise what a job has raised, once; does not wait."""
        error, self._error = self._error, None
        if error is not None:
            self._failed = threading.Event()
            raise error

    def wait(self) -> None:
        """Wait for all jobs; raise what one has raised."""
        if self._last is not None:
            self._last.join()
            self._last = None
        self.check()


_log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run.

    Args:
        checkpoints: Where to.
        keep: So many are kept besides the best.
        device: Where the tensors are.
    """

    def __init__(self, checkpoints: Checkpoints, keep: int, device: torch.device) -> None:
        self._checkpoints, self._keep = checkpoints, keep
        self._copy = HostCopy(device)
        self._jobs = Background()

    def save(self, meta: CheckpointMeta, state: State) -> None:
        """Wait for the former save, copy the state to host memory, and begin to write it.

        Raises:
            OSError: The disk refused the former one.
        """
        self.wait()
        rest, tensors = split(state)
        self._copy.take(tensors)
        self._jobs.do(partial(self._checkpoints.write, meta, rest, self._copy, self._keep))

    def check(self) -> None:
        """Raise the error of a save that has failed; does not wait."""
        self._jobs.check()

    def wait(self) -> None:
        """Wait until all is on the disk.

        Raises:
            OSError: The disk refused it, and the earlier checkpoints are as they were.
        """
        self._jobs.wait()

    def settle(self) -> None:
        """Wait likewise where another error ends the run: one of the save is logged."""
        try:
            self.wait()
        except Exception as error:
            _log.error("the last checkpoint was not saved: %s", error)

    def close(self) -> None:
        """Let go of the memory; does not wait for the disk."""
        self._copy.close()
