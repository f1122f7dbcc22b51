"""`--resume auto`: find the newest undamaged checkpoint, in the run's folder or at a URL."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.storage import alone_in, atomic_write
from tokenfeed.trainer.checkpoints.checkpoint_format import Checkpoint
from tokenfeed.trainer.checkpoints.remote_copy import RemoteRun, reason
from tokenfeed.trainer.checkpoints.retention import DAMAGE, Checkpoints
from tokenfeed.trainer.checkpoints.uploader import OF_THE_END
from tokenfeed.trainer.config.run_config import CONFIG_FILE, METRICS_FILE

__all__ = ["download_newest"]

_log = logging.getLogger(__name__)


def download_newest(run_dir: Path, url: str | None) -> bool:
    """Make the newest undamaged checkpoint the latest one in a run's folder.

    All bytes of the checkpoint are read and verified. A damaged checkpoint is logged and renamed,
    and the one before it is tried. A checkpoint from the URL brings the run's settings, its metrics
    and its best checkpoint along.

    Example: the folder has steps 100 and 200, and the URL has steps 200 and 300. Candidates in
    order: 300 (URL), 200 (folder), 200 (URL), 100 (folder). If 300 is damaged and 200 in the folder
    is not, the run resumes from 200, and then 300 is renamed at the URL.

    Returns:
        False if there is no checkpoint at all.

    Raises:
        ConfigError: The URL is invalid.
        ResumeError: All checkpoints are damaged, or the URL cannot be read and may hold some.
    """
    if run_dir.exists() and not run_dir.is_dir():
        return False  # the run that follows rejects this path
    run_dir.mkdir(parents=True, exist_ok=True)
    with alone_in(run_dir):
        return _CheckpointSearch(run_dir, RemoteRun(url) if url else None).bring()


class _CheckpointSearch:
    """Searches from the newest checkpoint back to the first undamaged one."""

    def __init__(self, run_dir: Path, remote: RemoteRun | None) -> None:
        self._run_dir, self._remote = run_dir, remote
        self._here = Checkpoints.of_run(run_dir)
        # Damaged steps keep their names until the search has succeeded: if every checkpoint is
        # damaged, the user finds all of them in place.
        self._damaged_here: list[int] = []
        self._damaged_there: list[int] = []

    def bring(self) -> bool:
        """Search, then rename the damaged checkpoints that were passed on the way."""
        here, there = set(self._here.steps()), set(self._steps_there())
        for step in sorted(here | there, reverse=True):
            if (step in here and self._is_good(step)) or (step in there and self._fetch(step)):
                self._set_damaged_aside()
                return True
        if self._damaged_here or self._damaged_there:
            raise ResumeError(
                f"{self._run_dir}: every checkpoint is damaged. Restore one, or delete its "
                "checkpoints to start again."
            )
        return False

    def _steps_there(self) -> list[int]:
        if self._remote is None:
            return []
        try:
            return self._remote.steps()
        except Exception as error:  # each store has its own errors
            if not self._here.steps():
                raise self._unread(error) from error
            _log.warning(
                "%s cannot be read (%s): going on from %s",
                self._remote.url,
                reason(error),
                self._run_dir,
            )
            return []

    def _is_good(self, step: int) -> bool:
        damage = self._here.damage(step)
        if damage is None:
            return True
        _log.warning("%s is damaged (%s); trying another", self._here.path(step), damage)
        self._damaged_here.append(step)
        return False

    def _set_damaged_aside(self) -> None:
        for step in self._damaged_here:
            if self._here.damage(step) is not None:  # else a good copy from the URL replaced it
                _log.info("the damaged one is now %s", self._here.set_aside(step))
        for step in self._damaged_there:
            assert self._remote is not None
            self._remote.set_aside(step)

    def _fetch(self, step: int) -> bool:
        """Download the checkpoint of a step; return False if the copy at the URL is damaged."""
        assert self._remote is not None
        if not self._receive(step, self._bring_others):
            self._damaged_there.append(step)
            return False
        _log.info("%s: step %d comes from %s", self._run_dir, step, self._remote.url)
        return True

    def _bring_others(self, checkpoint: Path) -> None:
        """Download what belongs to a checkpoint: settings, metrics and the best checkpoint.

        This comes before the checkpoint gets its final name. So a killed download leaves no
        checkpoint that lacks them.
        """
        assert self._remote is not None
        meta = Checkpoint.meta_in(checkpoint)
        with self._reading():
            files = {
                name: self._remote.get(name) for name in (CONFIG_FILE, METRICS_FILE, *OF_THE_END)
            }
        for name, data in files.items():
            if data is not None:
                atomic_write(self._run_dir / name, data)
        best = meta.best
        if best is not None and best.step not in (meta.step, *self._here.steps()):
            self._receive(best.step)

    def _receive(self, step: int, bring_others: Callable[[Path], None] = lambda _: None) -> bool:
        """Download and verify a checkpoint; return False if it is damaged.

        A damaged download is repeated once: the connection may have damaged it.
        """
        assert self._remote is not None
        for _ in range(2):
            try:
                with self._here.receive(step) as folder:
                    with self._reading():
                        self._remote.get_checkpoint(step, folder)
                    Checkpoint.open(folder)
                    bring_others(folder)
                return True
            except DAMAGE as error:
                damage = reason(error)
        _log.warning("%s: step %d is damaged there (%s)", self._remote.url, step, damage)
        return False

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each store has its own errors
            raise self._unread(error) from error

    def _unread(self, error: Exception) -> ResumeError:
        assert self._remote is not None
        return ResumeError(
            f"{self._remote.url}: cannot be read ({reason(error)}), and may hold the newest "
            "checkpoint. Make it readable, or go on without --upload."
        )
