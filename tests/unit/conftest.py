"""Unit tests run in process, and every error of tokenfeed is one line: other tests fail."""

import sys
from collections.abc import Iterator
from multiprocessing import process

import pytest

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.tools.jobs import executors

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
started: list[str] = []


def _note(event: str, _: object) -> None:
    if event in STARTS:
        started.append(event)


sys.addaudithook(_note)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a process was started: such a test belongs to tests/commands."""
    monkeypatch.setattr(executors, "IN_CHILDREN", set())
    monkeypatch.setattr(process.BaseProcess, "start", lambda _: started.append("multiprocessing"))
    started.clear()
    yield
    assert not started, "a test that starts processes belongs to tests/commands"


@pytest.fixture(autouse=True)
def one_line_errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where an error of tokenfeed was made whose message has several lines."""
    messages: list[str] = []

    def made(error: TokenfeedError, *arguments: object) -> None:
        super(TokenfeedError, error).__init__(*arguments)
        messages.append(str(error))

    monkeypatch.setattr(TokenfeedError, "__init__", made)
    yield
    assert [message for message in messages if "\n" in message] == []
