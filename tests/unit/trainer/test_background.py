"""Jobs beside the loop are done in their order; those behind a failed one are not."""

import threading

import pytest
from delivery import eventually

from tokenfeed.trainer.checkpoints.async_saver import Background


def fail() -> None:
    raise OSError("no room")


def tells(jobs: Background) -> bool:
    try:
        jobs.check()
    except OSError:
        return True
    return False


def test_what_was_asked_for_before_an_error_is_told_is_never_done() -> None:
    jobs, done, is_told = Background(), list[str](), threading.Event()
    jobs.do(fail)
    failing = jobs._last
    assert failing
    join = failing.join

    def join_late(timeout: float | None = None) -> None:
        join(timeout)
        is_told.wait(60)

    failing.join = join_late  # type: ignore[method-assign]
    jobs.do(lambda: done.append("behind"))  # which comes to its turn after the error is told
    assert eventually(lambda: tells(jobs))
    is_told.set()
    jobs.do(lambda: done.append("after"))
    jobs.wait()
    assert done == ["after"]


def test_an_error_is_told_once_by_who_waits() -> None:
    jobs = Background()
    jobs.do(fail)
    with pytest.raises(OSError, match="no room"):
        jobs.wait()
    jobs.wait()
