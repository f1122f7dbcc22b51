"""Work in threads gives its results in order, and begins no more after an error."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tokenfeed.pipeline.remote.retrying import results_of


def test_after_an_error_no_more_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    ended, shutdown = threading.Event(), ThreadPoolExecutor.shutdown

    def end(threads: ThreadPoolExecutor, **options: bool) -> None:
        shutdown(threads, wait=False, **options)
        ended.set()
        shutdown(threads)

    def do(number: int) -> int:
        begun.append(number)
        if number == 5:
            raise ValueError
        assert number < 5 or ended.wait(60)
        return -number

    assert list(results_of(lambda number: -number, range(3_000), 4)) == list(range(0, -3_000, -1))
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", end)
    with pytest.raises(ValueError):
        list(results_of(do, range(3_000), 2))
    assert 5 in begun
    assert len(begun) <= 8, "the other thread does one more thing, and both have begun another"
