"""`--resume auto`: the newest whole checkpoint, in the run's folder or at a URL."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.storage import alone_in, atomic_write
from tokenfeed.trainer.checkpoints.checkpoint_format import read_meta, verify_checkpoint
from tokenfeed.trainer.checkpoints.remote_copy import RemoteRun, reason
from tokenfeed.trainer.checkpoints.retention import DAMAGE, Checkpoints
from tokenfeed.trainer.checkpoints.uploader import OF_THE_END
from tokenfeed.trainer.config.run_config import CONFIG_FILE, METRICS_FILE

__all__ = ["bring_newest"]

_log = logging.getLogger(__name__)


def bring_newest(run_dir: Path, url: str | None) -> bool:
    """Make the newest whole checkpoint the latest in a run's folder; its bytes are all read.

    One that is damaged is told and set aside, and the one before it taken. From a URL come also the
    run's settings and metrics, and its best checkpoint.

    Returns:
        False where there is no checkpoint at all.

    Raises:
        ConfigError: The URL is invalid.
        ResumeError: All are damaged, or the URL cannot be read and may hold some.
    """
    if run_dir.exists() and not run_dir.is_dir():
        return False  # a run is refused there
    run_dir.mkdir(parents=True, exist_ok=True)
    with alone_in(run_dir):
        return _CheckpointSearch(run_dir, RemoteRun(url) if url else None).bring()


class _CheckpointSearch:
    """Goes from the newest checkpoint back to the first that is not damaged."""

    def __init__(self, run_dir: Path, remote: RemoteRun | None) -> None:
        self._run_dir, self._remote = run_dir, remote
        self._here = Checkpoints.of_run(run_dir)
        self._amends: list[Callable[[], object]] = []
        """What is done about damaged ones, once there is another to go on from."""

    def bring(self) -> bool:
        here, there = set(self._here.steps()), set(self._steps_there())
        for step in sorted(here | there, reverse=True):
            if (step in here and self._is_good(step)) or (step in there and self._fetch(step)):
                for amend in self._amends:
                    amend()
                return True
        if self._amends:
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
        except Exception as error:  # each file system has its own
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
        self._amends.append(partial(self._set_aside, step))
        return False

    def _set_aside(self, step: int) -> None:
        """Unless a good one has taken its place."""
        if self._here.damage(step) is not None:
            _log.info("the damaged one is now %s", self._here.set_aside(step))

    def _fetch(self, step: int) -> bool:
        """Whether the checkpoint of a step could be taken over from the URL."""
        assert self._remote is not None
        if not self._receive(step, self._bring_others):
            self._amends.append(partial(self._remote.set_aside, step))
            return False
        _log.info("%s: step %d comes from %s", self._run_dir, step, self._remote.url)
        return True

    def _bring_others(self, checkpoint: Path) -> None:
        """Bring what belongs to a checkpoint, before this has its name and can be resumed from:
        settings, metrics, and the best checkpoint that it names."""
        assert self._remote is not None
        meta = read_meta(checkpoint)
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
        """Copy a checkpoint here; once more where it is damaged, for a line may be at fault."""
        assert self._remote is not None
        for _ in range(2):
            try:
                with self._here.receive(step) as folder:
                    with self._reading():
                        self._remote.get_checkpoint(step, folder)
                    verify_checkpoint(folder)
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
        except Exception as error:  # each file system has its own
            raise self._unread(error) from error

    def _unread(self, error: Exception) -> ResumeError:
        assert self._remote is not None
        return ResumeError(
            f"{self._remote.url}: cannot be read ({reason(error)}), and may hold the newest "
            "checkpoint. Mend this, or go on without --upload."
        )
