"""`--resume auto`: find the newest undamaged checkpoint, in the run's folder or at a URL."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.storage import alone_in, atomic_write
from tokenfeed.trainer.checkpoints.checkpoint_format import Checkpoint
from tokenfeed.trainer.checkpoints.retention import DAMAGE, Checkpoints
from tokenfeed.trainer.checkpoints.uploader import OF_THE_END, RemoteRun, reason
from tokenfeed.trainer.config.run_config import CONFIG_FILE, METRICS_FILE

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
        here = Checkpoints.of_run(run_dir)
        if url is None:
            return _search(here, here.steps(), [], None)
        download = _Download(run_dir, here, RemoteRun(url))
        return _search(here, here.steps(), download.steps(), download)


def _search(
    here: Checkpoints, steps: list[int], there: list[int], download: "_Download | None"
) -> bool:
    """Search from the newest checkpoint back to the first undamaged one.

    Damaged checkpoints keep their names until the search has succeeded: if every checkpoint is
    damaged, the user finds all of them in place.
    """
    damaged: list[Callable[[], object]] = []
    for step in sorted({*steps, *there}, reverse=True):
        is_found = step in steps and (damage := here.damage(step)) is None
        if step in steps and not is_found:
            _log.warning("%s is damaged (%s); trying another", here.path(step), damage)
        if not is_found and download and step in there:
            is_found = download.fetch(step)  # a good copy replaces the damaged checkpoint
            if not is_found:
                damaged.append(partial(download.remote.set_aside, step))
        if is_found:
            for set_aside in damaged:
                set_aside()
            return True
        if step in steps:
            damaged.append(partial(here.set_aside, step))
    if damaged:
        raise ResumeError(
            f"{here.path(0).parent}: every checkpoint is damaged. Restore one, or delete all of "
            "them to start again."
        )
    return False


class _Download:
    """Downloads checkpoints from the copy of a run."""

    def __init__(self, run_dir: Path, here: Checkpoints, remote: RemoteRun) -> None:
        self._run_dir, self._here, self.remote = run_dir, here, remote

    def steps(self) -> list[int]:
        """Return the steps of the copy; empty if it cannot be read, and the run has others."""
        try:
            return self.remote.steps()
        except Exception as error:  # each store has its own errors
            if not self._here.steps():
                raise self._unread(error) from error
            url, run_dir = self.remote.url, self._run_dir
            _log.warning("%s cannot be read (%s): going on from %s", url, reason(error), run_dir)
            return []

    def fetch(self, step: int) -> bool:
        """Download the checkpoint of a step; return False if the copy is damaged."""
        if not self._receive(step, self._bring_others):
            return False
        _log.info("%s: step %d comes from %s", self._run_dir, step, self.remote.url)
        return True

    def _bring_others(self, checkpoint: Path) -> None:
        """Download what belongs to a checkpoint: settings, metrics and the best checkpoint.

        This comes before the checkpoint gets its final name. So a killed download leaves no
        checkpoint that lacks them.
        """
        meta = Checkpoint.meta_in(checkpoint)
        for name in (CONFIG_FILE, METRICS_FILE, *OF_THE_END):
            with self._reading():
                data = self.remote.get(name)
            if data is not None:
                atomic_write(self._run_dir / name, data)
        if meta.best is not None and meta.best.step not in (meta.step, *self._here.steps()):
            self._receive(meta.best.step)

    def _receive(self, step: int, bring_others: Callable[[Path], None] = lambda _: None) -> bool:
        """Download and verify a checkpoint; return False if it is damaged.

        A damaged download is repeated once: the connection may have damaged it.
        """
        for _ in range(2):
            try:
                with self._here.new(step) as folder:
                    with self._reading():
                        self.remote.get_checkpoint(step, folder)
                    Checkpoint.open(folder)
                    bring_others(folder)
                return True
            except DAMAGE as error:
                damage = reason(error)
        _log.warning("%s: step %d is damaged there (%s)", self.remote.url, step, damage)
        return False

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each store has its own errors
            raise self._unread(error) from error

    def _unread(self, error: Exception) -> ResumeError:
        return ResumeError(
            f"{self.remote.url}: cannot be read ({reason(error)}), and may hold the newest "
            "checkpoint. Make it readable, or go on without --upload."
        )
