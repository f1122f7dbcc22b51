"""Unit tests run in process: one that starts another process fails."""

import sys
from collections.abc import Iterator
from multiprocessing import process

import pytest

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
started: list[str] = []


def _note(event: str, _: object) -> None:
    if event in STARTS:
        started.append(event)


sys.addaudithook(_note)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a process was started: such a test belongs to tests/commands."""
    monkeypatch.setattr(process.BaseProcess, "start", lambda _: started.append("multiprocessing"))
    started.clear()
    yield
    assert not started, "a test that starts processes belongs to tests/commands"
