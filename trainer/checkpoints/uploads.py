"""Copies of a run at a URL, made beside the loop, which never waits for them nor ends by them.

A thread copies the latest checkpoint and the best. What comes meanwhile waits; of several only the
latest is copied. What is being copied is kept on the disk until it is there. The best comes before
the latest, so that whoever goes on from there knows it.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.checkpoints.folder import Checkpoints, Held
from tokenfeed.trainer.checkpoints.remote import RemoteRun, patiently, reason
from tokenfeed.trainer.config import (
    CONFIG_FILE,
    METRICS_FILE,
    PAGE_FILE,
    REPORT_FILE,
    TrainConfig,
)
from tokenfeed.trainer.stall.timeline import TRACE_FILE

__all__ = ["OF_THE_END", "Uploads", "check_upload"]

_OF_A_CHECKPOINT = (CONFIG_FILE, METRICS_FILE)
OF_THE_END = (PAGE_FILE, TRACE_FILE, REPORT_FILE)
"""What a run leaves at its end; the report last, for it promises the others."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0
FINISH_S, LAST_WAITS_S = 600.0, 5.0
"""So long does a run that ends wait for the last copy, and so long at most between two tries."""

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


class Uploads:
    """Keeps the copy of a run up to date; does nothing for one without --upload."""

    def __init__(self, config: TrainConfig, checkpoints: Checkpoints) -> None:
        self._remote = RemoteRun(config.upload) if config.upload else None
        self._config, self._checkpoints = config, checkpoints
        self._condition = threading.Condition()
        self._is_behind, self._ends_at = False, math.inf
        self._step: int | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="upload")

    def begin(self) -> None:
        """Copy what is there, and from now on what comes."""
        if self._remote is not None:
            self._checkpoints.when_changed(self._wake)
            self._wake()
            self._thread.start()

    def finish(self, seconds: float | None = None) -> None:
        """Wait for the last copy, for so long at most, and say what became of it. Then no
        checkpoint is held."""
        if self._remote is None or self._thread.ident is None:
            return
        url, seconds = self._remote.url, FINISH_S if seconds is None else seconds
        with self._condition:
            self._is_behind, self._ends_at = True, time.monotonic() + seconds
            self._condition.notify()
        _log.info("uploading to %s, for %.0f s at most", url, seconds)
        self._thread.join(seconds)
        self._checkpoints.delete_old(self._config.keep)
        if self._thread.is_alive() or self._error is not None:
            _log.warning("%s: %s. Start it again with --resume to upload that.", url, self._lack())
        else:
            _log.info("uploaded to %s", url)

    @property
    def _is_ending(self) -> bool:
        return self._ends_at < math.inf

    def _lack(self) -> str:
        found = "no checkpoint is there" if self._step is None else f"has step {self._step} only"
        cause = "it takes longer" if self._error is None else reason(self._error)
        return f"the end of the run was not uploaded, {found} ({cause})"

    def _wake(self) -> None:
        with self._condition:
            self._is_behind = True
            self._condition.notify()

    def _work(self) -> None:
        failed_at, wait_s = None, FIRST_WAIT_S
        while self._wait_for_news():
            try:
                self._copy()
            except Exception as error:  # each file system has its own
                failed_at = failed_at or time.monotonic()
                self._failed(error, time.monotonic() - failed_at, wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                if failed_at is not None:
                    _log.info("uploads go on")
                self._error, failed_at, wait_s = None, None, FIRST_WAIT_S

    def _wait_for_news(self) -> bool:
        """Whether to copy; False at the end."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_behind or self._is_ending)
            is_wanted = self._is_behind and time.monotonic() < self._ends_at
            self._is_behind = False
            return is_wanted

    def _failed(self, error: Exception, since_s: float, wait_s: float) -> None:
        """Log the error and wait; for a shorter time where the run ends."""
        assert self._remote is not None
        self._error = error
        with self._condition:
            if self._is_ending:
                wait_s = min(wait_s, LAST_WAITS_S)
        _log.warning(
            "upload to %s fails, for %.0f s now (%s); next try in %.0f s, and the run goes on",
            self._remote.url,
            since_s,
            reason(error),
            wait_s,
        )
        with self._condition:
            if self._is_ending:
                self._condition.wait(min(wait_s, LAST_WAITS_S))
            else:
                self._condition.wait_for(lambda: self._is_ending, wait_s)
            self._is_behind = True

    def _copy(self) -> None:
        """Bring all that is there up to date. First what a checkpoint needs; last the report, as it
        was before: one that is finished promises the last checkpoint and the best."""
        assert self._remote is not None
        told = self._read(OF_THE_END)
        with self._checkpoints.hold() as held:
            for name, data in self._read(_OF_A_CHECKPOINT).items():
                self._remote.put(data, name)
            self._copy_checkpoints(self._remote, held)
        for name, data in told.items():
            self._remote.put(data, name)
        self._step = held.latest

    def _read(self, names: tuple[str, ...]) -> dict[str, bytes]:
        paths = [self._config.run_dir / name for name in names]
        return {path.name: path.read_bytes() for path in paths if path.exists()}

    def _copy_checkpoints(self, remote: RemoteRun, held: Held) -> None:
        best = held.best.step if held.best else None
        for step in sorted({step for step in (held.latest, best) if step is not None}):
            remote.put_checkpoint(self._checkpoints.path(step))
        if held.latest is not None:
            remote.delete_old(held.latest, self._config.keep, best)


def check_upload(config: TrainConfig) -> None:
    """Refuse a URL that has gone further than the run's folder: it would lose what it has; and one
    that cannot be written, before hours are trained for it.

    Raises:
        ConfigError: It has, or cannot be; or a new run cannot learn whether it has.
    """
    if config.upload is None:
        return
    remote, steps = RemoteRun(config.upload), Checkpoints.of_run(config.run_dir).steps()
    if remote.is_in(config.run_dir):
        raise ConfigError(f"`--upload`: {config.upload} is in --run-dir. Give another place.")
    if remote.holds_shards():
        raise ConfigError(
            f"`--upload`: {config.upload} holds shards, and a run would mix its files with them. "
            "Give another URL."
        )
    there = _tried(remote.steps, "read", config.upload, begins=not steps)
    if there and there[-1] > max(steps, default=0):
        raise ConfigError(
            f"`--upload`: {config.upload} holds step {there[-1]}, and {config.run_dir} does not. "
            "Add --resume auto to go on from there, or give another URL."
        )
    if there is not None:
        _tried(remote.check_writable, "written", config.upload, begins=not steps)


def _tried(job: Callable[[], Value], done: str, url: str, *, begins: bool) -> Value | None:
    """What the job returns; None where it fails, and a run that goes on may go on without."""
    try:
        return patiently(job)
    except Exception as error:  # each file system has its own
        if begins:
            raise ConfigError(
                f"`--upload`: {url} cannot be {done} ({reason(error)}). Mend this, or leave "
                "--upload out."
            ) from error
        _log.warning("%s cannot be %s (%s); the run goes on", url, done, reason(error))
        return None
