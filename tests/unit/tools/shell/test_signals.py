"""An interruption waits for the end of what must not be broken into, and is not lost."""

import os
import signal
import threading

import pytest

from tokenfeed.tools.shell.console import signals_held


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    done = []

    def work() -> None:
        with signals_held():
            killer = threading.Thread(target=os.kill, args=(os.getpid(), number))
            killer.start()
            killer.join()
            done.append("all of it")

    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)
    assert done == ["all of it"]


def test_without_a_signal_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGINT)
    with signals_held():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
