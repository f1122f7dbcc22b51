"""The `train` command: reads shards, writes a trained model and a report.

Ctrl-C, SIGTERM and SIGHUP (a closed terminal) stop the run after the current step or evaluation
batch, with a checkpoint and a report; `--resume` continues from there. A second Ctrl-C stops it at
once. SIGUSR1 saves a checkpoint, and the run continues.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
from types import FrameType

from tokenfeed.pipeline.format.store import reading_once
from tokenfeed.tools.shell.console import print_json, run_command
from tokenfeed.tools.train_settings import read_command


class SignalRequests:
    """Turn the first signal to stop, and every SIGUSR1, into requests that the loop polls."""

    def __init__(self) -> None:
        self.ended_by: int | None = None
        """The signal that requested a stop."""
        self._save = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop_later)
        if hasattr(signal, "SIGUSR1"):  # not on Windows
            signal.signal(signal.SIGUSR1, self._save_later)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
                signal.signal(signal.SIGHUP, self._stop_later)

    def should_stop(self) -> bool:
        """Whether to save and stop."""
        return self.ended_by is not None

    def should_save(self) -> bool:
        """Whether to save and continue; True once for each request."""
        if not self._save:
            return False
        self._save = False
        return True

    def _stop_later(self, number: int, frame: FrameType | None) -> None:
        self.ended_by = number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # before the line promises it
        _say(b"stopping: saving a checkpoint and the report. Press Ctrl-C again to stop at once\n")

    def _save_later(self, number: int, frame: FrameType | None) -> None:
        self._save = True
        _say(b"saving after this step\n")


def _say(line: bytes) -> None:
    """Write to stderr. Its terminal may be closed."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), line)


def main() -> None:
    """Entry point of the `train` script."""
    run_command(_run)


@reading_once()
def _run() -> int:
    if "--monitor-only" in sys.argv[1:]:
        from tokenfeed.tools.monitor import monitor

        return monitor()
    is_main = os.environ.get("RANK", "0") == "0"
    if not is_main:
        logging.getLogger("tokenfeed").setLevel(logging.WARNING)
    command = read_command()
    config = command.settings()
    if command.print_config:
        print(command.as_yaml(), end="")
        return 0

    from tokenfeed.trainer.loop.run import announce, train  # torch takes seconds to load

    if command.dry_run:
        announce(config)
        return 0
    requests = SignalRequests()
    report = train(config, requests.should_stop, requests.should_save)
    if not is_main:
        pass  # rank 0 prints it
    elif config.json:
        print_json(dataclasses.asdict(report))
    else:
        print(report.summary())
    return 0 if requests.ended_by is None else 128 + requests.ended_by


if __name__ == "__main__":
    main()
