"""Save checkpoints on a background thread, one at a time."""

import logging
import threading

import torch

from tokenfeed.trainer.checkpoints.checkpoint_format import kinds_of, split
from tokenfeed.trainer.checkpoints.metadata import CheckpointMeta
from tokenfeed.trainer.checkpoints.ranks import Gather, gather_alone
from tokenfeed.trainer.checkpoints.retention import Checkpoints, Snapshot
from tokenfeed.trainer.checkpoints.tensor_file import HostCopy
from tokenfeed.trainer.distributed.world import State

__all__ = ["Saver"]

_log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run on a thread, which does not keep the process alive.

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
        gather: Gather = gather_alone,
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
        rest, tensors = split(state)
        self._copy.take(tensors)
        snapshot = Snapshot(meta, rest, kinds_of(tensors), self._copy, self._rank, self._gather)
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), daemon=True, name="checkpoint"
        )
        self._thread.start()

    def before_update(self) -> None:
        """Let the device finish the copy before it changes the state. The host does not wait."""
        if self._thread is not None:
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

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self._checkpoints.write(snapshot, self._keep)
        except Exception as error:
            self._error = error
