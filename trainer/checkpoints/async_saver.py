"""Save checkpoints on a background thread, one at a time."""

import errno
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from tokenfeed.trainer.checkpoints.checkpoint_format import (
    CheckpointMeta,
    unshared,
    write_content,
)
from tokenfeed.trainer.checkpoints.retention import Checkpoints
from tokenfeed.trainer.checkpoints.tensor_file import HostCopy, write_tensors
from tokenfeed.trainer.distributed.world import Gather, State

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run on a thread, which does not keep the process alive.

    If several ranks save together, each rank writes its shards into the same folder. Rank 0 does
    the rest.

    Args:
        checkpoints: The folder to write to.
        keep: Number of latest checkpoints to keep. The best one is kept as well.
        device: The device of the tensors.
        rank: The number of this rank, if several ranks save together.
        gather: Returns the values of all ranks that save, by rank.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        keep: int,
        device: torch.device,
        rank: int = 0,
        gather: Gather = lambda value: [value],
    ) -> None:
        self._checkpoints, self._keep = checkpoints, keep
        self._rank, self._gather = rank, gather
        self._copy = HostCopy(device, rank)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, meta: CheckpointMeta, state: State) -> None:
        """Wait for the previous save, start to copy the state to host memory, and to write it.

        The state must not change before `before_update` was called.

        Raises:
            OSError: The previous save failed.
        """
        self.wait()
        self._copy.take(unshared(state))
        self._thread = threading.Thread(
            target=self._run, args=(meta,), daemon=True, name="checkpoint"
        )
        self._thread.start()

    def before_update(self) -> None:
        """Let the device finish the copy before it changes the state. The host does not wait."""
        self._copy.before_update()

    def check(self) -> None:
        """Raise the error of a failed save, once. Does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk.

        Raises:
            OSError: The save failed. Earlier checkpoints are unchanged.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def wait_after_error(self) -> None:
        """Wait while another error ends the run. Log an error of the save instead of raising it."""
        try:
            self.wait()
        except Exception as error:
            _log.error("the last checkpoint was not saved: %s", error)

    def close(self) -> None:
        """Release the host memory. Does not wait for the disk."""
        self._copy.close()

    def _run(self, meta: CheckpointMeta) -> None:
        try:
            self._write(meta)
        except Exception as error:
            self._error = error

    def _write(self, meta: CheckpointMeta) -> None:
        """Write a checkpoint. Then delete all but the latest `keep` checkpoints and the best one.

        Raises:
            OSError: Writing failed on one of the ranks. Earlier checkpoints are unchanged.
        """
        checkpoints, is_main = self._checkpoints, self._rank == 0
        folder = checkpoints.temporary(meta.step)
        name = f"state-{self._rank}.safetensors"
        try:
            with ExitStack() as made:
                new = checkpoints.new(meta.step)
                self._on_all_ranks(lambda: made.enter_context(new) if is_main else None)
                files = self._on_all_ranks(lambda: (name, write_tensors(folder / name, self._copy)))
                if not is_main:
                    return
                for file, _ in files:
                    if not (folder / file).exists():  # on the disk of another machine
                        missing = f"rank 0 does not find {file}: all ranks need the same --run-dir"
                        raise OSError(errno.ENOENT, missing)
                write_content(folder, meta, dict(files))
        except OSError as error:
            reason = f"{error.strerror}. After fixing this, {checkpoints.way_on()}"
            raise OSError(error.errno, reason, str(checkpoints.path(meta.step))) from error
        checkpoints.delete_old(self._keep)

    def _on_all_ranks(self, job: Callable[[], Result]) -> list[Result]:
        """Run a job on each rank that saves; return its results, by rank.

        Raises:
            OSError: What a job raised, on all ranks.
        """
        own: Any
        try:
            own = job()
        except OSError as error:
            own = error
        results = self._gather(own)
        for result in results:
            if isinstance(result, OSError):
                raise result
        return results
