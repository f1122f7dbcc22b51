"""`--resume auto`: find the newest checkpoint, in the run's folder or at a URL."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.storage import alone_in, atomic_write
from tokenfeed.trainer.checkpoints.checkpoint_format import CheckpointMeta
from tokenfeed.trainer.checkpoints.retention import Checkpoints, verified
from tokenfeed.trainer.checkpoints.uploader import OF_THE_END, RemoteRun, reason
from tokenfeed.trainer.config.run_config import CONFIG_FILE, METRICS_FILE

_log = logging.getLogger(__name__)


def download_newest(run_dir: Path, url: str | None) -> bool:
    """Make the newest checkpoint the latest one in a run's folder.

    A checkpoint that only the URL has is downloaded and verified. It brings the run's settings, its
    metrics and its best checkpoint along.

    Returns:
        False if there is no checkpoint at all.

    Raises:
        ConfigError: The URL is invalid.
        ResumeError: The checkpoint at the URL is damaged, or the URL cannot be read and may hold
            checkpoints.
    """
    if run_dir.exists() and not run_dir.is_dir():
        return False  # the run that follows rejects this path
    run_dir.mkdir(parents=True, exist_ok=True)
    with alone_in(run_dir):
        here = Checkpoints.of_run(run_dir)
        if url is not None:
            remote = RemoteRun(url)
            steps = _steps_of(remote, here)
            if steps and steps[-1] > max(here.steps(), default=0):
                _download(remote, run_dir, here, steps[-1])
                _log.info("%s: step %d comes from %s", run_dir, steps[-1], remote.url)
        return bool(here.steps())


def _steps_of(remote: RemoteRun, here: Checkpoints) -> list[int]:
    """Return the steps of the copy; empty if it cannot be read, and the run has others."""
    try:
        return remote.steps()
    except Exception as error:  # each store has its own errors
        if not here.steps():
            raise _unread(remote, error) from error
        _log.warning("%s cannot be read (%s): going on without it", remote.url, reason(error))
        return []


def _download(remote: RemoteRun, run_dir: Path, here: Checkpoints, step: int) -> None:
    """Download the checkpoint of a step, with settings, metrics and the best checkpoint of the run.

    These come before the checkpoint gets its final name. So a killed download leaves no checkpoint
    that lacks them.
    """
    with here.new(step) as folder:
        best = _receive(remote, step, folder).best
        for name in (CONFIG_FILE, METRICS_FILE, *OF_THE_END):
            with _reading(remote):
                data = remote.get(name)
            if data is not None:
                atomic_write(run_dir / name, data)
        if best is not None and best.step not in (step, *here.steps()):
            with here.new(best.step) as other:
                _receive(remote, best.step, other)


def _receive(remote: RemoteRun, step: int, folder: Path) -> CheckpointMeta:
    """Download a checkpoint into a folder, and verify it."""
    with _reading(remote):
        remote.get_checkpoint(step, folder)
    return verified(folder, step, where=remote.path_of(step)).meta


@contextlib.contextmanager
def _reading(remote: RemoteRun) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each store has its own errors
        raise _unread(remote, error) from error


def _unread(remote: RemoteRun, error: Exception) -> ResumeError:
    return ResumeError(
        f"{remote.url}: cannot be read ({reason(error)}), and may hold the newest checkpoint. Make "
        "it readable, or go on without --upload."
    )
