"""Save checkpoints on a background thread, one at a time."""

import logging
import threading

import torch

from tokenfeed.trainer.checkpoints.checkpoint_format import split
from tokenfeed.trainer.checkpoints.metadata import CheckpointMeta
from tokenfeed.trainer.checkpoints.retention import Checkpoints
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
    """

    def __init__(self, checkpoints: Checkpoints, keep: int, device: torch.device) -> None:
        self._checkpoints, self._keep = checkpoints, keep
        self._copy = HostCopy(device)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, meta: CheckpointMeta, state: State) -> None:
        """Wait for the previous save, copy the state to host memory, and start to write it.

        Raises:
            OSError: The previous save failed.
        """
        self.wait()
        rest, tensors = split(state)
        self._copy.take(tensors)
        self._thread = threading.Thread(
            target=self._write, args=(meta, rest), daemon=True, name="checkpoint"
        )
        self._thread.start()

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

    def _write(self, meta: CheckpointMeta, rest: State) -> None:
        try:
            self._checkpoints.write(meta, rest, self._copy, self._keep)
        except Exception as error:
            self._error = error
