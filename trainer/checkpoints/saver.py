"""Saves beside the loop: one checkpoint at a time, none reported before it is whole."""

import logging
from functools import partial

import torch

from tokenfeed.trainer.checkpoints.background import Background
from tokenfeed.trainer.checkpoints.folder import Checkpoints
from tokenfeed.trainer.checkpoints.host_copy import HostCopy
from tokenfeed.trainer.checkpoints.meta import CheckpointMeta
from tokenfeed.trainer.checkpoints.tree import State, split

__all__ = ["Saver"]

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
