"""Work beside the loop, in its order."""

import threading
from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """Does jobs one after another in threads; after one has failed, none that was asked for before
    that is told.

    The threads do not keep the process alive.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None
        self._error: Exception | None = None
        self._failed = threading.Event()
        """Of the jobs since an error was told last; those before have one of their own."""

    def do(self, job: Callable[[], object]) -> None:
        """Begin a job when those before are done; does not wait."""
        before, failed = self._last, self._failed

        def work() -> None:
            if before is not None:
                before.join()
            if not failed.is_set():
                try:
                    job()
                except Exception as error:
                    failed.set()
                    self._error = error

        thread = threading.Thread(target=work, daemon=True, name="checkpoint")
        thread.start()
        self._last = thread

    def check(self) -> None:
        """Raise what a job has raised, once; does not wait."""
        error, self._error = self._error, None
        if error is not None:
            self._failed = threading.Event()
            raise error

    def wait(self) -> None:
        """Wait for all jobs; raise what one has raised."""
        if self._last is not None:
            self._last.join()
            self._last = None
        self.check()
