"""Upload a run in a thread. The training loop does not wait for it and does not end by it.

The thread uploads the best checkpoint, then the latest, so that a run that resumes there knows the
best. Checkpoints written meanwhile are skipped, except the latest. A checkpoint stays on the disk
until it is uploaded.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from tokenfeed.pipeline.errors import ConfigError, RemoteError
from tokenfeed.pipeline.remote.retrying import Meter, Timing, persist
from tokenfeed.trainer.checkpoints.remote_copy import RemoteRun, reason
from tokenfeed.trainer.checkpoints.retention import Checkpoints, Held
from tokenfeed.trainer.config.run_config import (
    CONFIG_FILE,
    METRICS_FILE,
    PAGE_FILE,
    REPORT_FILE,
    TRACE_FILE,
    TrainConfig,
)

__all__ = ["OF_THE_END", "Uploads", "check_upload"]

_OF_A_CHECKPOINT = (CONFIG_FILE, METRICS_FILE)
OF_THE_END = (PAGE_FILE, TRACE_FILE, REPORT_FILE)
"""Files that a run writes at its end. The report is last, for it promises the others."""

TIMING = Timing(
    give_up_s=math.inf, warn_after_s=0, first_wait_s=1.0, longest_wait_s=300.0, read_s=1.0
)
"""Uploads are repeated like this until the run ends."""
FINISH_S, LAST_WAITS_S = 600.0, 5.0
"""Seconds that a run waits for the last upload at its end, and between two tries at most."""

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


class Uploads:
    """Keep the copy of a run up to date. Without --upload, do nothing."""

    def __init__(self, config: TrainConfig, checkpoints: Checkpoints) -> None:
        self._remote = RemoteRun(config.upload) if config.upload else None
        self._config, self._checkpoints = config, checkpoints
        self._condition = threading.Condition()
        self._is_behind = False
        self._ending_s: float | None = None
        """Seconds for the last upload; None while the run goes on."""
        self._meter = Meter()
        self._step: int | None = None
        self._cause: str | None = None
        """Why the latest try failed."""
        self._thread = threading.Thread(target=self._work, daemon=True, name="upload")

    def begin(self) -> None:
        """Upload the existing files, and from now on each new checkpoint."""
        if self._remote is not None:
            self._checkpoints.when_changed(self._wake)
            self._wake()
            self._thread.start()

    def finish(self, seconds: float | None = None) -> None:
        """Wait for the last upload, for at most `seconds`, and log the result.

        Afterwards no checkpoint is held.
        """
        if self._remote is None or self._thread.ident is None:
            return
        url, seconds = self._remote.url, FINISH_S if seconds is None else seconds
        with self._condition:
            self._ending_s = seconds
            self._condition.notify()
        self._meter.abandoned.set()
        _log.info("uploading to %s, for %.0f s at most", url, seconds)
        self._thread.join(seconds)
        self._checkpoints.delete_old(self._config.keep)
        if self._thread.is_alive() or self._cause is not None:
            _log.warning(
                "%s: %s. Start the run again with --resume to upload it.", url, self._lack()
            )
        else:
            _log.info("uploaded to %s", url)

    def _lack(self) -> str:
        found = "no checkpoint is there" if self._step is None else f"has step {self._step} only"
        cause = self._cause or "it takes longer"
        return f"the end of the run was not uploaded, {found} ({cause})"

    def _wake(self) -> None:
        with self._condition:
            self._is_behind = True
            self._condition.notify()

    def _work(self) -> None:
        while (seconds := self._wait_for_news()) is None:
            with contextlib.suppress(RemoteError):  # broken off: the run ends
                self._copy_at_last(TIMING)
        self._meter.abandoned.clear()
        with contextlib.suppress(RemoteError):  # `finish` logs the cause
            last_wait_s = min(TIMING.longest_wait_s, LAST_WAITS_S)
            self._copy_at_last(replace(TIMING, give_up_s=seconds, longest_wait_s=last_wait_s))

    def _wait_for_news(self) -> float | None:
        """Wait until something is to be uploaded; return the seconds left if the run ends."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_behind or self._ending_s is not None)
            self._is_behind = False
            return self._ending_s

    def _copy_at_last(self, timing: Timing) -> None:
        assert self._remote is not None
        persist(self._copy, self._cause_of, f"upload to {self._remote.url}", timing, self._meter)
        if self._cause is not None:
            _log.info("uploads go on")
        self._cause = None

    def _cause_of(self, error: Exception) -> str:
        self._cause = reason(error)
        return self._cause

    def _copy(self) -> None:
        """Upload everything that changed: first what a checkpoint needs, last the report.

        The report is read first. A finished report promises the last checkpoint and the best.
        """
        assert self._remote is not None
        ends = self._read(OF_THE_END)
        with self._checkpoints.hold() as held:
            for name, data in self._read(_OF_A_CHECKPOINT).items():
                self._remote.put(data, name)
            self._copy_checkpoints(self._remote, held)
        for name, data in ends.items():
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
    """Reject --upload if its URL holds later steps than the run's folder, or cannot be written.

    Raises:
        ConfigError: One of these is the case, or a new run cannot read the URL.
    """
    if config.upload is None:
        return
    remote, steps = RemoteRun(config.upload), Checkpoints.of_run(config.run_dir).steps()
    if remote.is_in(config.run_dir):
        raise ConfigError(f"`--upload`: {remote.url} is in --run-dir. Give another place.")
    if remote.holds_shards():
        raise ConfigError(
            f"`--upload`: {remote.url} holds shards, and a run would mix its files with them. "
            "Give another URL."
        )
    there = _tried(remote.steps, "read", remote.url, begins=not steps)
    if there and there[-1] > max(steps, default=0):
        raise ConfigError(
            f"`--upload`: {remote.url} holds step {there[-1]}, and {config.run_dir} does not. "
            "Add --resume auto to go on from there, or give another URL."
        )
    if there is not None:
        _tried(remote.check_writable, "written", remote.url, begins=not steps)


def _tried(job: Callable[[], Value], done: str, url: str, *, begins: bool) -> Value | None:
    """Return the result of a job; None if it fails and the run has checkpoints to resume from."""
    try:
        return job()
    except Exception as error:  # each store has its own errors
        if begins:
            raise ConfigError(
                f"`--upload`: {url} cannot be {done} ({reason(error)}). Make it accessible, "
                "or leave --upload out."
            ) from error
        _log.warning("%s cannot be %s (%s); the run goes on", url, done, reason(error))
        return None
